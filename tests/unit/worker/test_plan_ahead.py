"""Steps prepared ahead of their results give the tokens of steps run one by one, on the real worker, in every layout."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inflight.interface.request import ResolvedSampling
from inflight.sampling_params import SamplingParams
from tests.conftest import FULL
from tests.support.model_zoo import VOCAB_SIZE
from tests.unit.worker.driven import MAX_MODEL_LEN, Driven, make_executor, planner, write_small_model
from tests.unit.worker.plan_ahead import Job, PlanAhead

NUM_SEEDS = 60 if FULL else 2
HAPPENS = ("num_preemptions", "num_forced", "num_superseded", "num_late_masks")
LAYOUTS = {"one rank": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "pp3": (1, 3), "tp2-pp2": (2, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("ahead"))


def make_jobs(seed: int) -> list[Job]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 0.5, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"temperature": 1.0, "allowed_token_ids": [5, 6, 9], "frequency_penalty": 2.0, "repetition_penalty": 0.4},
        {"temperature": 0.0, "logit_bias": {5: 3.0}, "repetition_penalty": 0.7},
        {"temperature": 1.3, "top_k": 20, "logprobs": 0, "prompt_logprobs": 0},
    ]
    jobs = []
    for i in range(9):
        params = SamplingParams(**kinds[(i + seed) % len(kinds)])
        words = ((3 + i, 7), (9,)) if i % 4 == 0 else ()
        sampling = ResolvedSampling(
            params=params, seed=100 * seed + i, max_tokens=1 + (5 * i + seed) % 17, bad_words_token_ids=words
        )
        prompt = [(7 * i + 3 * j + seed) % VOCAB_SIZE for j in range(1 + (4 * i + seed) % 13)]
        jobs.append(Job(f"r{i}", prompt, sampling, has_grammar=(i + seed) % 3 > 0))
    return jobs


def drive(driven: Driven, seed: int, **how: Any) -> tuple[list[Job], PlanAhead]:
    jobs = make_jobs(seed)
    ahead = planner(driven, jobs, seed=seed, **how)
    ahead.run()
    assert all(len(job.tokens) == job.end for job in jobs)
    return jobs, ahead


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[list[Job]]:
    """Of each seed: one rank, one slot, one step at a time, whole prompts; a forced token makes it a new request."""
    driven = make_executor(folder, 1, 1, 1)
    how = {"depth": 1, "num_slots": 1, "max_chunk": MAX_MODEL_LEN, "forces": False}
    found = [drive(driven, seed, **how)[0] for seed in range(NUM_SEEDS)]
    driven.executor.shutdown()
    return found


def depths_and_seeds(layout: str, max_drafts: int) -> list[tuple[int, int]]:
    """All of them on one rank, and with full counts. Else every depth with every layout, and with and without drafts, but not
    all three together."""
    if FULL or layout == "one rank":
        return list(itertools.product((1, 2, 3, 5) if FULL else (1, 2, 4), range(NUM_SEEDS)))
    is_odd = (list(LAYOUTS).index(layout) + (max_drafts > 0)) % 2
    return [(1 if is_odd else 2, 0), (4, 1)]


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_depth_of_the_queue_changes_no_token(
    folder: Path, truth: list[list[Job]], layout: str, max_drafts: int
) -> None:
    driven = make_executor(folder, *LAYOUTS[layout], 3, max_drafts)
    counts: Counter[str] = Counter()
    happens = HAPPENS + (("num_accepted", "num_rejected") if max_drafts else ())
    drives = depths_and_seeds(layout, max_drafts)
    for depth, seed in drives:
        jobs, ahead = drive(driven, seed, depth=depth, num_slots=3, max_chunk=5)
        assert [job.tokens for job in jobs] == [job.tokens for job in truth[seed]], (depth, seed)
        for job, same in zip(jobs, truth[seed], strict=True):
            assert job.logprobs == pytest.approx(same.logprobs, abs=1e-3)
            wanted = job.sampling.params.prompt_logprobs is not None
            assert sorted(job.prompt_logprobs) == list(range(1, len(job.prompt) if wanted else 1))
            assert job.prompt_logprobs == pytest.approx(same.prompt_logprobs, abs=1e-3)
        counts.update({name: getattr(ahead, name) for name in happens})
    assert min(counts[name] for name in happens) > len(drives), counts
    driven.executor.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]
