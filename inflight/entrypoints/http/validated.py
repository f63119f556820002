"""`ValidatedRequest`: a request of any endpoint after it has been checked, and how its answer is written."""

from collections.abc import Callable
from dataclasses import dataclass

from inflight.engine.request.answer_frames import GivenFrame
from inflight.engine.request.prepared_prompt import PreparedPrompt
from inflight.entrypoints.written_answer import ReasoningField
from inflight.parsers.output_parser import OutputParser
from inflight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids. `text` is the prompt's text, which only an answer with `Presentation.echo` shows. It may be None
    if the answer does not show it. `prepared` is what the engine gets of a prompt with images; None if it has none."""

    token_ids: list[int]
    text: str | None = None
    prepared: PreparedPrompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Presentation:
    """How the answer is written.

    Attributes:
        model: the name that the client used.
        request_id: the id that the body chooses for the request; None if it chooses none.
        include_usage: whether a stream ends with a chunk that has the usage.
        continuous_usage: whether every chunk of a stream has the usage so far.
        timings_per_token: whether every chunk of a chat's stream has the times so far, and not only the last one.
        return_progress: whether a chat's stream tells how much of the prompt is computed.
        parts: the kinds of the request's parts whose results the answer has, in vLLM's form (`SHOWN_PARTS`).
        return_token_ids: whether the answer has the token ids of the prompt and of the completions.
        tokens_as_ids: whether log-probabilities name tokens by their ids, as "token_id:7".
        echo: whether the answer shows the prompt before the completion, in the text and in the log-probabilities.
        reasoning: whether the answer shows the reasoning, in an API where a request asks for it.
        prompt_only: whether the answer shows only the prompt. The engine draws at least one token, which is then left out.
        has_older_calls: whether a call is the function_call of an older API.
        reasoning_fields: the members of a chat's message and deltas that have the reasoning; empty to leave it out.
    """

    model: str
    request_id: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    parts: tuple[str, ...] = ()
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    reasoning: bool = True
    prompt_only: bool = False
    has_older_calls: bool = False
    reasoning_fields: tuple[ReasoningField, ...] = ("reasoning_content",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRequest:
    """A request that is rendered, tokenised and checked. Only the engine checks limits that depend on the model.

    Attributes:
        params: the sampling parameters, which are the same for all prompts.
        thinks_first: whether the model may think before it answers. If so, a grammar constrains the text without its
            reasoning.
        answer_frame: where the reasoning is in the text, and what else may be around the text that a grammar constrains; None
            if there is nothing; `FIND` if the engine has to look for it.
        left_out: the parts of the request that are ignored beside unknown fields, as names for the answer's header.
        make_parser: makes a parser for the text of one choice, which may contain tool calls or reasoning. None if all text is
            content.
    """

    prompts: tuple[TokenPrompt, ...]
    params: SamplingParams
    presentation: Presentation
    priority: int = 0
    cache_salt: str = ""
    thinks_first: bool = False
    answer_frame: GivenFrame = None
    make_parser: Callable[[], OutputParser] | None = None
    left_out: tuple[str, ...] = ()
