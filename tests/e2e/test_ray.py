"""Ranks whose machines Ray has chosen: their starts, their ends, and a Ray that is gone."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.fault_tolerance import FaultToleranceConfig
from inflight.errors import ConfigError, WorkerDiedError
from inflight.executor import ray_executor, recovery
from inflight.executor.ray_executor import RayExecutor
from tests.conformance import test_executor, test_executor_faults
from tests.conformance.configs import engine_config, plan
from tests.conformance.conftest import EXECUTORS, ExecutorFactory
from tests.support.processes import children, exists, have_ended
from tests.support.ray_cluster import start_cluster
from tests.support.waits import wait_until
from tests.unit.executor.processes import SCRIPTED, pids_of, run_script

STEPS = itertools.count()


def ray_config(num_ranks: int = 2) -> EngineConfig:
    return engine_config(tensor_parallel_size=num_ranks, backend="ray")


@pytest.fixture(scope="module")
def executor(ray_cluster: None) -> Iterator[RayExecutor]:
    made = RayExecutor(ray_config(), SCRIPTED)
    yield made
    made.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ray_pid(executor: RayExecutor) -> int:
    """The process that talks to Ray."""
    assert executor._ray is not None
    return executor._ray[0].pid


def run_step(executor: RayExecutor) -> None:
    step_id = next(STEPS)
    assert executor.execute_model(plan(step_id)).sampled_token_ids.tolist() == [1000 * step_id]


def recover(executor: RayExecutor, rank: int) -> None:
    with pytest.raises(WorkerDiedError, match=f"rank {rank} (was lost|is gone)") as caught:
        executor.execute_model(plan(next(STEPS)))
    assert recovery.recover(executor, caught.value).replaced == (rank,)
    run_step(executor)


def lose(executor: RayExecutor, rank: int) -> None:
    os.kill(pids_of(executor)[rank], signal.SIGKILL)
    recover(executor, rank)


def test_ranks_are_told_where_they_are(executor: RayExecutor) -> None:
    assert executor.local_ranks == (0, 1)
    assert executor.collective_rpc("told") == [(0, 2, 0), (1, 2, 0)]
    assert [parent(pid) for pid in pids_of(executor)] == [1, 1], "a rank must not end with its actor"


def test_the_ranks_go_on_without_the_process_that_talks_to_ray(
    executor: RayExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped, as if it hung. Then it is killed."""
    pids, old = pids_of(executor), ray_pid(executor)
    os.kill(old, signal.SIGSTOP)
    wait_until(lambda: "the process that talks to Ray has ended" in caplog.text)
    run_step(executor)
    assert pids_of(executor) == pids
    lose(executor, 1)  # another process asks Ray, which has ended all actors of the first one
    assert ray_pid(executor) != old
    assert pids_of(executor)[0] == pids[0]
    lose(executor, 0)
    assert executor.collective_rpc("told") == [(0, 2, 0), (1, 2, 0)]


def test_a_rank_that_is_stopped_is_killed_before_it_is_replaced(executor: RayExecutor) -> None:
    pid = pids_of(executor)[1]
    os.kill(pid, signal.SIGSTOP)
    executor._io.run(lambda: executor._lose(1, executor._ranks[1], "it is stopped"))
    recover(executor, 1)
    assert not exists(pid)


@pytest.mark.parametrize(
    "promise",
    [
        test_executor.test_tokens_come_from_the_output_rank,
        test_executor_faults.test_all_ranks_may_die_at_once,
        test_executor_faults.test_a_death_during_a_recovery_is_another_epoch,
    ],
)
def test_some_promises_of_every_executor(promise: Callable[[ExecutorFactory], None], ray_cluster: None) -> None:
    factory = ExecutorFactory(*EXECUTORS["ray-tp2"])
    try:
        promise(factory)
    finally:
        for made in factory.made:
            made.shutdown()


def test_what_a_rank_raises_while_it_loads_is_raised(ray_cluster: None) -> None:
    config = engine_config(tensor_parallel_size=2, backend="ray", name="1:config")
    with pytest.raises(ConfigError, match="rank 1: no such model"):
        RayExecutor(config, SCRIPTED)


