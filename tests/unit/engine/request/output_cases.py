"""Requests and outputs for the tests of `OutputProcessor`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from inflight.engine.request.output_processor import OutputProcessor
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.request.request_state import RequestOutputKind
from inflight.interface.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsColumns,
    ResolvedSampling,
)
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from tests.support.fakes_tokenizer import BYTE_VOCAB_SIZE
from tests.support.request_parts import asked_parts

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Processor(OutputProcessor):
    def process(self, outputs: list[EngineCoreOutput]) -> SimpleNamespace:
        """What an engine does that hands outputs out at once."""
        update = self.update(outputs)
        return SimpleNamespace(request_outputs=update.take_outputs(), requests_to_abort=update.requests_to_abort)


def request(request_id: str = "r", prompt: list[int] | None = None, **params: Any) -> ProcessedRequest:
    prompt = prompt or [104, 105]
    sampling = ResolvedSampling(params=SamplingParams(**params), seed=0, max_tokens=99)
    n = sampling.params.n
    sequences = tuple(
        EngineCoreRequest(
            request_id=request_id if n == 1 else f"{index}_{request_id}",
            sampling=sampling,
            parts=asked_parts(sampling.params, index=index),
        )
        for index in range(n)
    )
    return ProcessedRequest(
        request_id=request_id,
        prompt="hi",
        prompt_token_ids=prompt,
        prompt_array=np.array(prompt, dtype=np.int32),
        params=sampling.params,
        arrival_time=1.0,
        sequences=sequences,
    )


def columns(token_ids: list[int], k: int) -> LogprobsColumns:
    """Made-up log-probabilities, a function of the token alone."""
    top = [[token_id, *[(token_id + j) % BYTE_VOCAB_SIZE for j in range(k)]] for token_id in token_ids]
    return LogprobsColumns(
        token_ids=np.array(top, dtype=np.int32).reshape(-1, 1 + k),
        logprobs=np.array([[-0.5 - token_id, *range(0, -k, -1)] for token_id in token_ids], np.float32).reshape(
            -1, 1 + k
        ),
        ranks=np.array([token_id + 3 for token_id in token_ids], dtype=np.int32),
    )


def output(
    request_id: str, token_ids: list[int], finish: FinishReason | None = None, **fields: Any
) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=tuple(token_ids), finish_reason=finish, **fields)


def without_times(result: RequestOutput) -> RequestOutput:
    return replace(result, metrics=None)


def cut(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """The tokens in pieces of these sizes (0 is an empty one), then one by one; the last piece is never empty."""
    pieces, done = [], 0
    for size in sizes:
        if done + size < len(token_ids):
            pieces.append(token_ids[done : done + size])
            done += size
    return pieces + [[token_id] for token_id in token_ids[done:]]


def feed(
    processor: Processor, sequence: str, token_ids: list[int], sizes: list[int], finish: FinishReason, **more: Any
) -> list[RequestOutput]:
    """Send the tokens in pieces, as a core would that learns late of an abort."""
    num_logprobs = more.pop("num_logprobs", None)
    pieces = cut(token_ids, sizes)
    results = []
    for i, piece in enumerate(pieces):
        found = processor.process(
            [
                output(
                    sequence,
                    piece,
                    finish if i == len(pieces) - 1 else None,
                    logprobs=None if num_logprobs is None else columns(piece, num_logprobs),
                    **more,
                )
            ]
        )
        results += found.request_outputs
    return results
