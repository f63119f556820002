"""The arguments of `LLM.generate` and `LLM.chat`: makes lists with one entry for each prompt, or says what is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TypeVar, cast

from inflight.engine.request.prompt import Prompt, as_list
from inflight.errors import InvalidRequestError, put_place_before

Given = TypeVar("Given")


def as_prompts(given: object) -> list[Prompt]:
    """Make a list of prompts. A string, a dictionary, and integers in a list or an array of one dimension, are one prompt."""
    if isinstance(given, str | Mapping):
        return [cast("Prompt", given)]
    if (prompts := as_list(given)) is None:
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, not a {type(given).__name__}{advice(given)}", "prompts"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [cast("Prompt", prompts)]
    return cast("list[Prompt]", prompts)


def priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    return [0] * count if given is None else _checked_priorities(given, count)


def _checked_priorities(given: Sequence[int], count: int) -> Sequence[int]:
    numbers = as_list(given)
    if numbers is None:
        raise InvalidRequestError(f"priority={given!r} is not a list; give one number for each prompt", "priority")
    if len(numbers) != count:
        raise InvalidRequestError(
            f"priority has {len(numbers)} numbers for {count} prompts; give one number for each prompt", "priority"
        )
    for index, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise InvalidRequestError(f"priority[{index}]={number!r} is not an integer", f"priority[{index}]")
    return [int(cast("int", number)) for number in numbers]


def one_each(
    given: Given | Sequence[Given] | None, count: int, kind: type[Given], argument: str
) -> Sequence[Given | None]:
    """`given`: one object of the class `kind` for all prompts, or one for each of the `count` prompts. `argument`: its name."""
    if given is None or isinstance(given, kind):
        return [given] * count
    name = kind.__name__
    params = as_list(given)
    if params is None:
        raise InvalidRequestError(f"{argument} is a {type(given).__name__}; give {name}, or a list of them", argument)
    for index, each in enumerate(params):
        if not isinstance(each, kind | None):
            place = f"{argument}[{index}]"
            raise InvalidRequestError(f"{place} is a {type(each).__name__}; give only {name} or None", place)
    if len(params) != count:
        raise InvalidRequestError(
            f"there are {len(params)} {argument} for {count} prompts; give one for all, or one for each prompt",
            argument,
        )
    return cast("Sequence[Given | None]", params)


@contextmanager
def one_of(argument: str, index: int, count: int) -> Iterator[None]:
    """An error that is raised inside names the entry of the argument, such as "prompts[7]", if there are several entries."""
    try:
        yield
    except InvalidRequestError as error:
        if count > 1:
            put_place_before(error, f"{argument}[{index}]")
        raise


def advice(given: object) -> str:
    """What to give instead of something that is no list; "" if nothing is known."""
    if isinstance(given, set | frozenset):
        return ": a set has no order; give a list"
    if hasattr(type(given), "columns"):
        return ": give one of its columns"
    return ""
