"""What the engine says, for the tests of presenters; and chunks taken apart."""

from __future__ import annotations

import json
from typing import Any

from inflight.entrypoints.http.validated import Presentation, TokenPrompt, ValidatedRequest
from inflight.outputs import CompletionOutput, Logprob, RequestOutput
from inflight.sampling_params import SamplingParams


def request(
    num_prompts: int = 1, *, n: int = 1, top_logprobs: int | None = None, **presentation: Any
) -> ValidatedRequest:
    return ValidatedRequest(
        prompts=tuple(TokenPrompt([1, 2, 3], f"p{i} ") for i in range(num_prompts)),
        params=SamplingParams(n=n, logprobs=top_logprobs),
        presentation=Presentation(model="m", **presentation),
    )


def completion(text: str, num_tokens: int | None = None, **more: Any) -> CompletionOutput:
    """A token for each character, if `num_tokens` does not say how many."""
    count = len(text) if num_tokens is None else num_tokens
    return CompletionOutput(**{"index": 0, "text": text, "token_ids": [7] * count, **more})


def output(*completions: CompletionOutput, prompt: int = 3, prompt_logprobs: Any = None, **more: Any) -> RequestOutput:
    """`prompt`: its number of tokens."""
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=list(range(prompt)),
        outputs=list(completions),
        parts={} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs},
        **more,
    )


def row(text: str, logprob: float = -1.0) -> dict[int, Logprob]:
    return {7: Logprob(logprob, 1, text)}


def opened(chunks: list[bytes]) -> list[dict[str, Any]]:
    """The JSON of events."""
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    return [json.loads(chunk[6:]) for chunk in chunks]