# -- other clusters --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_cluster(folder: Path, *cpus: int) -> Iterator[int]:
    """A cluster of this test alone, with a machine for each of `cpus`. Yields the process that keeps it."""
    with pytest.MonkeyPatch.context() as patch:
        keeper = start_cluster(folder / "address", os.getpid(), *cpus)
        patch.setenv("RAY_ADDRESS", (folder / "address").read_text())
        try:
            yield keeper
        finally:
            os.kill(keeper, signal.SIGTERM)
            assert have_ended([keeper])


@contextlib.contextmanager
def running() -> Iterator[RayExecutor]:
    executor = RayExecutor(ray_config(), SCRIPTED)
    try:
        yield executor
    finally:
        executor.shutdown()


def kill_all(keeper: int, text: str) -> None:
    """Kill the processes of a cluster whose command line contains `text`, and all that these have started."""
    found = []
    for pid in children(keeper):
        with contextlib.suppress(OSError):  # it has just ended
            if text in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    assert found
    below = [pid for raylet in found for pid in children(raylet)]
    for pid in (*found, *below):
        with contextlib.suppress(ProcessLookupError):  # it has ended with another one
            os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_a_lost_machine_is_replaced_by_another_one(tmp_path: Path) -> None:
    with own_cluster(tmp_path, 1, 1, 1) as keeper, running() as executor:
        machines = [place.machine for place in executor.places]
        assert len(set(machines)) == 2
        assert executor.local_ranks == tuple(rank for rank in range(2) if machines[rank] == 0)
        assert executor.collective_rpc("told") == [(0, 1, 0), (0, 1, 0)]
        assert executor._placed is not None
        kill_all(keeper, f"--node_id={executor._placed.machines[1]}")
        run_step(executor)  # the rank itself lives
        lose(executor, 1)
        assert executor.places[0].machine == machines[0]
        assert executor.places[1].machine not in machines
        assert executor.collective_rpc("told") == [(0, 1, 0), (0, 1, 0)]


@pytest.mark.full
def test_the_ranks_go_on_without_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Ray waits a minute for the head before it ends the processes that use Ray."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")
    with own_cluster(tmp_path, 2) as keeper, running() as executor:
        pids, talks = pids_of(executor), ray_pid(executor)
        kill_all(keeper, "/gcs_server")
        assert have_ended([talks]), "Ray ends the processes that use it"
        for _ in range(3):
            run_step(executor)
        assert pids_of(executor) == pids
    assert have_ended(pids)


CALLER = """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=1)
    def serve():
        from tests.conformance.configs import engine_config, plan
        from inflight.executor.ray_executor import RayExecutor
        executor = RayExecutor(engine_config(tensor_parallel_size=2, backend="ray"), "SCRIPTED")
        tokens = executor.execute_model(plan(1)).sampled_token_ids.tolist()
        free = ray.available_resources().get("CPU", 0)
        executor.shutdown()
        return tokens, free

    ray.init(logging_level="ERROR")
    before = ray.available_resources()["CPU"]
    group = placement_group([{"CPU": 1}] * 3)
    ray.get(group.ready())
    tokens, free = ray.get(serve.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote())
    print(tokens, before - free)
""".replace("SCRIPTED", SCRIPTED)


@pytest.mark.full
def test_inside_a_placement_group_of_the_caller_no_other_one_is_made(tmp_path: Path) -> None:
    with own_cluster(tmp_path, 4), run_script(CALLER) as script:
        output, errors = script.communicate(timeout=300)
        assert output == "[1000] 3.0\n", errors


# -- the user's mistakes ---------------------------------------------------------------------------------------------------


def test_too_few_cores(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "MAX_PLACEMENT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=r"40 ranks .* have 16 CPUs, of which \d+"):
        RayExecutor(ray_config(40), SCRIPTED)


def test_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'inflight-llm[ray]'")):
        RayExecutor(ray_config(), SCRIPTED)


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001"])
def test_an_address_that_names_no_cluster(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS='{address}'"):
        RayExecutor(ray_config(), SCRIPTED)


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray_executor, "MAX_ANSWER_SECONDS", 2.0)
    with pytest.raises(ConfigError, match=r"within 2 s.*RAY_ADDRESS"):
        RayExecutor(ray_config(), SCRIPTED)


def test_no_spare_processes() -> None:
    config = engine_config(backend="ray")

    with pytest.raises(ConfigError, match="spare_workers=1 with distributed_executor_backend='ray'"):
        RayExecutor(replace(config, fault_tolerance=FaultToleranceConfig(spare_workers=1)), SCRIPTED)
