"""`ChatRequest` and `TextRequest`: what a client wants, in the words of no API. Each API makes one from its own body.

body of an API --(the API reads it)--> ChatRequest --(http/chat.py)--> ValidatedRequest --(http/generation.py)--> engine
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.entrypoints.fields.images import ImageSource
from inflight.entrypoints.http.thinking import Thoughts
from inflight.entrypoints.http.validated import Presentation
from inflight.parsers.tool_choice import ToolChoice
from inflight.sampling_params import SamplingParams

Json = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """What a chat template writes.

    Attributes:
        messages: as templates get them: calls have objects as arguments, and fields without a value are left out. An image is
            a part with its number.
        places: for each message the field of the request that has it; empty: the message `i` is messages[i].
        images: the images by their numbers.
        processor_options: of the model's processor of images, for this request.
        tools: the functions of the conversation, as JSON objects.
        add_generation_prompt: None: the template opens an answer, unless the last message is continued.
        variables: further variables of the template.
    """

    messages: Sequence[Json]
    places: Sequence[str] = ()
    images: Sequence[ImageSource] = ()
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Json] = ()
    documents: Sequence[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What chats and texts have in common.

    Attributes:
        params: the sampling parameters: the model's defaults with what the request gives.
        thoughts: what the request says about the model's thoughts.
        truncate_prompt_tokens: how many tokens at the end of the prompt are kept; -1: as many as fit; None: all.
        left_out: what the API ignores of the request, as names for the answer's header.
    """

    params: SamplingParams
    presentation: Presentation
    thoughts: Thoughts = field(default_factory=Thoughts)
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationRequest):
    """
    Attributes:
        tool_choice: "none" if there are no tools.
        hidden_tools: names of tools that the template must not list, because the messages have their definitions.
        parallel_tool_calls: False: the answer has at most one call.
    """

    prompt: ChatPrompt
    tool_choice: ToolChoice = "none"
    hidden_tools: frozenset[str] = frozenset()
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(GenerationRequest):
    """Texts that the model goes on with, without a chat template.

    Attributes:
        prompts: texts or token ids.
        suffix: the text after the answer, which then is what stands between; "" if there is none.
    """

    prompts: Sequence[str | list[int]]
    suffix: str = ""
    add_special_tokens: bool = True
