"""`pattern_search`: searches for a pattern of a client's JSON schema in time that is linear in the length of the text.

Python's `re` needs exponential time for patterns such as `(a+)+$`, and holds the GIL meanwhile, so one request could stop a
whole process. The same engine as in the grammar library is used, so it knows the same patterns.
"""

from collections.abc import Callable

from pydantic_core import SchemaError, SchemaValidator, core_schema


def pattern_search(pattern: str) -> Callable[[str], bool]:
    """Returns a function that says whether the pattern matches anywhere in a text. A pattern that cannot be read, or that would
    need much memory, matches nothing."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")).isinstance_python
    except SchemaError:
        return lambda _: False
