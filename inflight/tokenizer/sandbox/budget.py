"""`TemplateBudget`: how much work and memory one rendering of a chat template may take, and what it has left.

A step is the work of about 50 ns. Steps are counted, not measured, so the same rendering succeeds on every machine. Only a
template that finds work which is not counted meets the limit of processor time.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set, Sized, ValuesView
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, cast

import jinja2

MAX_TEXT = 2**25  # characters of one text
MAX_ITEMS = 2**20  # entries of one container, with those of the containers in it
MAX_DEPTH = 200  # containers in containers; Python's own hash of a tuple knows no limit, and ends the process
MAX_BITS = 4096  # of an integer
MAX_NUMBER = 10_000  # a width or a precision in a format

_MOST_STEPS = 2**29
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 30.0
_STEP_SECONDS = 250e-9  # five times as much as on the machine on which steps were measured
_MOST_CHARACTERS = 2**31
_OBJECT_CHARACTERS = 32  # of a new number
_SLICE = 2**16  # steps between two looks at the clock
# After so much processor time a rendering in a thread gives way at each look at the clock, for so many times as long as it has
# worked since the last look. Otherwise Python lets the event loop beside it run only every 5 ms, for each thread that renders.
_SHORT_SECONDS = 0.05
_PAUSES = 3
_ITEM_STEPS = 40
_FILTERED_STEPS = 250  # a filter or test is called by its name
_MAX_KNOWN = 2**16
_PLAIN_CHARACTERS = 24  # a float, as Python or JSON writes it
_PLAIN = frozenset((float, bool, type(None)))

Size = tuple[int, int, int]  # entries, characters (about as many as JSON has), depth


def _is_wanted() -> bool:
    return False


# Whether nobody waits for the rendering any more. Who renders in a thread sets it there; any thread may call it.
IS_UNWANTED: ContextVar[Callable[[], bool]] = ContextVar("inflight_is_unwanted", default=_is_wanted)


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """The template does more than a rendering may."""


class TemplateBudget:
    """Of one rendering, which ends early if `IS_UNWANTED`. After it has refused something, it refuses everything.

    Attributes:
        left: steps until the next look at the clock.
        max_steps: how many steps it had at first.
    """

    STEPS = 2**25
    CHARACTERS = 2**28

    __slots__ = (
        "_gives_way",
        "_is_unwanted",
        "_known",
        "_looked",
        "_room",
        "_seconds",
        "_started",
        "_steps",
        "left",
        "max_steps",
    )

    def __init__(self, max_steps: int = STEPS, max_characters: int = CHARACTERS, seconds: float | None = None) -> None:
        """
        Args:
            max_characters: of all texts that are made, and 8 for each entry of a list.
            seconds: of processor time of the thread that makes the budget. It only ends what is not counted. Default: 1, and
                five times what so many steps take, at most 30.
        """
        self.max_steps = max_steps
        self._steps = max_steps  # those behind `left`
        self._room = max_characters
        self._seconds = min(_LEAST_SECONDS + max_steps * _STEP_SECONDS, _MOST_SECONDS) if seconds is None else seconds
        self._started = self._looked = time.thread_time()
        self._is_unwanted = IS_UNWANTED.get()
        self._gives_way = self._is_unwanted is not _is_wanted
        self._known: dict[
            int, tuple[object, Size]
        ] = {}  # by id; the object is kept alive, so that its id stays its own
        self.left = 0

    @classmethod
    def of_chat(cls, num_messages: int, num_characters: int) -> "TemplateBudget":
        """For a conversation. Templates of real models look at all messages for each message (Gemma 4), or copy all of the
        prompt for each (Reka Edge), so what is allowed grows with the square."""
        return cls(
            min(cls.STEPS + 256 * num_messages**2, _MOST_STEPS),
            min(cls.CHARACTERS + 8 * num_messages * num_characters, _MOST_CHARACTERS),
        )

    @property
    def num_left(self) -> int:
        """How many steps are left."""
        return max(self._steps + self.left, 0)

    def spend(self, steps: int) -> None:
        """Raises:
        TemplateLimitError: there are not so many steps left.
        """
        self.left -= steps
        if self.left < 0:
            self.refill()

    def refill(self) -> None:
        """To be called when `left` is below 0."""
        if self._steps + self.left < 0:
            raise TemplateLimitError(f"it takes more than {self.max_steps:,} steps")
        now = time.thread_time()
        worked, self._looked = now - self._looked, now
        if now - self._started > self._seconds:
            self._steps = self.left = -1
            raise TemplateLimitError(f"it takes more than {self._seconds:g} seconds")
        if self._is_unwanted():
            self._steps = self.left = -1
            raise TemplateLimitError("nobody waits for it any more")
        if self._gives_way and now - self._started > _SHORT_SECONDS:
            time.sleep(_PAUSES * worked)
        taken = min(_SLICE, self._steps + self.left)
        self._steps -= taken - self.left
        self.left = taken

    def make(self, characters: int) -> None:
        """To be called before a text of at most so many characters is made, or a list of an eighth as many entries."""
        assert characters >= 0, "nothing is given back"
        if characters > MAX_TEXT:
            raise TemplateLimitError(f"it makes a value of more than {MAX_TEXT:,} characters")
        self._room -= characters
        if self._room < 0:
            raise TemplateLimitError("all texts that it makes are too long together")
        self.left -= characters >> 7
        if self.left < 0:
            self.refill()

    def check_items(self, items: int) -> None:
        if items > MAX_ITEMS:
            raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS:,} entries")

    def check_bits(self, number: object) -> None:
        if isinstance(number, int) and number.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"it makes an integer of more than {MAX_BITS:,} bits")

    def take(self, result: Any) -> Any:
        """Counts a value that Python has made, and returns it."""
        if isinstance(result, (str, bytes)):
            self.make(len(result))
        elif isinstance(result, (list, tuple, dict, set, frozenset)):
            self.check_items(len(result))
            self.make(len(result) * 8)
        else:
            self.check_bits(result)
        return result

    def read(self, *values: Any) -> None:
        """To be called before Python looks at these values with all that is in them: compares, hashes or writes them."""
        for value in values:
            if isinstance(value, (str, bytes)):
                self.spend(1 + (len(value) >> 5))
            else:
                items, characters, _ = self.size(value)
                self.spend(items + (characters >> 5))

    def size(self, value: Any) -> Size:
        """Of the value with all that is in it. What is in it twice counts twice, but is looked at once.

        Raises:
            TemplateLimitError: the value is too large or too deep to be worked on.
        """
        kind = type(value)
        if kind is str:
            return 1, len(value), 0
        if kind in _PLAIN:
            return 1, _PLAIN_CHARACTERS, 0
        if isinstance(value, int):
            return 1, _PLAIN_CHARACTERS + 2 * value.bit_length(), 0
        if isinstance(value, (str, bytes)):
            return 1, _PLAIN_CHARACTERS + 4 * len(value), 0
        known = self._known.get(id(value))
        return self._measure(value) if known is None else known[1]

    def _measure(self, value: Any) -> Size:
        parts = _parts(value)
        if parts is None:
            if isinstance(value, range):
                return (len(value), 8 * len(value), 1)
            return (1, 64, 0)
        characters, depth, items = 4, 0, 1
        for part in parts:
            characters += 4
            items += 1
            kind = type(part)
            if kind is str:
                characters += len(part)
            elif kind in _PLAIN:
                characters += _PLAIN_CHARACTERS
            else:
                more_items, more_characters, more_depth = self.size(part)
                items += more_items - 1
                characters += more_characters
                if more_depth > depth:
                    depth = more_depth
        self.left -= 2 * len(parts)
        if self.left < 0:
            self.refill()
        if items > MAX_ITEMS or characters > 2 * MAX_TEXT or depth >= MAX_DEPTH:
            raise TemplateLimitError("a list or dict that it makes is too large or too deep")
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        size = items, characters, depth + 1
        self._known[id(value)] = value, size
        return size

    def list(self, values: Iterable[Any]) -> list[Any]:
        """The list of what `values` returns."""
        if isinstance(values, Iterator):
            found = []
            for value in values:
                self.spend(_ITEM_STEPS)
                found.append(value)
                if len(found) > MAX_ITEMS:
                    break
            self.make(_OBJECT_CHARACTERS * min(len(found), MAX_ITEMS // 2))
        else:
            if isinstance(values, Sized):
                self.check_items(len(values))
            found = list(values)
        self.take(found)
        return found


class Counted(Iterator[Any]):
    """An iterator that spends a few steps for each value."""

    __slots__ = ("_budget", "_depth", "_values")

    def __init__(self, budget: TemplateBudget, values: Iterator[Any], source: object = None) -> None:
        """`source`: what the values come from, if it is such an iterator, too."""
        self._budget = budget
        self._values = values
        self._depth: int = source._depth + 1 if isinstance(source, Counted) else 0
        if self._depth > MAX_DEPTH:
            raise TemplateLimitError("it puts too many filters behind each other")

    def __next__(self) -> Any:
        self._budget.spend(_FILTERED_STEPS)
        return next(self._values)


def _parts(value: Any) -> Collection[Any] | None:
    """What a container holds. None: the value is none, or Python does not look into it."""
    kind = type(value)
    if kind is list or kind is tuple:
        return cast(Collection[Any], value)
    if kind is dict or kind is MappingProxyType:
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, Set, ValuesView)):
        return value
    return None
