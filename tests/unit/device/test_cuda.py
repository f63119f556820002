"""What `CudaDevice` asks of torch, in which order, played without a GPU. tests/gpu/ runs it on one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.device import cuda
from inflight.device.accelerator import SWITCH_SECONDS
from inflight.device.cuda import CudaDevice, CudaStream, record_graph
from inflight.errors import OutOfMemoryError


class Played:
    """torch.cuda, as far as the device uses it. `log`: what was called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.free, self.total, self.reserved, self.peak = 30, 100, 5, 12
        self.streams: list[PlayedStream] = []
        self.current: PlayedStream | None = None
        self.end_fails = self.synchronize_fails = False
        self.pin_error = 0

    def note(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_more: self.log.append(name)

    def new_stream(self, device: torch.device) -> PlayedStream:
        self.streams.append(PlayedStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def set_stream(self, stream: PlayedStream) -> None:
        self.current = stream

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def pin(self, address: int, num_bytes: int, flags: int) -> int:
        self.log.append(f"pin {num_bytes} at {address}")
        return self.pin_error

    @contextmanager
    def stream(self, stream: PlayedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")
        if self.synchronize_fails:
            raise RuntimeError("the device has failed")


class PlayedStream:
    def __init__(self, played: Played, name: str) -> None:
        self.played, self.name = played, name

    def wait_event(self, event: PlayedEvent) -> None:
        self.played.log.append(f"{self.name} waits for {event.recorded_on}")


class PlayedEvent:
    recorded_on = ""

    def __init__(self, played: Played) -> None:
        self.played = played

    def record(self, stream: PlayedStream) -> None:
        self.recorded_on = stream.name

    def synchronize(self) -> None:
        self.played.log.append(f"{self.recorded_on} is waited for")


class PlayedGraph:
    def __init__(self, played: Played) -> None:
        self.played = played

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self.played.log.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.played.log.append("end")
        if self.played.end_fails:
            raise RuntimeError("the recording has failed")

    def replay(self) -> None:
        self.played.log.append("replay")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    made, interval = Played(), sys.getswitchinterval()
    for name, value in {
        "device_count": lambda: 2,
        "set_device": lambda device: made.log.append(f"use {device}"),
        "Stream": made.new_stream,
        "Event": lambda **_: PlayedEvent(made),
        "CUDAGraph": lambda: PlayedGraph(made),
        "graph_pool_handle": lambda: "the pool",
        "set_stream": made.set_stream,
        "current_stream": lambda *_: made.current,
        "stream": made.stream,
        "mem_get_info": lambda device: (made.free, made.total),
        "empty_cache": made.note("empty_cache"),
        "synchronize": made.synchronize,
        "memory_reserved": lambda device: made.reserved,
        "reset_peak_memory_stats": made.note("reset"),
        "max_memory_reserved": lambda device: made.peak,
        "check_error": made.check_error,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=made.pin, cudaHostUnregister=lambda address: made.log.append(f"unpin {address}")
        ),
        "get_device_properties": lambda device: SimpleNamespace(
            multi_processor_count=7, shared_memory_per_block_optin=9
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "drop_library_workspaces", made.note("drop"))
    yield made
    sys.setswitchinterval(interval)


@pytest.fixture
def device(played: Played) -> Iterator[CudaDevice]:
    made = CudaDevice(1)
    played.log.clear()
    yield made
    made.close()


def test_the_constructor_enters_the_device(played: Played) -> None:
    sys.setswitchinterval(0.005)
    device = CudaDevice(1)
    assert str(device.torch_device) == "cuda:1" and played.log == ["use cuda:1"] * 2
    assert played.current is played.streams[0] and sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert (device.num_multiprocessors, device.max_shared_bytes) == (7, 9)
    streams = [
        each.stream for each in (device.compute, device.copy_in, device.copy_out) if isinstance(each, CudaStream)
    ]
    assert [*map(id, streams)] == [*map(id, played.streams)]
    device.close()


def test_the_budget_is_the_share_of_all_memory_whoever_uses_the_rest(device: CudaDevice, played: Played) -> None:
    assert (device.available_memory_bytes(), device.total_memory_bytes()) == (30, 100)
    assert played.log == ["empty_cache"]
    assert (device.budget_bytes(0.9), device.budget_bytes(0.5)) == (90, 50)  # 70 are in use


def test_pinned_pages_take_what_they_hold_and_are_free_again(device: CudaDevice, played: Played) -> None:
    """torch's own pinned memory would be 4 MiB here, and stay."""
    memory = device.pinned_pages(3 << 20)
    address = memory.data_ptr()
    assert (memory.dtype, memory.shape, int(memory.sum())) == (torch.uint8, (3 << 20,), 0)
    view = memory.view(3, -1).numpy()
    del memory
    gc.collect()
    assert played.log == [f"pin {3 << 20} at {address}"]
    view[:] = 1
    del view
    gc.collect()
    assert played.log == [f"pin {3 << 20} at {address}", f"unpin {address}"]
    played.pin_error = 2
    with pytest.raises(OutOfMemoryError, match=r"cannot be pinned .*lower kv_offloading_size"):
        device.pinned_pages(1 << 20)


def test_a_thread_that_enters_uses_this_gpu(device: CudaDevice, played: Played) -> None:
    device.enter_thread()
    assert played.log == ["use cuda:1"]


def test_the_peak_is_that_of_the_work(device: CudaDevice, played: Played) -> None:
    assert device.measure_peak_bytes(lambda: played.log.append("work")) == 7
    assert played.log == ["empty_cache", "reset", "work", "synchronize"]
    played.peak = 3
    assert device.measure_peak_bytes(lambda: None) == 0


def test_an_arena_that_does_not_fit(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_more: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(OutOfMemoryError, match=r"3 blocks, 1\.5 GiB"):
        device.allocate_arena(3, 2**29)


def test_work_runs_on_its_stream(device: CudaDevice, played: Played) -> None:
    seen = list[object]()
    for stream in (device.compute, device.copy_out):
        stream.enqueue(lambda: seen.append(played.current))
    assert [*map(id, seen)] == [id(played.streams[0]), id(played.streams[2])]
    assert played.current is played.streams[0]
    device.copy_out.wait(device.compute.record())
    device.copy_in.record().synchronize()
    assert played.log == ["stream 2 waits for stream 0", "stream 1 is waited for"]
    other = device.new_stream()
    other.enqueue(lambda: seen.append(played.current))
    assert seen[-1] is played.streams[3]


def test_a_drain_waits_for_what_was_queued_before(device: CudaDevice, played: Played) -> None:
    assert device.drain(lambda: played.log.append("work") or 5).result(timeout=300) == 5  # type: ignore[func-returns-value]
    assert [each for each in played.log if not each.startswith("use")] == ["stream 0 is waited for", "work"]


def test_a_graph_has_workspaces_of_its_own(device: CudaDevice, played: Played) -> None:
    replay = device.capture(lambda: played.log.append("work"))
    replay()
    begin = "begin in the pool, thread_local"
    assert played.log == ["synchronize", "drop", begin, "work", "end", "drop", "replay"]


@pytest.mark.parametrize("end_fails", [False, True])
def test_the_error_of_the_work_ends_the_recording(played: Played, end_fails: bool) -> None:
    def fail() -> None:
        raise KeyError("work")

    played.end_fails = end_fails
    with pytest.raises(KeyError, match="work"):
        record_graph(fail)
    assert played.log == ["begin in None, thread_local", "end"]


def test_a_recording_that_fails_is_told(played: Played) -> None:
    played.end_fails = True
    with pytest.raises(RuntimeError, match="the recording has failed"):
        record_graph(lambda: None)


def test_a_device_is_closed_once_also_if_it_has_failed(played: Played) -> None:
    for fails in (False, True):
        played.synchronize_fails = fails
        device = CudaDevice(0)
        played.log.clear()
        device.close()
        device.close()
        assert played.log == (["synchronize"] if fails else ["synchronize", "drop"])
