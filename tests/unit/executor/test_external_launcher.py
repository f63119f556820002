"""Two engines with one rank each, in threads of this process: what each sees of the other's rank."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.shared.free_port import free_port
from inflight.envs import LaunchedRank
from inflight.errors import ConfigError, InflightError, StepError, WorkerDiedError
from inflight.executor.external_launcher import ExternalLauncherExecutor, _Peer
from inflight.interface.codec import Message
from inflight.interface.messages import RpcReply, WorkerActivity, WorkerFailure
from inflight.interface.start_up import BeginEpoch, Ready, StartUpFailed
from inflight.interface.step import ModelRunnerOutput
from tests.conformance.configs import engine_config, plan
from tests.conformance.scripted_worker import ScriptedWorker

T = TypeVar("T")
MAX_SECONDS = 300.0


class Engines:
    """Executors of rank 0 and 1, each with a thread that stands for its script.

    `num_machines`: 2 if each rank is told that it is alone on its machine.
    """

    def __init__(self, port: int, num_machines: int = 1, **config: Any) -> None:
        self._scripts = [ThreadPoolExecutor(1, f"script-{rank}") for rank in range(2)]
        self.executors: list[ExternalLauncherExecutor] = []
        self._config = engine_config(backend="external_launcher", **config)
        self._port, self._num_machines = port, num_machines

    def start(self) -> list[InflightError]:
        """The error of each rank that could not start."""
        futures = [self._scripts[rank].submit(self._make, rank) for rank in range(2)]
        errors = [future.exception(MAX_SECONDS) for future in futures]
        self.executors = [future.result() for future in futures if future.exception() is None]
        return [error for error in errors if isinstance(error, InflightError)]

    def _make(self, rank: int) -> ExternalLauncherExecutor:
        local_ranks = range(2) if self._num_machines == 1 else range(rank, rank + 1)
        me = LaunchedRank(rank, 2, "127.0.0.1", self._port, "0", agent_serves_store=False, local_ranks=local_ranks)
        return ExternalLauncherExecutor(self._config, ScriptedWorker, me)

    def both(self, call: Callable[[ExternalLauncherExecutor], T]) -> list[T]:
        """What each script's call returns."""
        futures = [self.one(rank, call) for rank in range(2)]
        return [future.result(MAX_SECONDS) for future in futures]

    def one(self, rank: int, call: Callable[[ExternalLauncherExecutor], T]) -> Future[T]:
        return self._scripts[rank].submit(call, self.executors[rank])

    def close(self) -> None:
        if self.executors:
            self.both(lambda executor: executor.shutdown())
        for script in self._scripts:
            script.shutdown()


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines(free_port(), pipeline_parallel_size=2)
    assert made.start() == []
    yield made
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("inflight-")]
    assert left == []


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def token(output: ModelRunnerOutput) -> int:
    return int(output.sampled_token_ids[0])


def test_every_rank_sees_the_replies_of_all(engines: Engines) -> None:
    assert engines.both(lambda executor: executor.determine_available_memory()) == [[1000, 1001]] * 2
    outputs = engines.both(lambda executor: executor.execute_model(plan(0)))
    assert [token(output) for output in outputs] == [1, 1]  # of the last stage
    values = engines.both(lambda executor: executor.collective_rpc("echo", ((1, [2]),)))
    assert values[0] == values[1] == [(0, ((1, [2]),), {}), (1, ((1, [2]),), {})]
    calls = engines.both(lambda executor: executor.collective_rpc("calls"))
    assert calls[0] == calls[1] == [["load_model", "determine_available_memory", "execute_model(0)"]] * 2


def test_the_launcher_tells_where_the_ranks_run(engines: Engines) -> None:
    assert engines.both(lambda executor: executor.local_ranks) == [(0, 1)] * 2
    assert [executor.places[rank].device_index for rank, executor in enumerate(engines.executors)] == [0, 1]
    apart = Engines(free_port(), num_machines=2, tensor_parallel_size=2)
    assert apart.start() == []
    places = [executor.places[rank] for rank, executor in enumerate(apart.executors)]
    assert [(place.device_index, place.num_local_ranks) for place in places] == [(0, 1), (0, 1)]
    assert apart.both(lambda executor: executor.local_ranks) == [(0,), (1,)]
    apart.close()


