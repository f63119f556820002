"""Where a reader of JSON is between two tokens: what has begun, and what may come next."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol


class Status(IntEnum):
    OPEN = 0  # the value goes on
    CLOSED = 1
    STOPPED = 2  # a text that ends the arguments has come, or the text has ended; the value has not
    ERROR = 3


class Next(IntEnum):
    """What may come next."""

    FIRST_KEY = 0
    KEY = 1
    COLON = 2
    VALUE = 3  # of a key, or the whole value
    FIRST_ITEM = 4
    ITEM = 5
    COMMA = 6


class ValueSchema(Protocol):
    """What is known about the type of a value: `ArgumentSchema`."""

    @property
    def types(self) -> frozenset[str]: ...

    def argument(self, name: str) -> ValueSchema: ...

    def item(self) -> ValueSchema: ...

    def has_key_in(self, text: str) -> bool: ...

    def read_word(self, text: str) -> str: ...


class Level(NamedTuple):
    """An object or a list whose end has not come yet."""

    opening: str
    schema: ValueSchema | None  # of the object or the list
    outer: Level | None
    is_spaced: bool = False  # white space stands behind a comma
    has_long_number: bool = False  # an item is a number of several digits
    num_commas: int = 0
    value_schema: ValueSchema | None = None  # of the value that comes next

    @property
    def may_miss_comma(self) -> bool:
        """Whether a comma may be missing in a number of a list, because it stands at a wrong place: as in `[12,]` for
        `[1,2]`."""
        return self.has_long_number and not self.is_spaced


class State(NamedTuple):
    """Where a reader is between two tokens."""

    level: Level | None
    next: Next
    has_gap: bool  # white space or a comment stands before the next token
    num_commas: int = 0  # how many commas were missing
    num_guesses: int = 0  # how many commas were too many, words had no quotes, and strings had line breaks
