"""`LLM` with several replicas: the same answers as with one, also if a replica is lost, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.engine.request.request_state import RequestState
from inflight.engine.serving.engine_client import EngineClient
from inflight.engine.serving.replicas import Replicas
from inflight.entrypoints.replicated_engine import ReplicatedEngine
from inflight.errors import ConfigError, EngineClosedError, EngineDeadError, InvalidRequestError
from inflight.outputs import RequestOutput
from tests.support.processes import children, exists, have_ended
from tests.support.waits import wait_until

OPTIONS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 1 << 24, "max_model_len": 512, "dtype": "float32"}
PROMPTS = [f"Tell me a story about {number} foxes." for number in range(8)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.9 if number % 2 else 0.0, n=1 + number % 3) for number in range(8)
]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    with LLM(seed=5, **OPTIONS) as llm:
        return tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(seed=5, data_parallel_size=2, **OPTIONS) as made:
        yield made


def engine_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm._engine, ReplicatedEngine)
    return llm._engine


def pids(llm: LLM) -> list[int]:
    return [keeper.process.process.pid for keeper in engine_of(llm)._engine._keepers if keeper.process is not None]


def test_answers_are_those_of_one_engine(
    llm: LLM, expected: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a seed, too: the seeds of both kinds of engines are derived in the same way."""
    used: list[int] = []
    give = Replicas.give

    def noted(self: Replicas, state: RequestState, engine: EngineClient) -> None:
        used.append(engine.number)
        give(self, state, engine)

    monkeypatch.setattr(Replicas, "give", noted)
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    assert set(used) == {0, 1}, "the prompts are divided"
    used.clear()
    for prompts in ([PROMPTS[0], {"prompt": 3}], [PROMPTS[0], ""]):
        with pytest.raises(InvalidRequestError):
            llm.generate(prompts, PARAMS[0], use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="give only SamplingParams"):
        llm.generate(PROMPTS[:2], [PARAMS[0], 5], use_tqdm=False)  # type: ignore[list-item]
    assert not used, "nothing of these calls was computed"
    assert len(llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)) == len(used) == 1, "nor by the next call"


def test_other_calls(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "What is 2 + 3?"}], SamplingParams(temperature=0.0, max_tokens=16))
    assert "5" in answer.outputs[0].text
    llm.reset_prefix_cache()
    short = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)  # no call has too many prompts
    assert (
        len(llm.generate([{"prompt_token_ids": [5, 6 + i % 99]} for i in range(2100)], short, use_tqdm=False)) == 2100
    )
    if (child := os.fork()) == 0:  # the threads of the parent are not there
        try:
            llm.generate(PROMPTS, use_tqdm=False)
        except EngineClosedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for call in (lambda: llm.collective_rpc("pid"), llm.timeline_events):
        with pytest.raises(ConfigError, match="leave data_parallel_size out"):
            call()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.generate(PROMPTS, use_tqdm=False)


def test_a_replica_that_is_lost_changes_no_token(llm: LLM, expected: list[list[list[int]]]) -> None:
    replicas, pid = engine_of(llm)._engine._replicas, pids(llm)[0]
    give = replicas.give

    def kill_then_give(state: RequestState, engine: EngineClient) -> None:
        give(state, engine)
        if engine.number == 0 and engine.is_connected and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    killed: list[int] = []
    replicas.give = kill_then_give  # type: ignore[method-assign]
    assert tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
    wait_until(lambda: replicas.fault_status.num_recoveries == {"engine_died": 1})


def test_if_all_are_lost_for_good_the_call_fails() -> None:
    with LLM(data_parallel_size=2, enable_fault_tolerance=False, **OPTIONS) as llm:
        for pid in pids(llm):
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="process is gone"):
                llm.generate(PROMPTS * 4, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)


def test_a_start_that_fails_leaves_nothing() -> None:
    before, threads = set(children(os.getpid())), set(threading.enumerate())
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        LLM(data_parallel_size=2, **{**OPTIONS, "kv_cache_memory_bytes": 1 << 10})
    assert have_ended(set(children(os.getpid())) - before, 60)
    wait_until(lambda: set(threading.enumerate()) <= threads)


def test_replicas_end_with_the_last_reference_beside_a_forked_process(caplog: pytest.LogCaptureFixture) -> None:
    processes = children(os.getpid())
    llm: LLM | None = LLM(data_parallel_size=2, **OPTIONS)
    started = set(children(os.getpid())) - set(processes)
    assert len(started) >= 2
    if (child := os.fork()) == 0:  # it has copies of all sockets
        signal.pause()
    try:
        del llm
        gc.collect()
        assert not any(exists(pid) for pid in started)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert "did not end in time" not in caplog.text
