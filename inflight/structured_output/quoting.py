"""`Quoting`: whether a tag that comes next in a text would be a quotation: code, or text behind a quotation mark.

The parser of an answer and the bound for its reasoning ask this for opening tags behind text. So for both, reasoning begins
with the same tags.
"""

from typing import NamedTuple

_MARKS = tuple(mark.encode() for mark in ("`", '"', "'", "“", "‘", "«"))
_FENCE = b"```"
_NUM_OF_LINE = 16  # bytes of a line that are kept: enough for a fence and the white space before it
_NUM_LAST = max(map(len, _MARKS))


class Quoting(NamedTuple):
    """What is known of a text up to here, which may end within a character.

    Attributes:
        line: the first bytes of its last line.
        num_backticks: in this line.
        is_in_block: whether the line is in a block of Markdown.
        last: the last bytes.
    """

    line: bytes = b""
    num_backticks: int = 0
    is_in_block: bool = False
    last: bytes = b""

    @property
    def is_quoted(self) -> bool:
        is_code = self.is_in_block or self.num_backticks % 2 == 1 or self.line.lstrip().startswith(_FENCE)
        return is_code or self.last.endswith(_MARKS)

    def after(self, text: bytes) -> "Quoting":
        """The same behind more text."""
        if not text:
            return self
        line, num_backticks, is_in_block = self.line, self.num_backticks, self.is_in_block
        first, *lines = text.split(b"\n")
        for i, piece in enumerate((first, *lines)):
            if i:
                is_in_block ^= line.lstrip().startswith(_FENCE)
                line = b""
                num_backticks = 0
            line = (line + piece)[:_NUM_OF_LINE] if len(line) < _NUM_OF_LINE else line
            num_backticks += piece.count(b"`")
        return Quoting(line, num_backticks, is_in_block, (self.last + text)[-_NUM_LAST:])
