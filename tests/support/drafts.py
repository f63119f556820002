"""For tests of whole engines with drafts (guesses of the next tokens)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from inflight import LLM, SamplingParams
from inflight.sample.sampler import Sampler
from inflight.spec_decode import adaptive, model_drafter
from inflight.spec_decode.draft_choice import DraftChoice
from inflight.spec_decode.model_drafter import DraftInputs, ModelDrafter

ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 160,
    "num_threads": 1,
    "kv_cache_memory_bytes": 1 << 22,
    "distributed_executor_backend": "uni",
}
NUM_DRAFTS = 3
PROMPTS = [[5, 9, 100, 31, 7] * count for count in (1, 3, 9, 14, 2, 5)]

Tokens = list[list[int]]


class _AllDrafts(DraftChoice):
    def counts(
        self, probabilities: Sequence[float], most: Sequence[int], num_behind: npt.NDArray[np.integer] | None = None
    ) -> list[int]:
        return list(most)

    def may_pay(self, num_requests: int) -> bool:
        return True


@contextlib.contextmanager
def verify_all_drafts() -> Iterator[None]:
    """Proposers that are made inside propose all drafts that they find, also those that are rarely right. Otherwise tests that
    compare tokens would see hardly any wrong drafts. It has no effect on ranks that are processes of their own."""
    with (
        mock.patch.object(adaptive, "DraftChoice", _AllDrafts),
        mock.patch.object(model_drafter, "DraftChoice", _AllDrafts),
    ):
        yield


def generate(llm: LLM, temperature: float, *, count: int = 1) -> Tokens:
    """`count` answers of 40 tokens to each of PROMPTS, with a seed for each."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=40, ignore_eos=True, n=count)
        for seed in range(len(PROMPTS))
    ]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def without_drafts(folder: Path, *, count: int = 1) -> dict[float, Tokens]:
    """Temperature -> what `generate` gives without drafts."""
    with LLM(str(folder), **ARGUMENTS) as llm:
        return {temperature: generate(llm, temperature, count=count) for temperature in (0.0, 1.0)}


def generate_with_a_killed_rank(folder: Path, speculative: dict[str, Any], prompt: list[int]) -> list[int]:
    """40 greedy tokens of an engine of two ranks. The rank that draws is killed while drafts are verified."""
    arguments = {**ARGUMENTS, "distributed_executor_backend": "mp", "tensor_parallel_size": 2}
    with LLM(str(folder), **arguments, speculative_config=speculative) as llm:
        engine = llm.llm_engine
        engine.add_request("0", prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        found: list[int] = []
        killed = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                found = list(output.outputs[0].token_ids)
            if not killed and engine.core.scheduler.stats.num_draft_tokens > 5:
                os.kill(engine.executor._ranks[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
                killed = True
        assert killed
    return found


class Proposal(NamedTuple):
    """The drafts of one request in one step, behind its `tokens`. `logits`: [number of drafts, vocab_size]."""

    tokens: list[int]
    drafts: list[int]
    logits: torch.Tensor


class _Sampling:
    """`DraftInputs.sampling` that remembers for which requests something was drawn last."""

    def __init__(self, rows: Any) -> None:
        self._rows, self.places = rows, list[int]()

    def take(self, places: Any) -> Any:
        self.places = places.tolist()
        return self._rows.take(places)


@contextlib.contextmanager
def recorded() -> Iterator[list[Proposal]]:
    """All proposals of drafters whose ranks are threads."""
    found: list[Proposal] = []
    propose: Callable[..., Any] = ModelDrafter.propose
    draw: Callable[..., Any] = ModelDrafter._draw

    def recording(drafter: ModelDrafter, inputs: DraftInputs, sampler: Sampler) -> Any:
        sampling = _Sampling(inputs.sampling)
        logits: dict[int, list[torch.Tensor]] = {}

        def record(self: ModelDrafter, given: torch.Tensor, *others: Any) -> Any:
            for place, row in zip(sampling.places, given, strict=True):
                logits.setdefault(place, []).append(row.clone())
            return draw(self, given, *others)

        with mock.patch.object(ModelDrafter, "_draw", record):
            drafts = propose(drafter, inputs._replace(sampling=sampling), sampler)  # type: ignore[arg-type]
        for place, each in logits.items():
            row = inputs.drawing_rows[place]
            tokens = inputs.token_ids[inputs.slots[row], : inputs.num_tokens[row]].tolist()
            found.append(Proposal(tokens, drafts[place][: len(each)].tolist(), torch.stack(each)))
        return drafts

    with mock.patch.object(ModelDrafter, "propose", recording):
        yield found
