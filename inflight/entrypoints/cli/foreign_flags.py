"""Flags of other engines: a flag that has no effect here is ignored with a note, one that cannot be ignored is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Flag:
    """
    Attributes:
        note: why the flag has no effect here, or why it is refused.
        takes_value: the next argument is the flag's value.
    """

    note: str
    takes_value: bool = False


_IGNORED = {
    "--enable-auto-tool-choice": _Flag("tool calls are always read; --tool-call-parser says how"),
    "--trust-remote-code": _Flag(
        "no code of a model's folder is ever run; a model that needs such code is refused when it is loaded"
    ),
    "--disable-log-requests": _Flag("use --access-log off to log no requests"),
    "--no-enable-log-requests": _Flag("use --access-log off to log no requests"),
    "--enable-log-requests": _Flag("--access-log writes a line for every request, without its text"),
    "--max-log-len": _Flag("prompts are never logged", takes_value=True),
    "--disable-log-stats": _Flag("statistics are at /metrics only"),
    "--disable-uvicorn-access-log": _Flag("--access-log off does this"),
    "--uvicorn-log-level": _Flag("INFLIGHT_LOG_LEVEL sets the level of the log", takes_value=True),
    "--swap-space": _Flag("preempted requests are computed again, not swapped", takes_value=True),
    "--cpu-offload-gb": _Flag("weights stay on one device", takes_value=True),
    "--disable-frontend-multiprocessing": _Flag("--api-server-count is the number of front ends"),
    "--disable-custom-all-reduce": _Flag("there is one kind of all-reduce"),
    "--use-v2-block-manager": _Flag("there is one block manager"),
    "--max-parallel-loading-workers": _Flag("weights are read in parallel anyway", takes_value=True),
    "--download-dir": _Flag("HF_HOME sets the folder of downloaded models", takes_value=True),
    "--tokenizer-mode": _Flag("one library reads tokenizer.json; there is no other mode", takes_value=True),
    "--max-seq-len-to-capture": _Flag("--cuda-graph-max-tokens bounds what is captured", takes_value=True),
    "--max-seq-len": _Flag("--max-model-len bounds a sequence", takes_value=True),
    "--compilation-config": _Flag("nothing is compiled at run time", takes_value=True),
    "--guided-decoding-backend": _Flag("--structured-outputs-backend chooses the library", takes_value=True),
    "--chat-template-content-format": _Flag("the server finds the format in the template", takes_value=True),
    "--response-role": _Flag("the role of answers is always assistant", takes_value=True),
    "--root-path": _Flag("let the proxy remove the prefix from paths", takes_value=True),
}
_REFUSED = {
    "--enable-lora": _Flag("LoRA adapters are not served"),
    "--lora-modules": _Flag("LoRA adapters are not served", takes_value=True),
    "--middleware": _Flag("no code from outside is loaded into the server", takes_value=True),
    "--hf-overrides": _Flag("change config.json in a copy of the model's folder", takes_value=True),
    "--override-generation-config": _Flag(
        "change generation_config.json in a copy of the model's folder", takes_value=True
    ),
    "--kv-transfer-config": _Flag("KV caches are not transferred", takes_value=True),
}


@dataclass(slots=True)
class Sorted:
    """
    Attributes:
        arguments: the arguments without the flags of other engines.
        notes: a sentence for each flag that was left out.
    """

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sort_out(arguments: Sequence[str], with_value: Collection[str]) -> Sorted:
    """
    Args:
        arguments: of a command line.
        with_value: our own options whose value is the next argument, even if that looks like a flag.

    Raises:
        ConfigError: one of the flags is refused.
    """
    found, rest = Sorted(), list(arguments)
    while rest:
        argument = rest.pop(0)
        name, has_value, _ = argument.partition("=")
        spelled = name.replace("_", "-") if name.startswith("--") else name
        if argument == "--":
            found.arguments += [argument, *rest]
            break
        if spelled in _REFUSED:
            raise ConfigError(f"{spelled} is not supported: {_REFUSED[spelled].note}")
        if (flag := _IGNORED.get(spelled)) is not None:
            if flag.takes_value and not has_value and rest and not rest[0].startswith("--"):
                rest.pop(0)
            found.notes.append(f"{spelled} has no effect here: {flag.note}")
            continue
        found.arguments.append(argument)
        if argument in with_value and rest:
            found.arguments.append(rest.pop(0))
    return found
