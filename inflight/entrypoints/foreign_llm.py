"""What programs for vLLM give to `LLM`, or call on it: arguments are translated, ignored with a note, or refused with a reason.

The arguments are those of the command line, so the tables of `cli/foreign_flags.py` hold for both.
"""

import difflib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.foreign_flags import HARMLESS_VALUES, SAME, SAME_VALUES, find_flag
from inflight.errors import InvalidRequestError, UnknownArgumentError, UnsupportedMethodError

logger = logging.getLogger(__name__)

_SLEEP = "the engine does not sleep, and its weights stay as they are: close this LLM and make a new one"
_PROFILE = '`write_trace` shows what each step does; `collective_rpc("profile")` starts torch\'s profiler'

# Methods of vLLM's `LLM` -> what to do instead.
METHODS = {
    "reward": "use `encode`, or `classify` with a model that has one class",
    "beam_search": "there is no beam search: use SamplingParams(n=...), and rank the completions by cumulative_logprob",
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "update_weights": _SLEEP,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "apply_model": "no function is sent to the workers; `collective_rpc` calls a method that they have",
    "get_metrics": "each output has `metrics`, `step_figures` has those of steps, and a server has /metrics",
    "set_tokenizer": "give `tokenizer` to `LLM`",
    "shutdown": "call `close`",
}

# Arguments that only `LLM` has in vLLM, beside those of the command line -> why they have no effect here.
_NO_EFFECT = {
    "disable_log_stats": "`LLM` logs no statistics",
    "disable_async_output_proc": "async_scheduling=False plans each step after the one before it",
}

# Arguments that `generate` and `chat` have.
_COMMON = ("sampling_params", "use_tqdm", "priority")

# Arguments of these methods in vLLM -> what to do instead.
_ARGUMENTS = {
    "lora_request": "LoRA adapters are not served",
    "prompt_token_ids": "give the token ids as the prompts",
    "chat_template": "give chat_template to `LLM`; it holds for all chats",
    "chat_template_content_format": "leave it out: the format is found in the template",
    "response_format": "give SamplingParams(structured_outputs=StructuredOutputsParams(json=...))",
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "tool_choice": 'use StructuredOutputsParams, or tools with "strict": True',
    "tokenization_kwargs": "give token ids as prompts, if the tokenizer shall work in another way",
    "mm_processor_kwargs": "give it in the dictionary of a prompt, or to `LLM`",
    "prompt_adapter_request": "there are no prompt adapters",
    "system": 'give it as the first message: {"role": "system", "content": ...}',
}


def own_arguments(given: Mapping[str, Any]) -> dict[str, Any]:  # Any: EngineArgs checks every value
    """Returns the arguments without those of other engines. A note is logged for each argument that has no effect.

    Raises:
        UnknownArgumentError: an argument asks for something that Inflight does not do.
    """
    known = {each.name for each in fields(EngineArgs)}
    found = {}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        ours = SAME.get(flag, "").removeprefix("--").replace("-", "_")
        if name in known or ours in known:
            found[name if name in known else ours] = _own_value(flag, value)
        elif (reason := _why_ignored(name, flag, value)) is None:
            found[name] = value  # `EngineArgs` refuses it, and proposes the nearest argument
        elif value not in (None, False, *HARMLESS_VALUES.get(flag, ())):
            logger.warning("%s has no effect here: %s", name, reason)
    return found


def refuse_others(method: str, given: Mapping[str, object], more: Iterable[str]) -> None:
    """Refuse arguments that `method` does not have. If an argument is None, it is ignored: programs for vLLM pass some so.

    Args:
        more: the arguments that `method` has besides the common ones.
    """
    known = [*_COMMON, *more]
    for name, value in given.items():
        if value is None:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        guess = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        advice = _ARGUMENTS.get(name) or guess
        raise InvalidRequestError(f"{method} has no argument {name!r} (given: {value!r:.100}); {advice}")


def missing_attribute(llm: object, name: str) -> AttributeError:
    """Makes the error for an attribute that `LLM` does not have."""
    if name in METHODS:
        return UnsupportedMethodError(f"LLM has no method {name!r}: {METHODS[name]}")
    return AttributeError(f"'LLM' object has no attribute {name!r}", name=name, obj=llm)


def _why_ignored(name: str, flag: str, value: object) -> str | None:
    """Why the argument has no effect; None if it is not known."""
    if name in _NO_EFFECT:
        return _NO_EFFECT[name]
    foreign = find_flag(flag)
    if foreign is None:
        return None
    reason = _in_python(foreign.reason)
    if foreign.is_refused and value not in (None, False) and value not in HARMLESS_VALUES.get(flag, ()):
        raise UnknownArgumentError(f"{name}={value!r:.100} is not supported: {reason}")
    return reason


def _own_value(flag: str, value: Any) -> Any:  # Any: of the argument's type
    if not isinstance(value, str):
        return value
    return SAME_VALUES.get(f"{flag} {value}", value)


def _in_python(reason: str) -> str:
    """Names of options become names of arguments."""
    return re.sub(r"--([a-z][a-z-]+)", lambda match: match[1].replace("-", "_"), reason)
