"""The GPU's runner gives the tokens of the CPU's, whatever its streams do that no event forbids; a wait left out is found."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inflight.config.architecture import INFLIGHT, TRANSFORMERS
from inflight.device.accelerator import Event
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import ModelRunnerOutput
from inflight.sampling_params import SamplingParams
from inflight.timeline import Timeline
from inflight.worker.gpu.copy_out import CopiedStep
from inflight.worker.gpu.cuda_graph import GRAPH_BYTES, decode_sizes, mixed_sizes, padded_size
from inflight.worker.gpu.device_state import num_cache_groups
from inflight.worker.gpu.graph_model_runner import DeviceStep, GraphModelRunner
from inflight.worker.model_runner import ModelRunner
from inflight.worker.runner import Runner
from inflight.worker.worker import Worker
from tests.conformance.configs import engine_config
from tests.conftest import FULL_GPU
from tests.support.fake_gpu import COMPUTE_FIRST, COPY_OUT_FIRST, FakeEvent, FakeGpu, FakeStream, install
from tests.support.model_zoo import VOCAB_SIZE
from tests.unit.worker.driven import MAX_MODEL_LEN, Driven, make_executor, planner, workers_of, write_small_model
from tests.unit.worker.plan_ahead import Job

NUM_SLOTS = 3
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"temperature": 1.0, "allowed_token_ids": [5, 6, 9], "frequency_penalty": 2.0, "repetition_penalty": 0.4},
    {"temperature": 1.3, "top_k": 20, "logprobs": 0},
    {"temperature": 0.9, "top_p": 0.7, "min_p": 0.01, "logit_bias": {5: 3.0}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("graphs"))


def make_jobs(seed: int, *, plain: bool = False) -> list[Job]:
    jobs = []
    for i in range(3 if plain else 6):
        params = SamplingParams(**(KINDS[0] if plain else KINDS[(i + seed) % len(KINDS)]))
        words = ((3 + i, 7), (9,)) if i % 4 == 0 and not plain else ()
        sampling = ResolvedSampling(
            params=params, seed=100 * seed + i, max_tokens=3 + (5 * i + seed) % 6, bad_words_token_ids=words
        )
        prompt = [(7 * i + 3 * j + seed) % VOCAB_SIZE for j in range(1 + (4 * i + seed) % 13)]
        jobs.append(Job(f"r{i}", prompt, sampling, has_grammar=not plain and (i + seed) % 3 > 0))
    return jobs


def drive(driven: Driven, jobs: list[Job], *, seed: int, depth: int, num_slots: int = NUM_SLOTS, **how: Any) -> Any:
    ahead = planner(driven, jobs, seed=seed, depth=depth, num_slots=num_slots, **{"max_chunk": 5, **how})
    ahead.run()
    return ahead


def truth(folder: Path, seed: int, *, plain: bool = False) -> list[Job]:
    driven = make_executor(folder, 1, 1, 1)
    jobs = make_jobs(seed, plain=plain)
    drive(driven, jobs, seed=seed, depth=1, num_slots=1, max_chunk=MAX_MODEL_LEN, forces=False)
    driven.executor.shutdown()
    return jobs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What the runner has met."""
    counts: Counter[str] = Counter()
    draws = GraphModelRunner._enqueue_draws

    def counting(runner: GraphModelRunner, step: DeviceStep, grammar_output: Any) -> Any:
        counts.update({step.shape.kind: 1, "continued": step.continues, "late": step.kept_logits is not None})
        return draws(runner, step, grammar_output)

    monkeypatch.setattr(GraphModelRunner, "_enqueue_draws", counting)
    return counts


