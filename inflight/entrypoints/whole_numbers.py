"""`as_integers`: 12.0 is an integer, as in JSON Schema. Many programs have one type for all numbers, and write 12.0."""


def as_integers(value: object) -> object:
    """12 for 12.0, also in lists. Other values are returned as they are."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [as_integers(item) for item in value]
    return value
