"""`ProcessedRequest`: a request that is ready to start. `RequestOptions`: what a caller may say about a request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from inflight.engine.request.answer_frames import GivenFrame
from inflight.interface.parts import RequestPart
from inflight.interface.request import EngineCoreRequest, Int32Array
from inflight.parsers.output_parser import OutputParser
from inflight.sampling_params import SamplingParams
from inflight.structured_output.spec import SchemaPlace


class RequestOptions(TypedDict, total=False):
    """Optional arguments of a request, besides its prompt and its sampling parameters.

    Attributes:
        arrival_time: when the request arrived, as a time of `time.monotonic()`. Default: now.
        priority: if the scheduling policy is "priority", lower numbers are served first. Default: 0.
        cache_salt: only requests with the same salt share cached prompts. If the prompt is a dictionary with a "cache_salt",
            that salt is used instead.
        add_special_tokens: whether the tokenizer adds its special tokens. Set it to False if the text was rendered with a chat
            template, because such a text already contains them. Default: True.
        thinks_first: whether the model may think before it answers. If so, and if the engine has a `reasoning_end` marker (the
            text that ends the thinking), the grammar of the request applies to the text without its reasoning. Set it to False
            for a raw prompt, or to continue an answer. Default: True.
        answer_frame: where the reasoning is in the text, and what else may be around the text that a grammar constrains; None
            if there is nothing. It is used if the engine has no `reasoning_end`. Default: `FIND`. Then it is what the tags of
            the chat template say if the reasoning has a budget, and otherwise None.
        trace_headers: the W3C trace headers of the request, in lower case. Observers of the engine get them.
        make_parser: makes a parser for the text of one sequence. Outputs then have `events`, and stop strings are searched for
            in the content only. Default: None, no parser.
        parts: what the request wants beside its tokens (`RequestPart`), if no sampling parameter asks for it. Default: nothing.
    """

    arrival_time: float
    priority: int
    cache_salt: str
    add_special_tokens: bool
    thinks_first: bool
    answer_frame: GivenFrame
    trace_headers: Mapping[str, str]
    make_parser: Callable[[], OutputParser] | None
    parts: Sequence[RequestPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request that is ready to start.

    Attributes:
        prompt: the text, or None if the request was given as token ids.
        prompt_array: the `prompt_token_ids` as the engine core gets them, once for all `sequences`.
        sequences: its sequences, ordered by index. They are sent to the engine core.
        block_names: the names of the prompt's blocks (`BlockHasher.names`) if they decide which replica gets it; else b"".
        unenforced: the places in the request's JSON schemas that its grammar does not enforce.
        make_parser: makes a parser for the text of one of its sequences; None if there is none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_array: Int32Array
    params: SamplingParams
    arrival_time: float
    sequences: tuple[EngineCoreRequest, ...]
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    unenforced: tuple[SchemaPlace, ...] = ()
    make_parser: Callable[[], OutputParser] | None = None
    block_names: bytes = b""
