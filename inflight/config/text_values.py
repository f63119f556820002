"""`read_texts`: reads values that are given as text, as the command line does."""

from collections.abc import Mapping

from inflight.setting import settings_of


def read_texts(kind: type, values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Reads texts that are given for fields of other types, such as "200M" for a number of bytes.

    Returns:
        The values that were read, and field name -> what is wrong with the text. Fields that the command line has no parser
        for are left out.
    """
    found: dict[str, object] = {}
    problems: dict[str, str] = {}
    for name, declared in settings_of(kind).items():
        text = values.get(name)
        if isinstance(text, str) and declared.parse is not None:
            try:
                found[name] = declared.parse(text)
            except ValueError as error:
                problems[name] = f"{name}: {error}"
    return found, problems
