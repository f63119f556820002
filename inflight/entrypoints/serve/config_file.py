"""Reads the YAML file of `--config`. Each value becomes the text that a user would write on the command line."""

import difflib
import json
from collections.abc import Collection
from pathlib import Path

import yaml

from inflight.errors import ConfigError

_MAX_FILE_BYTES = 2**20

OptionValue = str | list[str]


def read_config_file(path: Path, options: Collection[str]) -> tuple[dict[str, OptionValue], list[str]]:
    """Returns the options in the file, and a message for each wrong entry. `options` has the names of all options,
    in the form `max_model_len`.

    Numbers, booleans and mappings become JSON text. A list stays a list, whose entries become text. If a value is null, the
    option is not given. So the code that parses the command line can also parse the values of the file.

    Raises:
        ConfigError: the file cannot be read, or is not a YAML mapping.
    """
    content = _read(path)
    if content is None:  # an empty file
        return {}, []
    if not isinstance(content, dict):
        raise ConfigError(f"config={str(path)!r} must map option names to values, but is a {type(content).__name__}")
    problems: list[str] = []
    values: dict[str, OptionValue] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, n=1)
            problems.append(
                f"config={str(path)!r}: unknown option {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        elif name in values:
            problems.append(f"config={str(path)!r}: {name!r} is given twice")
        elif value is not None:
            try:
                values[name] = [_as_text(entry) for entry in value] if isinstance(value, list) else _as_text(value)
            except (TypeError, ValueError):  # a date, a set or bytes, which JSON does not have
                problems.append(
                    f"config={str(path)!r}: {key!r} is a {type(value).__name__}; if you mean a text, put it in quotes"
                )
    return values, problems


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"config={str(path)!r} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"config={str(path)!r} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return yaml.load(content, Loader=_UniqueKeyLoader)  # a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:  # str(error) quotes a line of the file, which may contain an API key
        mark = error.problem_mark
        line = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ConfigError(f"config={str(path)!r} is not valid YAML: {line}{error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an impossible date
        raise ConfigError(f"config={str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a repeated key. It also refuses aliases, with which a small file can make a huge value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", None)
        return super().compose_node(parent, index)
