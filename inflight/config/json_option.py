"""`from_json`: makes a dataclass of settings from an option whose value is a JSON object."""

from collections.abc import Mapping
from typing import Any, TypeVar

from inflight.errors import ConfigError
from inflight.setting import check_values, unknown_name

Config = TypeVar("Config")


# Any: checked here
def from_json(kind: type[Config], option: str, given: Mapping[str, Any] | None, needed: str = "") -> Config:
    """Returns a `kind` with the values of `given`, and defaults for the others. If `given` is None, all are defaults. `needed`:
    a name that `given` must have.

    Raises:
        ConfigError: `given` is no object, or has an unknown name or a wrong value.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        # not the value: it may contain a password
        raise ConfigError(f"{option} is a {type(given).__name__}, not a dictionary; give one, or leave it out")
    if unknown := unknown_name(kind, given):
        raise ConfigError(f"{option} has no {unknown}; correct it, or leave it out")
    for problem in check_values(kind, {**({needed: None} if needed else {}), **given}).values():
        raise ConfigError(f"{option}: {problem}; give one, or leave {option} out")
    return kind(**given)