@pytest.mark.parametrize(
    ("order", "depth", "engine_args"),
    [
        # mixed batches of up to 8 tokens are graphs, larger ones are not
        (COPY_OUT_FIRST, 4, {"cuda_graph_max_tokens": 8}),
        (COMPUTE_FIRST, 2, {"enforce_eager": True}),
        *([(COMPUTE_FIRST, 3, {"cuda_graph_max_tokens": 16}), (COPY_OUT_FIRST, 1, {})] if FULL_GPU else []),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: Counter[str],
    order: tuple[str, ...],
    depth: int,
    engine_args: dict[str, Any],
) -> None:
    expected = truth(folder, seed=1)
    gpu = FakeGpu(order=order)
    install(monkeypatch, gpu)
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", depth=depth, **engine_args)
    report = workers_of(driven)[0].graph_report()
    assert report["num_graphs"] == gpu.num_graphs and (gpu.num_graphs > 0) == ("enforce_eager" not in engine_args)
    jobs = make_jobs(1)
    ahead = drive(driven, jobs, seed=1, depth=depth)
    assert [job.tokens for job in jobs] == [job.tokens for job in expected]
    for job, same in zip(jobs, expected, strict=True):
        assert job.logprobs == pytest.approx(same.logprobs, abs=1e-3)
    driven.executor.shutdown()
    assert seen["decode"] and seen["continued"] and (seen["mixed"] or "enforce_eager" in engine_args), seen
    assert not depth > 2 or (seen["late"] and ahead.num_late_masks), seen


def test_memory_is_reserved_for_every_group_of_a_hybrid_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(order=COMPUTE_FIRST))
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", depth=1, enforce_eager=True)
    runner = workers_of(driven)[0].runner
    assert isinstance(runner, GraphModelRunner)
    num_groups = num_cache_groups(runner._config.model.architecture)
    assert num_groups == driven.num_groups == 3 > len(set(runner.kv_cache_specs().values()))
    assert runner.reserved_bytes(0) >= runner._state.flat.nbytes
    driven.executor.shutdown()


def test_memory_is_reserved_for_every_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the largest graph, its share of the memory of the largest step."""
    gpu = FakeGpu(order=COMPUTE_FIRST)
    install(monkeypatch, gpu)
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", depth=1, cuda_graph_max_tokens=8)
    runner = workers_of(driven)[0].runner
    assert isinstance(runner, GraphModelRunner)
    with_graphs = runner.reserved_bytes(0)
    most_tokens = runner._config.scheduler.max_num_batched_tokens
    assert runner.reserved_bytes(1000 * most_tokens) == with_graphs + 1000 * 8
    runner._mixed_sizes, runner._decode_sizes = [], []
    assert with_graphs - runner.reserved_bytes(0) == gpu.num_graphs * GRAPH_BYTES
    driven.executor.shutdown()


def test_only_a_rank_that_draws_reserves_memory_for_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(order=COMPUTE_FIRST))
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", depth=1, enforce_eager=True)
    runner = workers_of(driven)[0].runner
    assert isinstance(runner, GraphModelRunner)
    programs, drawn = runner._programs, []
    monkeypatch.setattr(programs._sampler, "draw", lambda logits, *_: drawn.append((programs._draws, len(logits))))
    with torch.inference_mode():
        hidden = torch.zeros(2, runner._config.model.architecture.hidden_size)
        for draws in (True, False):
            programs._draws = draws
            programs.profile_draws(hidden)
    assert drawn == [(True, 2)]
    driven.executor.shutdown()


@pytest.mark.parametrize(("implementation", "kind"), [(INFLIGHT, GraphModelRunner), (TRANSFORMERS, ModelRunner)])
def test_only_models_that_never_wait_for_the_device_are_recorded(implementation: str, kind: type[Runner]) -> None:
    """transformers' code may wait for it."""
    config = engine_config()
    architecture = replace(config.model.architecture, implementation=implementation)
    config = replace(config, model=replace(config.model, architecture=architecture))
    gpu = FakeGpu()
    worker: Any = SimpleNamespace(_config=config, _device=gpu)
    assert Worker._runner_class(worker) is kind
    gpu.close()


