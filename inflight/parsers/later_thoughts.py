"""`LaterThoughts`: reads reasoning that comes again in the middle of an answer, behind text or a call.

An opening tag there may also be a part of the text. So it begins reasoning only if its closing tag follows before the next
opening tag, within `_MOST_HELD` characters. A tag in code (in backticks or in a block of Markdown) and one directly behind a
quotation mark is text (`Quoting`).
"""

import re

from inflight.parsers.event_writer import EventWriter
from inflight.parsers.text_reader import Steps, TextReader
from inflight.structured_output.quoting import Quoting

_MOST_HELD = 2**16


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
        self._quoting = Quoting()

    def see(self, text: str) -> None:
        """Content has come."""
        if self.begins:
            self._quoting = self._quoting.after(text.encode("utf-8", "surrogatepass"))

    def add_piece(self) -> None:
        """A piece of the text has been read in which no reasoning has begun."""
        self._num_waiting_pieces += self._is_open

    def read(self) -> Steps[None]:
        """Read the reasoning whose opening tag has been read, or write the tag as content."""
        begin = self.begins[0]
        thought = "" if self._quoting.is_quoted else (yield from self._thought(begin))
        if not thought:
            self._writer.content(begin)
            return
        self.num_pieces += self._num_waiting_pieces
        self._writer.later_reasoning(thought[: -len(self._end)])

    def _thought(self, begin: str) -> Steps[str]:
        """Consume and return the text up to the closing tag and this tag. If it does not come, nothing is consumed, and "" is
        returned."""
        self.num_begun += 1
        self._num_waiting_pieces = 0
        self._is_open = True
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