def test_an_engine_that_is_behind_misses_no_reply(engines: Engines) -> None:
    """Rank 1 has answered three steps before rank 0 has planned the first."""
    ahead = engines.one(1, lambda executor: [executor.execute_model(plan(i), non_block=True) for i in range(3)])
    futures = ahead.result(MAX_SECONDS)
    time.sleep(0.1)
    assert not any(future.done() for future in futures)
    behind = engines.one(0, lambda executor: [token(executor.execute_model(plan(i))) for i in range(3)])
    assert behind.result(MAX_SECONDS) == [1, 1001, 2001]
    assert [token(future.result(MAX_SECONDS)) for future in futures] == [1, 1001, 2001]


def test_a_rank_says_to_all_engines_what_it_does(engines: Engines) -> None:
    for rank in range(2):
        engines.executors[0]._ask(rank)
    told = engines.executors[0]._table._activities.answers
    end = time.monotonic() + MAX_SECONDS
    while len(told) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert [told[rank].text for rank in range(2)] == ["waiting for a command"] * 2


def test_a_failure_of_one_rank_is_raised_by_all(engines: Engines) -> None:
    engines.both(lambda executor: executor.collective_rpc("script", (1, 0, "raise", "bad luck")))
    errors = engines.both(lambda executor: executor.execute_model(plan(0), non_block=True).exception(MAX_SECONDS))
    for error in errors:
        assert isinstance(error, StepError)
        assert "bad luck" in str(error)
        assert error.rank == 1
    outputs = engines.both(lambda executor: executor.execute_model(plan(1)))
    assert [token(output) for output in outputs] == [1001, 1001]


def test_a_value_that_cannot_be_sent_fails_the_call_on_every_rank(engines: Engines) -> None:
    def ask(executor: ExternalLauncherExecutor) -> str:
        error = executor.collective_rpc("give", ("an object",), non_block=True).exception(MAX_SECONDS)
        return type(error).__name__ + str(error)

    for text in engines.both(ask):
        assert "CodecError" in text


def test_ranks_that_do_not_plan_the_same_are_told_at_once(engines: Engines, tmp_path: Path) -> None:
    """Before the step itself has ended."""
    release = tmp_path / "release"
    engines.both(lambda executor: executor.collective_rpc("script", (None, 0, "hold", str(release))))
    first = engines.one(0, lambda executor: executor.execute_model(plan(0, ("a",)), non_block=True))
    second = engines.one(1, lambda executor: executor.execute_model(plan(0, ("b",)), non_block=True))
    errors = [future.result(MAX_SECONDS).exception(MAX_SECONDS) for future in (first, second)]
    release.touch()
    assert all(isinstance(error, WorkerDiedError) for error in errors)
    assert any("another plan for step 0" in str(error) and "same arguments" in str(error) for error in errors)


def test_a_command_to_an_engine_that_was_shut_down_fails_at_once(engines: Engines) -> None:
    ended = engines.one(0, lambda executor: executor.shutdown())
    time.sleep(0.1)
    going_on = engines.one(1, lambda executor: executor.execute_model(plan(0), non_block=True))
    error = going_on.result(MAX_SECONDS).exception(300)
    assert isinstance(error, WorkerDiedError)
    assert "it has shut its engine down" in str(error)
    ended.result(MAX_SECONDS)


