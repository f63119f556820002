"""`ValidatedRequest`: what every kind of request becomes before anything is generated, and how its answer is shown.

The shapes of the endpoints are adapters: one makes this of a body, one (a presenter) makes an answer of what the engine says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.parsers.output_parser import OutputParser
from inflight.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """One prompt with its own parameters; they differ in max_tokens only. `text` is None where it was given as token ids."""

    token_ids: list[int]
    text: str | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Presentation:
    """How the answer is written.

    Attributes:
        model: the name that the client used.
        include_usage: of a stream: a last chunk with the usage.
        continuous_usage: of a stream: the usage so far in every chunk.
        top_logprobs: so many alternatives beside each token; None: no log-probabilities at all.
        prompt_logprobs: the prompt's own are part of the answer, in vLLM's form.
        return_token_ids: token ids of prompt and completions are part of the answer.
        echo: the prompt's text, and its log-probabilities, stand before the completion's.
        prompt_only: nothing but the prompt is shown: the one token that was drawn is dropped.
        make_parser: for the text of each choice, which holds tool calls or reasoning; None: it is content as it stands.
    """

    model: str
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    echo: bool = False
    prompt_only: bool = False
    make_parser: Callable[[], OutputParser] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRequest:
    """A request that is rendered and tokenised, and checked except against the engine's limits.

    `thinks_first`: the model may think before it answers, so a grammar starts only after the thinking.
    """

    prompts: tuple[TokenPrompt, ...]
    presentation: Presentation
    priority: int = 0
    cache_salt: str = ""
    thinks_first: bool = False
