"""`AnswerTags`: leaves out the tags that some families write around their answer, behind the reasoning.

    <think>The user wants...</think><response>It rains.</response>

An opening tag counts only at the beginning of the answer, and a closing tag only at its end. Elsewhere they are text.
"""

_MAX_BLANKS = 256  # characters of white space next to a tag
_BLANKS = " \t\r\n"


class AnswerTags:
    """Gets the text of an answer in pieces, and returns it without the tags.

    Args:
        begins: opening tags. Several of them may come one after another.
        ends: closing tags.
    """

    def __init__(self, begins: tuple[str, ...], ends: tuple[str, ...]) -> None:
        self._begins = begins
        self._ends = ends
        self._held = ""
        self._is_started = not begins

    def write(self, text: str) -> str:
        """Returns the text that can be shown now."""
        text = self._held + text
        self._held = ""
        while not self._is_started:
            body = text.lstrip(_BLANKS)
            tag = next((begin for begin in self._begins if body.startswith(begin)), "")
            if not tag and len(text) - len(body) < _MAX_BLANKS and any(tag.startswith(body) for tag in self._begins):
                self._held = text
                return ""
            self._is_started = not tag
            text = body[len(tag) :] if tag else text
        start = len(text[: self._start_of_end(text)].rstrip(_BLANKS))
        if len(text) - start > 2 * _MAX_BLANKS + max(map(len, self._ends), default=0):
            return text
        self._held = text[start:]
        return text[:start]

    def release(self) -> str:
        """The answer has ended. Returns the rest of its text."""
        rest = self._held
        self._held = ""
        if self._is_started and rest.strip(_BLANKS) in self._ends:
            return ""
        return rest

    def _start_of_end(self, text: str) -> int:
        """The place from which the text may be a closing tag; the end of the text if there is none."""
        body = text.rstrip(_BLANKS)
        found = [len(text)]
        for end in self._ends:
            if body.endswith(end):
                found.append(len(body) - len(end))
            starts = range(max(0, len(text) - len(end) + 1), len(text))
            found += [start for start in starts if end.startswith(text[start:])][:1]
        return min(found)
