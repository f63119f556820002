"""Checks of lists that users give."""

from collections.abc import Iterable, Mapping

from inflight.errors import InvalidRequestError


def as_tuple(name: str, values: object) -> tuple[object, ...]:
    """Returns the values as a tuple; () for None. A string is refused, because it would become a tuple of its letters."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name}={values!r} is not a list")
    return tuple(values)


def check_strings(name: str, values: Iterable[object], max_count: int, max_length: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} strings; at most {max_count} are allowed")
    for value in values:
        if not isinstance(value, str) or not value or len(value) > max_length:
            raise InvalidRequestError(f"{name} holds {value!r}: each must be a string of 1 to {max_length} characters")


def check_token_ids(name: str, values: Iterable[object], max_count: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} token ids; at most {max_count} are allowed")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} holds {value!r}: each must be a token id, an integer of 0 or more")