def test_ranks_leave_together(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    """The first to shut down waits for the other, which still gets the answers of both."""
    engines.both(lambda executor: executor.collective_rpc("script", (0, 0, "sleep", 0.3)))
    late = engines.one(1, lambda executor: token(executor.execute_model(plan(0))))
    engines.one(0, lambda executor: executor.execute_model(plan(0), non_block=True))
    early = engines.one(0, lambda executor: executor.shutdown())
    assert late.result(MAX_SECONDS) == 1
    assert not early.done()
    engines.one(1, lambda executor: executor.shutdown()).result(MAX_SECONDS)
    early.result(MAX_SECONDS)
    assert not caplog.records


def test_a_rank_that_does_not_leave_is_waited_for_only_for_a_while(engines: Engines) -> None:
    impatient: Any = engines.executors[0]
    impatient._step_budget = 0.2
    engines.one(0, lambda executor: executor.shutdown()).result(MAX_SECONDS)


@pytest.mark.parametrize(("fault", "kind"), [("1:config", ConfigError), ("0:bug", WorkerDiedError)])
def test_a_rank_that_cannot_start_fails_all(fault: str, kind: type[InflightError]) -> None:
    made = Engines(free_port(), tensor_parallel_size=2, name=fault)
    errors = made.start()
    made.close()
    assert [type(error) for error in errors] == [kind, kind]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]


@pytest.mark.parametrize(
    ("has_stopped", "num_delivered", "is_lost"), [(True, 2, False), (True, 1, True), (False, 2, True)]
)
def test_a_stream_that_ends_is_a_loss_unless_the_rank_has_stopped_and_answered(
    has_stopped: bool, num_delivered: int, is_lost: bool
) -> None:
    executor: Any = object.__new__(ExternalLauncherExecutor)
    stream: Any = None
    executor._peers, executor._num_submitted = {1: (peer := _Peer(stream))}, 2
    peer.num_delivered = num_delivered
    if has_stopped:
        peer.has_stopped.set()
    lost: list[tuple[int, str]] = []
    executor._lose = lambda rank, reason: lost.append((rank, reason))
    executor._stream_ended(1, "it closed its stream")
    assert lost == ([(1, "it closed its stream")] if is_lost else [])


def test_a_rank_that_dies_is_lost_to_all_engines(engines: Engines) -> None:
    engines.both(lambda executor: executor.collective_rpc("script", (0, 0, "die", "out of memory")))
    steps = engines.both(lambda executor: executor.execute_model(plan(0), non_block=True))
    errors = [step.exception(MAX_SECONDS) for step in steps]
    assert all(isinstance(error, WorkerDiedError) and error.rank == 0 for error in errors), errors
    assert "out of memory" in str(errors[0])
    # by chance the dead rank had read the last command or not, and then the operating system resets the connection
    assert any(reason in str(errors[1]) for reason in ("it closed its stream", "Connection reset by peer"))
    for executor in engines.executors:
        with pytest.raises(WorkerDiedError):
            executor.raise_if_lost()


@pytest.mark.parametrize(
    "message",
    [
        BeginEpoch(epoch=1),
        Ready(rank=0),  # for the second time
        Ready(rank=1),
        RpcReply(epoch=0, call_id=0, rank=1),
        WorkerActivity(rank=1, text="", is_waiting=False),
        StartUpFailed(rank=1, failure=WorkerFailure(type_name="", message="", traceback="")),
    ],
)
def test_a_rank_that_sends_what_it_may_not_is_lost(engines: Engines, message: Message) -> None:
    engines.executors[0]._send_to_peers(message)
    died = threading.Event()
    engines.executors[1].set_death_callback(died.set)
    assert died.wait(MAX_SECONDS)
    with pytest.raises(WorkerDiedError, match=f"{type(message).__name__}"):
        engines.executors[1].raise_if_lost()


def test_engines_may_come_one_after_the_other(no_garbage_collection: None) -> None:
    """The store of an engine, and with it the port, is free when the engine is closed, not at some later garbage collection."""
    port = free_port()
    for _ in range(2):
        made = Engines(port, tensor_parallel_size=2)
        assert made.start() == []
        assert [token(output) for output in made.both(lambda executor: executor.execute_model(plan(0)))] == [0, 0]
        made.close()


def test_sizes_must_be_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    me = LaunchedRank(0, 3, "127.0.0.1", 29500, "0", agent_serves_store=True, local_ranks=range(3))
    config = engine_config(tensor_parallel_size=2, backend="external_launcher")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=3 .*tensor_parallel_size=2 x pipeline_parallel_size=1 "):
        ExternalLauncherExecutor(config, ScriptedWorker, me)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node"):
        ExternalLauncherExecutor(config, ScriptedWorker)
