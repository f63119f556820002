"""Arguments that are a time in milliseconds, or a word such as "none"."""

MAX_MILLISECONDS = 3_600_000


def parse_milliseconds(text: str) -> str | float:
    """Reads an option of the command line."""
    try:
        return float(text)
    except ValueError:
        return text  # "auto" or "none"; `time_problem` refuses any other text


def time_problem(name: str, value: object, names: tuple[str, ...]) -> str | None:
    """Why this time is wrong; None if it is right."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value in names if not is_number else 0 < value <= MAX_MILLISECONDS:  # type: ignore[operator]
        return None
    return f"{name}={value!r} must be {', '.join(names)} or a number of milliseconds in (0, {MAX_MILLISECONDS}]"
