"""`TextReader`: lets a generator read a text that arrives in pieces. The generator pauses until the next piece comes.

A parser is written as if the whole text were there. If it needs more text, its generator yields, and continues after the next
call of `push`. If a parser reads only through the methods of `TextReader`, its result does not depend on how the text was
split. Each character is looked at a bounded number of times, because the text that is kept from one push to the next is at most
a part of a literal (a fixed text, such as `<tool_call>`).
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

BLANKS = re.compile(r"[ \t\r\n]+")
_MAX_BLANKS = 256  # how many characters of white space `follows` skips at most
# A text that may come next -> what may come after it: another Following, or None if anything may.
Following = Mapping[str, Any]

ANYTHING = re.compile(r"(?s:.)+")
Steps = Generator[None, None, _T]  # yields when it needs more text, and returns a T


class Literals:
    """Many fixed texts, of which one may come next. Looking for it takes as long with a thousand as with ten."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._all = frozenset(literals)
        self._sorted = sorted(self._all)
        self._sizes = sorted({len(literal) for literal in self._all})

    @property
    def longest(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    def at(self, text: str, position: int) -> str:
        """The shortest literal that stands at this position; "" if there is none."""
        pieces = (text[position : position + size] for size in self._sizes)
        return next((piece for piece in pieces if piece in self._all), "")

    def may_begin_with(self, text: str) -> bool:
        i = bisect_left(self._sorted, text)
        return i < len(self._sorted) and self._sorted[i].startswith(text)


class TextReader:
    """
    Attributes:
        is_cut: whether a limit has ended the text, so that the model would have written more.
    """

    def __init__(self) -> None:
        self.is_cut = False
        self._text = ""
        self._position = 0
        self._is_finished = False

    def push(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def finish(self, *, is_cut: bool = False) -> None:
        """No more text will come."""
        self._is_finished = True
        self.is_cut = is_cut

    def put_back(self, text: str) -> None:
        """Undo the consumption of `text`: it comes next again."""
        self._text = text + self._text[self._position :]
        self._position = 0

    def peek(self) -> Steps[str]:
        """Returns the next character without consuming it; "" at the end of all text."""
        while self._position == len(self._text):
            if self._is_finished:
                return ""
            yield
        return self._text[self._position]

    def start(self, num_chars: int) -> Steps[str]:
        """Returns the next `num_chars` characters, or fewer at the end of all text, without consuming them."""
        while len(self._text) - self._position < num_chars and not self._is_finished:
            yield
        return self._text[self._position : self._position + num_chars]

    def next_visible(self, num_chars: int = 1) -> Steps[str]:
        """Returns the next `num_chars` characters that are not white space, without consuming anything. There are fewer at the
        end of all text. Behind more white space than is looked at, the last one is " "."""
        while True:
            found = ""
            position = self._position
            while len(found) < num_chars:
                blanks = BLANKS.match(self._text, position, position + _MAX_BLANKS)
                end = blanks.end() if blanks else position
                if end - position == _MAX_BLANKS:
                    return found + " "
                if end == len(self._text):
                    break
                found += self._text[end]
                position = end + 1
            if len(found) == num_chars or self._is_finished:
                return found
            yield

    def take(self, num_chars: int) -> str:
        """Consume and return the next characters. They must have arrived."""
        start = self._position
        self._position += num_chars
        assert self._position <= len(self._text)
        return self._text[start : self._position]

    def is_at_cut(self) -> Steps[bool]:
        """Whether the text ends here, because a limit has cut it."""
        return not (yield from self.peek()) and self.is_cut

    def piece(self, run: re.Pattern[str], limit: int | None = None) -> Steps[str]:
        """Consume and return the part of a run that has arrived, at most `limit` characters; "" if no run comes next.

        `run` matches one class of characters, repeated: "[^<]+". If a run continues in the next push, it is returned in pieces.
        """
        if not (yield from self.peek()):
            return ""
        end = len(self._text) if limit is None else self._position + limit
        found = run.match(self._text, self._position, end)
        return self.take(found.end() - self._position) if found else ""

    def until(self, write: Callable[[str], None], *markers: str) -> Steps[str]:
        """Consume the first of `markers` that comes and the text before it, and write the text before it piece by piece.
        Returns the marker. If none comes, the whole text is consumed and written, and "" is returned."""
        plain = re.compile(f"[^{re.escape(''.join(marker[0] for marker in markers))}]+")
        while (yield from self.peek()):
            if piece := (yield from self.piece(plain)):
                write(piece)
            elif marker := (yield from self.literal(*markers)):
                return marker
            else:
                write(self.take(1))
        return ""

    def all(self, write: Callable[[str], None]) -> Steps[None]:
        """Consume the text up to its end, and write it piece by piece."""
        while piece := (yield from self.piece(ANYTHING)):
            write(piece)

    def take_cut(self, *literals: str) -> str | None:
        """If the text has ended and the rest of it is the beginning of a literal, consume and return the rest, which may be
        empty. Otherwise return None.
        """
        rest = _beginning(self._text, self._position, literals)
        is_cut = self._is_finished and any(literal.startswith(rest) for literal in literals)
        return self.take(len(rest)) if is_cut else None

    def literal(self, *literals: str) -> Steps[str]:
        """If one of `literals` comes next in the text, consume and return it. Return "" as soon as it is certain that none
        of them comes next."""
        found = yield from self.comes(*literals)
        return self.take(len(found))

    def comes(self, *literals: str) -> Steps[str]:
        """Returns the one of `literals` that comes next, without consuming it. Returns "" as soon as it is certain that none of
        them comes next."""
        while True:
            num_left = len(self._text) - self._position
            is_open = False
            for literal in literals:
                if self._text.startswith(literal, self._position):
                    return literal
                is_open |= num_left < len(literal) and literal.startswith(self._text[self._position :])
            if not is_open or self._is_finished:
                return ""
            yield

    def comes_of(self, literals: Literals, offset: int = 0) -> Steps[str]:
        """As `comes`, for many literals. `offset`: where the literal begins, in characters that have arrived."""
        while True:
            start = self._position + offset
            if found := literals.at(self._text, start):
                return found
            rest = self._text[start : start + literals.longest]
            if self._is_finished or not literals.may_begin_with(rest):
                return ""
            yield

    def follows(self, following: Following) -> Steps[bool]:
        """Whether the text goes on as `following` says. White space may be between the parts, and the text may end before the
        last part. Nothing is consumed."""
        while (found := _matches(self._text, self._position, following)) is None and not self._is_finished:
            yield
        return found is not False


def _matches(text: str, position: int, following: Following) -> bool | None:
    """Whether `text` goes on at `position` as `following` says; None if this depends on text that has not come yet."""
    blanks = BLANKS.match(text, position, position + _MAX_BLANKS)
    start = blanks.end() if blanks else position
    if start - position == _MAX_BLANKS:
        return True
    for literal, after in following.items():
        if text.startswith(literal, start):
            return after is None or _matches(text, start + len(literal), after)
    rest = _beginning(text, start, following)
    if any(literal.startswith(rest) for literal in following):
        return None
    return False


def _beginning(text: str, start: int, literals: Iterable[str]) -> str:
    """The text from `start`, or as much of it as is longer than each literal: the rest of a long text is not copied."""
    return text[start : start + max(map(len, literals), default=0) + 1]
