"""Reads the file of `--models-preset`: a section for each model, in the form that llama.cpp's router has (INI).

    version = 1

    [*]                          ; for all models
    max-model-len = 8192

    [coder]
    model = /models/qwen-coder   ; or hf-repo = ORG/NAME
    load-on-startup = true
    pin = true

A key is an option of `inflight serve` without its dashes, or an option of llama.cpp with the same meaning. Other keys are
ignored, and a warning names them.
"""

import configparser
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.entrypoints.router.keep_alive import read_keep_alive
from inflight.errors import ConfigError

ALL = "*"
_TOP = "\0"  # the section of the keys before the first section
_MOST_CHARACTERS = 1024  # of a name
_TRUE, _FALSE = ("true", "1", "on", "yes", "enabled"), ("false", "0", "off", "no", "disabled")
# key of llama.cpp -> our option with the same meaning
_SAME = {
    **dict.fromkeys(("m", "hf-repo", "hf", "hfr", "LLAMA_ARG_MODEL", "LLAMA_ARG_HF_REPO"), "model"),
    **dict.fromkeys(("c", "ctx-size", "LLAMA_ARG_CTX_SIZE"), "max-model-len"),
    **dict.fromkeys(("np", "parallel", "LLAMA_ARG_N_PARALLEL"), "max-num-seqs"),
    **dict.fromkeys(("b", "batch-size", "LLAMA_ARG_BATCH"), "max-num-batched-tokens"),
    **dict.fromkeys(("chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"), "chat-template"),
}
# Options that the router sets itself for each model
_OF_THE_ROUTER = frozenset(
    "host port uds api-key api-key-file admin-api-key served-model-name alias a models-dir models-max models-preset "
    "models-idle-timeout models-spare enable-model-management api-server-count headless config check root-path ssl-certfile "
    "ssl-keyfile ssl-ca-certs allowed-hosts allowed-origin allow-credentials forwarded-allow-ips access-log ui "
    "response-store".split()
)

# Names of options and their values as text -> their values by field, for the engine and for the server
ReadOptions = Callable[[Mapping[str, str]], tuple[dict[str, Any], dict[str, Any]]]  # Any: the settings' values


@dataclass(frozen=True)
class Preset:
    """A section of the file.

    Attributes:
        model: folder, file or name on the hub; empty if the section's name is the model's.
        engine: arguments of the engine that the section sets, by field.
        server: settings of the server that the section sets, by field.
        loads_on_startup: whether the model is loaded before anybody asks for it.
        is_pinned: whether it stays loaded, once it is.
        idle_seconds: how long it stays loaded without requests; None: as --models-idle-timeout says.
    """

    model: str = ""
    engine: Mapping[str, Any] = field(default_factory=dict)  # Any: the settings' values
    server: Mapping[str, Any] = field(default_factory=dict)
    loads_on_startup: bool = False
    is_pinned: bool = False
    idle_seconds: float | None = None


def read_presets(
    path: Path, options: Collection[str], read: ReadOptions, warn: Callable[[str], None]
) -> dict[str, Preset]:
    """
    Args:
        options: the names of all options of `inflight serve`, without dashes before them.
        read: parses options; raises ConfigError for a wrong value.
        warn: called with a message that names the ignored keys.

    Returns:
        Section by name; "*" holds for models without a section.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong. The message names the section.
    """
    parser = configparser.ConfigParser(
        delimiters=("=",),
        comment_prefixes=(";", "#"),
        inline_comment_prefixes=(";", "#"),
        interpolation=None,
        default_section="\0\0",
        allow_no_value=True,
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # keys keep their capitals
    where = f"models_preset={str(path)!r}"
    try:
        parser.read_string(f"[{_TOP}]\n{path.read_text(encoding='utf-8-sig')}", source=str(path))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
    except (configparser.Error, ValueError) as error:
        raise ConfigError(
            f"{where} is not a file of sections and `key = value`: {' '.join(str(error).split())}"
        ) from None
    if above := [key for key in parser[_TOP] if key != "version"]:
        warn(f"{where}: ignored above the first section: {', '.join(above)}")
    for_all = dict(parser[ALL]) if ALL in parser else {}
    found = {}
    for name in parser.sections():
        if name == _TOP:
            continue
        if len(name) > _MOST_CHARACTERS or not name.isprintable():
            raise ConfigError(
                f"{where}: the section {name[:100]!r} is not the name of a model: it has more than {_MOST_CHARACTERS} "
                "characters, or such that cannot be printed"
            )
        given = for_all | dict(parser[name])
        try:
            found[name] = _read_section(given, options, read, lambda text, name=name: warn(f"{where} [{name}]: {text}"))  # type: ignore[misc]  # a lambda's default
        except ConfigError as error:
            raise ConfigError(f"{where} [{name}]: {error}") from error
    return found


def _read_section(
    given: Mapping[str, str | None], options: Collection[str], read: ReadOptions, warn: Callable[[str], None]
) -> Preset:
    values: dict[str, str] = {}
    ignored = []
    for key, value in given.items():
        name = _SAME.get(key, key.replace("_", "-"))
        text = (value or "true").strip()
        if name in _OF_THE_ROUTER:
            ignored.append(f"{key} (the router sets it)")
        elif name not in options and name not in ("load-on-startup", "pin", "idle-timeout"):
            ignored.append(key)
        elif not (key in ("c", "ctx-size", "LLAMA_ARG_CTX_SIZE") and text == "0"):  # there 0 means the model's own
            values[name] = text
    if ignored:
        warn(f"ignored: {', '.join(ignored)}")
    model = values.pop("model", "")
    loads, pinned = (read_flag(name, values.pop(name, "false")) for name in ("load-on-startup", "pin"))
    idle = values.pop("idle-timeout", None)
    engine, server = read(values)
    return Preset(
        model=model,
        engine=engine,
        server=server,
        # these three are the router's own
        loads_on_startup=loads,
        is_pinned=pinned,
        idle_seconds=None if idle is None else read_keep_alive(idle, "idle-timeout"),
    )


def read_flag(name: str, text: str) -> bool:
    """
    Raises:
        ConfigError: the text is neither true nor false.
    """
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"{name} = {text!r} is neither true nor false")
    return text.lower() in _TRUE
