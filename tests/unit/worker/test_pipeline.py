"""Which link a rank has: through the host, or, on an accelerator, between the devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.config.pipeline_stage import PipelineStage
from inflight.config.ranks import RankLayout
from inflight.device.base import Device
from inflight.distributed.channel import Channel
from inflight.distributed.device_stage_link import DeviceStageLink
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.stage_link import StageLink
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.world import World
from inflight.errors import ConfigError
from inflight.timeline import Timeline
from inflight.worker.pipeline import Pipeline
from tests.support.fake_device import FakeDevice
from tests.unit.distributed.fake_streams import FakeAccelerator, FakeDeviceChannel, run


def make_pipelines(devices: list[Device], worlds: list[World], hidden_size: tuple[int, int] = (4, 4)) -> list[Pipeline]:
    """Of two stages, made at once, because they shake hands."""

    def make(rank: int) -> Pipeline:
        config: Any = SimpleNamespace(  # as much of an EngineConfig as is read
            model=SimpleNamespace(
                architecture=SimpleNamespace(hidden_size=hidden_size[rank], captured=()), dtype="float32"
            ),
            scheduler=SimpleNamespace(max_num_batched_tokens=8),
            speculative=None,
        )
        return Pipeline(config, PipelineStage(rank, rank + 1, 2), worlds[rank], devices[rank], Timeline())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, range(2)))


@pytest.fixture
def threads() -> ThreadWorlds:
    return ThreadWorlds(RankLayout(1, 2), timeout_seconds=300)


def with_device_channel(world: World, channel: Channel, monkeypatch: pytest.MonkeyPatch) -> World:
    def device_channel(peer: int, name: str) -> Channel:
        assert (peer, name) == (1 - world.rank, "activations")
        return channel

    monkeypatch.setattr(world, "device_channel", device_channel)
    return world


def test_on_an_accelerator_activations_stay_on_the_devices(
    threads: ThreadWorlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, channel = [FakeAccelerator(), FakeAccelerator()], FakeDeviceChannel()
    worlds = [with_device_channel(threads.of(rank), channel, monkeypatch) for rank in range(2)]
    first, last = make_pipelines([*devices], worlds)
    assert isinstance(first.link, DeviceStageLink) and isinstance(last.link, DeviceStageLink)
    sent = IntermediateTensors(torch.randn(3, 4), torch.randn(3, 4))
    last.link.post_receive(7, 3)
    received = last.link.receive(7)
    first.link.send(7, sent)
    run([stream for device in devices for stream in device.streams], seed=0)
    assert torch.equal(received.delta, sent.delta) and torch.equal(received.residual, sent.residual)
    threads.close("the test is over")
    for pipeline in (first, last):
        pipeline.close()
    assert channel.closed


def test_the_two_ends_must_agree(threads: ThreadWorlds, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [with_device_channel(threads.of(rank), FakeDeviceChannel(), monkeypatch) for rank in range(2)]
    with pytest.raises(ConnectionError, match=r"sends .* = \[4, .* expects \[5, "):
        make_pipelines([FakeAccelerator(), FakeAccelerator()], worlds, hidden_size=(4, 5))


def test_threads_share_one_accelerator_and_cannot_have_stages_on_it(threads: ThreadWorlds) -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend='mp'"):
        make_pipelines([FakeAccelerator(), FakeAccelerator()], [threads.of(rank) for rank in range(2)])


def test_elsewhere_they_go_through_the_host(threads: ThreadWorlds) -> None:
    first, last = make_pipelines([FakeDevice(), FakeDevice()], [threads.of(rank) for rank in range(2)])
    assert isinstance(first.link, StageLink) and isinstance(last.link, StageLink)
    threads.close("the test is over")
    for pipeline in (first, last):
        pipeline.close()
