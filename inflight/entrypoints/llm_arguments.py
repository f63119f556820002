"""The arguments of `LLM.generate` and `LLM.chat`: makes lists with one entry for each prompt, or says what is wrong."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

from inflight.engine.request.prompt import Prompt, as_list
from inflight.errors import InvalidRequestError, put_place_before
from inflight.sampling_params import SamplingParams

Message = Mapping[str, Any]  # Any: JSON, checked by the chat template
_COMMON = ("sampling_params", "use_tqdm", "priority")

# Arguments that vLLM's methods have -> what to do instead.
_FOREIGN = {
    "lora_request": "LoRA adapters are not served",
    "prompt_token_ids": "give the token ids as the prompts",
    "chat_template": "give chat_template to `LLM`; it holds for all chats",
    "chat_template_content_format": "leave it out: the format is found in the template",
    "response_format": "give SamplingParams(structured_outputs=StructuredOutputsParams(json=...))",
    "guided_options_request": "give SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "tool_choice": 'use StructuredOutputsParams, or tools with "strict": True',
    "tokenization_kwargs": "give token ids as prompts, if the tokenizer shall work in another way",
    "mm_processor_kwargs": "models take text only",
    "prompt_adapter_request": "there are no prompt adapters",
    "system": 'give it as the first message: {"role": "system", "content": ...}',
}


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
        advice = _FOREIGN.get(name) or (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}")
        raise InvalidRequestError(f"{method} has no argument {name!r} (given: {value!r:.100}); {advice}")


def as_prompts(given: object) -> list[Prompt]:
    """Make a list of prompts. A string, a dictionary, and integers in a list or an array of one dimension, are one prompt."""
    if isinstance(given, str | Mapping):
        return [cast("Prompt", given)]
    if (prompts := as_list(given)) is None:
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, not a {type(given).__name__}{_advice(given)}"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [cast("Prompt", prompts)]
    return cast("list[Prompt]", prompts)


def as_conversations(given: object) -> list[Sequence[Message]]:
    """Make a list of conversations. Messages in a list are one conversation."""
    if isinstance(given, str):
        raise InvalidRequestError(
            f"messages is a text; give messages: chat([{{'role': 'user', 'content': {given[:50]!r}}}])"
        )
    if isinstance(given, Mapping):
        raise InvalidRequestError("messages is one message; give a list of messages: chat([message])")
    if (entries := as_list(given)) is None:
        raise InvalidRequestError(f"messages is a {type(given).__name__}, not a list of messages{_advice(given)}")
    if not entries:
        raise InvalidRequestError("messages is empty; give at least one message")
    if isinstance(entries[0], Mapping):
        return [cast("Sequence[Message]", entries)]
    conversations = [as_list(entry) for entry in entries]
    for index, (entry, conversation) in enumerate(zip(entries, conversations, strict=True)):
        if conversation is None:
            kind = "text" if isinstance(entry, str) else type(entry).__name__
            raise InvalidRequestError(
                f"messages[{index}] is a {kind}; give each conversation as a list of messages, such as "
                "[{'role': 'user', 'content': text}]"
            )
        if not conversation:
            raise InvalidRequestError(f"messages[{index}] is empty; give at least one message")
    return cast("list[Sequence[Message]]", conversations)


def priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    if given is None:
        return [0] * count
    numbers = as_list(given)
    if numbers is None:
        raise InvalidRequestError(f"priority={given!r} is not a list; give one number for each prompt")
    if len(numbers) != count:
        raise InvalidRequestError(
            f"priority has {len(numbers)} numbers for {count} prompts; give one number for each prompt"
        )
    for index, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise InvalidRequestError(f"priority[{index}]={number!r} is not an integer")
    return [int(cast("int", number)) for number in numbers]


def one_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams | None]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    params = as_list(given)
    if params is None:
        raise InvalidRequestError(
            f"sampling_params is a {type(given).__name__}; give SamplingParams, or a list of them"
        )
    for index, each in enumerate(params):
        if not isinstance(each, SamplingParams | None):
            raise InvalidRequestError(
                f"sampling_params[{index}] is a {type(each).__name__}; give only SamplingParams or None"
            )
    if len(params) != count:
        raise InvalidRequestError(
            f"there are {len(params)} sampling_params for {count} prompts; give one for all, or one for each prompt"
        )
    return cast("Sequence[SamplingParams | None]", params)


@contextmanager
def one_of(argument: str, index: int, count: int) -> Iterator[None]:
    """An error that is raised inside names the entry of the argument, such as "prompts[7]", if there are several entries."""
    try:
        yield
    except InvalidRequestError as error:
        if count > 1:
            put_place_before(error, f"{argument}[{index}]")
        raise


def _advice(given: object) -> str:
    if isinstance(given, set | frozenset):
        return ": a set has no order; give a list"
    if hasattr(type(given), "columns"):
        return ": give one of its columns"
    return ""
