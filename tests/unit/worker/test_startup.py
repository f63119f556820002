"""Which compute threads `start_threads` binds to cores, and which of them the watch may move."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from inflight.config.architecture import INFLIGHT, TRANSFORMERS
from inflight.config.engine import EngineConfig
from inflight.config.ranks import places_on
from inflight.device.base import Device
from inflight.device.cpu import CpuDevice
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import LoneWorld
from inflight.errors import ConfigError
from inflight.interface.worker import Rendezvous
from inflight.worker import startup
from inflight.worker.core_binding import CoreBinding
from inflight.worker.core_sharing import CoreWatch, LeaderPlace
from inflight.worker.fewer_threads import FewerThreads
from tests.conformance.configs import engine_config

USABLE = sorted(os.sched_getaffinity(0))


class Machine:
    """
    Attributes:
        cores: which the rank gets.
        asked: with what `cores_of_rank` was called.
        error: what the operating system says when threads are bound, of which the first is bound already.
        bound: to which cores threads were bound.
        implementation: whose code computes the model.
    """

    def __init__(self, device: CpuDevice) -> None:
        self.cores: list[int] | None = [3, 4]
        self.asked: dict[str, object] = {}
        self.error: ConfigError | None = None
        self.bound: list[list[int]] = []
        self.implementation = INFLIGHT
        self._device = device

    def choose_cores(self, setting: str, **arguments: object) -> list[int] | None:
        self.asked = {"setting": setting, **arguments}
        return self.cores

    def affinity(self) -> list[int]:
        """Of the compute thread."""
        return sorted(self._device.submit(partial(os.sched_getaffinity, 0)).result())

    def bind(self, kernels: object, cores: list[int]) -> None:
        if self.error is not None:
            os.sched_setaffinity(0, USABLE[:1])
            raise self.error
        self.bound.append(cores)

    def start(self, threads_bind: str) -> CoreWatch:
        options = SimpleNamespace(kind="cpu", num_threads=1, threads_bind=threads_bind)
        model = SimpleNamespace(architecture=SimpleNamespace(implementation=self.implementation))
        config = cast("EngineConfig", SimpleNamespace(device=options, model=model))
        watch = startup.start_threads(config, places_on([0, 0])[1], self._device)
        assert watch is not None
        return watch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    device = CpuDevice()
    made = Machine(device)
    monkeypatch.setattr(startup, "cores_of_rank", made.choose_cores)
    monkeypatch.setattr(startup, "load_kernels", object)
    monkeypatch.setattr(startup, "bind_threads", made.bind)
    yield made
    device.close()


@pytest.mark.parametrize(
    ("cores", "implementation", "kind"),
    [
        ([3, 4], INFLIGHT, LeaderPlace),
        ([3], INFLIGHT, CoreBinding),
        ([3, 4], TRANSFORMERS, FewerThreads),
        ([3], TRANSFORMERS, CoreBinding),
    ],
)
def test_threads_that_are_bound_automatically_may_be_moved(
    machine: Machine, cores: list[int], implementation: str, kind: type
) -> None:
    machine.cores, machine.implementation = cores, implementation
    assert type(machine.start("auto")._binding) is kind
    assert machine.bound == [cores]


def test_threads_whose_cores_the_user_has_named_stay_there(machine: Machine) -> None:
    assert machine.start("3,4")._binding is None
    assert machine.bound == [[3, 4]]
    place = {"local_rank": 1, "num_local_ranks": 2}
    assert machine.asked == {"setting": "3,4", "usable": USABLE, "num_threads": 1, **place}


def test_what_the_operating_system_refuses(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.cores, machine.error = USABLE, ConfigError("no")
    with caplog.at_level("WARNING"):
        assert machine.start("auto")._binding is None
    assert caplog.messages == ["no"]
    assert machine.affinity() == USABLE
    with pytest.raises(ConfigError, match=r"^no$"):
        machine.start(",".join(map(str, USABLE)))


def test_without_kernels_nothing_is_bound(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "load_kernels", lambda: None)
    assert machine.start("auto")._binding is None
    with pytest.raises(ConfigError, match=r"^cpu_threads_bind='3,4'"):
        machine.start("3,4")
    assert machine.bound == []


@pytest.mark.parametrize("threads_bind", ["auto", "off"])
def test_a_rank_without_cores_of_its_own_is_not_bound(machine: Machine, threads_bind: str) -> None:
    machine.cores = None
    assert machine.start(threads_bind)._binding is None
    assert machine.bound == []


def test_how_a_rank_meets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, as a thread, or as a process that has a rendezvous."""
    monkeypatch.setattr(startup, "ProcessWorld", lambda *args: args)
    device = cast("Device", SimpleNamespace(torch_device="the device"))
    rendezvous = cast("Rendezvous", object())
    alone, several = engine_config(), engine_config(pipeline_parallel_size=2)
    for given in (None, rendezvous):
        assert isinstance(startup.join_world(alone, 0, given, device), LoneWorld)
    layout = several.parallel.layout
    joined: object = startup.join_world(several, 1, rendezvous, device)
    assert joined == (layout, 1, rendezvous, "the device")
    world = startup.join_world(several, 1, ThreadWorlds(layout, 300.0), device)
    assert (world.tp_rank, world.pp_rank) == (0, 1)
    with pytest.raises(AssertionError, match="2 ranks need a rendezvous"):
        startup.join_world(several, 1, None, device)