@pytest.mark.parametrize(("drawn", "told"), [([-1, 5], [[[0], [5]]]), ([], [])])
def test_other_stages_get_token_ids_even_where_no_token_was_possible(drawn: list[int], told: list[Any]) -> None:
    """Steps of the request may be under way there, and they look up its embedding."""
    sent: list[Any] = []
    sender = SimpleNamespace(send=lambda message: sent.append(message.tolist()))
    runner: Any = SimpleNamespace(
        _draws=True, _tells=True, _timeline=Timeline(), _pipeline=SimpleNamespace(senders=[sender])
    )
    output = ModelRunnerOutput(step_id=3, sampled_token_ids=np.array(drawn, dtype=np.int32))
    step: Any = SimpleNamespace(plan=SimpleNamespace(step_id=3), out=SimpleNamespace(wait=lambda step_id: output))
    assert GraphModelRunner.drain(runner, step) is output
    assert sent == told


def test_the_time_of_a_step_begins_when_the_step_before_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was launched earlier, so that the GPU has no pause."""
    gpu, clock = FakeGpu(), iter([10.0, 12.5, 30.0])
    monkeypatch.setattr("inflight.worker.step_pipeline.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    worker: Any = SimpleNamespace(_device=gpu, _last_end=0.0)
    steps: list[Any] = [SimpleNamespace(started_at=start) for start in (4.0, 5.0, 29.0)]
    assert [Worker._compute_seconds(worker, step) for step in steps] == [6.0, 2.5, 1.0]
    gpu.close()


def test_a_dummy_step_between_two_steps_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It overwrites the state that the draw of the first step has advanced to the second."""
    expected = [job.tokens for job in truth(folder, seed=0, plain=True)]
    install(monkeypatch, FakeGpu(order=COMPUTE_FIRST))
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", depth=1, enforce_eager=True)
    jobs = make_jobs(0, plain=True)
    ahead = planner(driven, jobs, seed=0, depth=1, num_slots=NUM_SLOTS, max_chunk=5)
    commit = ahead.commit

    def commit_and_check() -> None:
        commit()
        driven.executor.collective_rpc("execute_dummy_batch")

    ahead.commit = commit_and_check  # type: ignore[method-assign]
    ahead.run()
    assert [job.tokens for job in jobs] == expected
    driven.executor.shutdown()


def copies_do_not_wait_for_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = FakeStream.wait

    def wait_unless(self: FakeStream, event: Event) -> None:
        if self.name != "copy_out":
            wait(self, event)

    monkeypatch.setattr(FakeStream, "wait", wait_unless)


def draws_do_not_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    start = CopiedStep.start

    def start_as_if_ended(*args: Any) -> Event:
        event = FakeEvent(args[1])
        event.done = start(*args) is not None
        return event

    monkeypatch.setattr(CopiedStep, "start", start_as_if_ended)


@pytest.mark.parametrize(
    ("mutation", "order"),
    [(copies_do_not_wait_for_draws, COPY_OUT_FIRST), (draws_do_not_wait_for_copies, COMPUTE_FIRST)],
)
def test_a_wait_left_out_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutation: Any, order: tuple[str, ...]
) -> None:
    """Those of the staging ring are left out in `test_staging`."""
    expected = [job.tokens for job in truth(folder, seed=0, plain=True)]
    install(monkeypatch, FakeGpu(order=order))
    driven = make_executor(folder, 1, 1, NUM_SLOTS, device="cuda", enforce_eager=True)
    mutation(monkeypatch)
    jobs = make_jobs(0, plain=True)
    try:
        drive(driven, jobs, seed=0, depth=2)
    except Exception:
        return  # what it computed with was no token
    finally:
        driven.executor.shutdown()
    assert [job.tokens for job in jobs] != expected


def test_sizes_hold_every_batch_and_do_not_pad_much() -> None:
    for most in (1, 3, 8, 9, 256, 1000):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for size in range(1, most + 1):
            padded = padded_size(size, sizes)
            assert size <= padded <= max(2 * size, size + 8) and padded in sizes
    assert mixed_sizes(0) == []
    for most in (1, 8, 16, 100, 512, 2048):
        sizes = mixed_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        assert all(b <= 2 * a or b <= 16 for a, b in itertools.pairwise(sizes)), sizes
    assert padded_size(7, []) == 7 and padded_size(np.int64(3), [2, 4]) == 4
