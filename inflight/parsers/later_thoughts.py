"""`LaterThoughts`: reads reasoning that comes again in the middle of an answer, behind text or a call.

An opening tag there may also be a part of the text. So it begins reasoning only if its closing tag follows before the next
opening tag, within `_MOST_HELD` characters. A tag in code (in backticks or in a block of Markdown) and one directly behind a
quotation mark is text.
"""

import re

from inflight.parsers.event_writer import EventWriter
from inflight.parsers.text_reader import Steps, TextReader

_MOST_HELD = 2**16
_QUOTES = ("`", '"', "'", "“", "‘", "«")
_FENCE = "```"


class LaterThoughts:
    """
    Args:
        begin, end: the tags; both are "" if there is no reasoning behind content.

    Attributes:
        begins: the opening tag, as texts to look for.
        num_begun: how many opening tags have been read that may begin reasoning.
        num_pieces: how many pieces of the text were reasoning. Those of a thought count when it ends.
    """

    def __init__(self, reader: TextReader, writer: EventWriter, begin: str, end: str) -> None:
        self.begins: tuple[str, ...] = (begin,) if begin else ()
        self.num_begun = 0
        self.num_pieces = 0
        self._num_waiting_pieces = 0  # since the last opening tag
        self._is_open = False  # its closing tag is awaited
        self._end = end
        self._reader = reader
        self._writer = writer
        self._line = ""  # the beginning of the last line
        self._is_in_block = False
        self._num_backticks = 0  # in the last line
        self._last = ""  # the last character

    def see(self, text: str) -> None:
        """Content has come."""
        if not self.begins:
            return
        self._last = text[-1:]
        first, *lines = text.split("\n")
        self._add_to_line(first)
        for line in lines:
            self._is_in_block ^= self._line.lstrip().startswith(_FENCE)
            self._line, self._num_backticks = "", 0
            self._add_to_line(line)

    def add_piece(self) -> None:
        """A piece of the text has been read in which no reasoning has begun."""
        self._num_waiting_pieces += self._is_open

    def _add_to_line(self, text: str) -> None:
        self._line = (self._line + text)[:16]
        self._num_backticks += text.count("`")

    def read(self) -> Steps[None]:
        """Read the reasoning whose opening tag has been read, or write the tag as content."""
        begin = self.begins[0]
        is_code = self._is_in_block or self._num_backticks % 2 == 1 or self._line.lstrip().startswith(_FENCE)
        thought = "" if is_code or self._last in _QUOTES else (yield from self._thought(begin))
        if not thought:
            self._writer.content(begin)
            return
        self.num_pieces += self._num_waiting_pieces
        self._writer.begin_reasoning()
        self._writer.reasoning("\n\n")  # between two thoughts; dropped before the first
        self._writer.reasoning(thought[: -len(self._end)])
        self._writer.end_reasoning()

    def _thought(self, begin: str) -> Steps[str]:
        """Consume and return the text up to the closing tag and this tag. If it does not come, nothing is consumed, and "" is
        returned."""
        self.num_begun += 1
        self._num_waiting_pieces, self._is_open = 0, True
        found = yield from self._up_to_end(begin)
        self._is_open = False
        return found

    def _up_to_end(self, begin: str) -> Steps[str]:
        pieces: list[str] = []
        room = _MOST_HELD
        plain = re.compile(f"[^{re.escape(begin[0] + self._end[0])}]+")
        while room > 0 and (yield from self._reader.peek()) and not (yield from self._reader.comes(begin)):
            if tag := (yield from self._reader.literal(self._end)):
                return "".join(pieces) + tag
            pieces.append((yield from self._reader.piece(plain, room)) or self._reader.take(1))
            room -= len(pieces[-1])
        self._reader.put_back("".join(pieces))
        return ""
