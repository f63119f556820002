"""Checks of lists, and of mappings from token ids, that users give."""

from collections.abc import Collection, Iterable, Mapping

from inflight.errors import InvalidRequestError


def as_tuple(name: str, values: object) -> tuple[object, ...]:
    """Returns the values as a tuple; () for None. A string is refused, because it would become a tuple of its letters."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name}={values!r} is not a list", name)
    return tuple(values)


def check_strings(name: str, values: Iterable[object], max_count: int, max_length: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} strings; at most {max_count} are allowed", name)
    for value in values:
        if not isinstance(value, str) or not value or len(value) > max_length:
            raise InvalidRequestError(
                f"{name} holds {value!r}: each must be a string of 1 to {max_length} characters", name
            )


def check_token_ids(name: str, values: Iterable[object], max_count: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} token ids; at most {max_count} are allowed", name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} holds {value!r}: each must be a token id, an integer of 0 or more", name)


def check_allowed_ids(name: str, values: Collection[object]) -> None:
    """Check the only tokens that may be drawn."""
    if not values:
        raise InvalidRequestError(f"{name} is empty: nothing could be drawn; leave it out to allow all", name)
    check_token_ids(name, values, 2**31)


def as_biases(name: str, values: object) -> dict[int, float]:
    """Returns a copy of a mapping from token ids to numbers; {} for None."""
    if not isinstance(values, Mapping | None):
        raise InvalidRequestError(f"{name}={values!r} is not a mapping of token ids to numbers", name)
    return dict(values or {})


def check_biases(name: str, biases: Mapping[int, float], max_count: int) -> None:
    check_token_ids(name, biases.keys(), max_count)
    for token_id, value in biases.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            place = f"{name}[{token_id}]"
            raise InvalidRequestError(f"{place}={value!r} is not a number in [-100, 100]", place)
