"""Collectives on CPUs: their values for ranks that are threads, and their ends for ranks that are processes.

This file is also the program of a rank's process: `python test_collectives.py RANK LISTEN_FD PORT...`, with the ports of all
ranks. Each line of its input is a command.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from inflight.config.ranks import RankLayout
from inflight.distributed import shared_collectives
from inflight.distributed.channel_collectives import SPLIT_ELEMENTS, ChannelCollectives
from inflight.distributed.collectives import Collectives, sum_in_rank_order
from inflight.distributed.exchange import Exchange
from inflight.distributed.process_world import ProcessWorld
from inflight.distributed.shared_collectives import PIECE_BYTES, SharedCollectives, make_memory, share_memory
from inflight.distributed.thread_world import ThreadWorlds
from inflight.errors import LostPeerError
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.kernels.cpu.library import load_kernels
from inflight.sockets import listen
from tests.support.descriptors import num_descriptors
from tests.support.instruction_sets import ONE_SET_OR_ALL
from tests.support.python_process import PythonProcess

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).parents[3]
AT_ONCE = 60.0  # seconds: far more than a wake-up takes on a busy machine, far less than the time limit
NO_KERNELS = pytest.mark.skipif(load_kernels() is None, reason="needs the C++ kernels")
KINDS = [pytest.param("shared", marks=NO_KERNELS), "channels"]


# -- ranks that are threads ----------------------------------------------------------------------------------------


def exchanges(size: int, timeout_seconds: float = 30.0, host: str = "127.0.0.1") -> list[Exchange]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            with listen(host, 0) as listener:
                sockets[low][high] = socket.create_connection(listener.getsockname(), source_address=("127.0.0.1", 0))
                sockets[high][low], _ = listener.accept()
    return [Exchange(size, rank, sockets[rank], timeout_seconds) for rank in range(size)]


def at_once(ranks: Sequence[T], work: Callable[[T], R]) -> list[R]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(work, ranks))


def call(ranks: Sequence[Collectives], collective: str, inputs: Sequence[Tensor], *arguments: int) -> list[Tensor]:
    return at_once(ranks, lambda rank: getattr(rank, collective)(inputs[rank.rank].clone(), *arguments))


def share(connected: Sequence[Exchange], kernels: Sequence[ctypes.CDLL | None]) -> list[SharedCollectives | None]:
    return at_once(connected, lambda exchange: share_memory(exchange, kernels[exchange.rank]))


@pytest.fixture(params=ONE_SET_OR_ALL)
def _instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", request.param)


@pytest.fixture
def make() -> Iterator[Callable[..., list[Collectives]]]:
    made: list[Collectives] = []

    def make(kind: str, size: int, timeout_seconds: float = 30.0) -> list[Collectives]:
        if kind == "threads":
            worlds = ThreadWorlds(RankLayout(size, 1), timeout_seconds)
            return [worlds.of(rank).collectives("model") for rank in range(size)]
        connected = exchanges(size, timeout_seconds)
        if kind == "channels":
            made.extend(map(ChannelCollectives, connected))
        else:
            shared = share(connected, [load_kernels()] * size)
            made.extend(each for each in shared if each is not None)
            for exchange in connected:
                exchange.close()
        assert len(made) == size
        return made

    yield make
    for each in made:
        each.close()


SHAPES = [(1,), (0, 8), (3, 5), (1, 1024), (37, 1021), (PIECE_BYTES // 2 + 1,), (70, 1024)]


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", [*KINDS, "threads"])
def test_values(kind: str, size: int, make: Callable[..., list[Collectives]]) -> None:
    """Sums have the bits of a sum in rank order, whatever the number of rows."""
    ranks = make(kind, size)
    generator = torch.Generator().manual_seed(size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32):
        for shape in SHAPES:
            inputs = [(torch.randn(shape, generator=generator) * 100).to(dtype) for _ in range(size)]
            expected = inputs[0].double() if dtype is torch.int32 else inputs[0].float()
            for x in inputs[1:]:
                expected = expected + x.to(expected.dtype)
            for reduced in call(ranks, "all_reduce", inputs):
                assert torch.equal(reduced, expected.to(dtype)), (dtype, shape)
            for dim in range(-1, len(shape)):
                for gathered in call(ranks, "all_gather", inputs, dim):
                    assert torch.equal(gathered, torch.cat(inputs, dim=dim)), (dtype, shape, dim)
            for copied in call(ranks, "broadcast", inputs):
                assert torch.equal(copied, inputs[0]), (dtype, shape)


@pytest.mark.parametrize(("size", "sent"), [(2, [1.0]), (4, [0.75, 0.75])])
def test_a_rank_sends_less_than_twice_the_bytes_of_a_large_sum(
    size: int, sent: list[float], make: Callable[..., list[Collectives]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two ranks one exchange is enough. More ranks sum a part each, and then exchange the parts."""
    ranks: Any = make("channels", size)
    exchange, found = ranks[0]._exchange, []
    swap = exchange.swap

    def count(outgoing: dict[int, memoryview], incoming: dict[int, memoryview]) -> None:
        found.append(sum(view.nbytes for view in outgoing.values()))
        swap(outgoing, incoming)

    monkeypatch.setattr(exchange, "swap", count)
    x = torch.ones(SPLIT_ELEMENTS)
    assert all(torch.equal(reduced, x * size) for reduced in call(ranks, "all_reduce", [x] * size))
    assert found == [share * x.nbytes for share in sent]


@pytest.mark.usefixtures("_instruction_set")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_sum_alone_and_in_a_batch(kind: str, make: Callable[..., list[Collectives]]) -> None:
    ranks = make(kind, 4)
    inputs = [torch.randn(300, 257).to(torch.bfloat16) for _ in ranks]
    together = call(ranks, "all_reduce", inputs)[0]
    for row in (0, 150, 299):
        alone = call(ranks, "all_reduce", [x[row : row + 1] for x in inputs])[1]
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_come_at_different_times(kind: str, make: Callable[..., list[Collectives]]) -> None:
    ranks = make(kind, 3)

    def work(rank: Collectives) -> None:
        delays = torch.rand(60, generator=torch.Generator().manual_seed(rank.rank)) * 0.002
        for i, delay in enumerate(delays.tolist()):
            time.sleep(delay if i % 3 == rank.rank else 0)
            assert rank.all_reduce(torch.full((5,), float(i + rank.rank))).tolist() == [3.0 * i + 3] * 5
            assert rank.broadcast(torch.tensor([i * (rank.rank + 1)])).tolist() == [i]

    at_once(ranks, work)


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_rank_is_waited_for_until_the_time_limit(kind: str, make: Callable[..., list[Collectives]]) -> None:
    first, second = make(kind, 2, timeout_seconds=0.3)
    start, used = time.monotonic(), time.thread_time()
    with pytest.raises(TimeoutError, match=r"silent for 0\.3 s"):
        first.all_reduce(torch.zeros(4))
    assert 0.2 < time.monotonic() - start < 60
    assert time.thread_time() - used < 0.1, "a rank that waits leaves its core to others"
    with pytest.raises(OSError, match="silent"):
        first.all_reduce(torch.zeros(4))

    def come_late() -> None:
        second.all_reduce(torch.zeros(4))  # the tensor of the first rank may have arrived before
        second.all_reduce(torch.zeros(4))

    with pytest.raises(OSError, match=r"lost rank 0|silent"):
        come_late()


@NO_KERNELS
def test_all_ranks_share_memory_or_none() -> None:
    """One rank of three has no kernels."""
    kernels = load_kernels()
    for usable in ([kernels, None, kernels], [None, kernels, kernels]):
        connected = exchanges(3)
        assert share(connected, usable) == [None] * 3
        for exchange in connected:
            exchange.close()


@NO_KERNELS
def test_hosts_with_different_addresses_share_no_memory() -> None:
    connected = exchanges(2, host="127.0.0.2")
    assert share(connected, [load_kernels()] * 2) == [None] * 2
    for exchange in connected:
        exchange.close()


@NO_KERNELS
def test_the_memory_must_be_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine, or in another container, a process may have the same number."""
    monkeypatch.setattr(os, "getpid", lambda: 1 << 21)
    connected = exchanges(2)
    assert share(connected, [load_kernels()] * 2) == [None] * 2
    for exchange in connected:
        exchange.close()


@NO_KERNELS
@pytest.mark.parametrize("fault", ["none", "no kernels", "another's memory", "a process has ended", "a rank leaves"])
def test_no_descriptor_is_left(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the ranks can share memory or not."""
    kernels = load_kernels()
    num_open = num_descriptors()
    connected = exchanges(2)
    if fault == "another's memory":
        monkeypatch.setattr(shared_collectives, "make_memory", lambda size, mark: make_memory(size, bytes(len(mark))))
    if fault == "a process has ended":  # the second one, for each rank
        counts, pidfd_open = threading.local(), os.pidfd_open

        def refuse(process_id: int) -> int:
            counts.calls = getattr(counts, "calls", 0) + 1
            if counts.calls == 2:
                raise ProcessLookupError("no such process")
            return pidfd_open(process_id)

        monkeypatch.setattr(os, "pidfd_open", refuse)
    if fault == "a rank leaves":  # after it has opened the memory
        swaps = iter([connected[0].swap_records])
        monkeypatch.setattr(connected[0], "swap_records", lambda record: next(swaps, leave)(record))
        connected[1].timeout_seconds = 0.1  # its wait is not what is tested
        with pytest.raises(ConnectionError):
            share(connected, [kernels, kernels])
        shared: list[SharedCollectives | None] = []
    else:
        shared = share(connected, [kernels, None if fault == "no kernels" else kernels])
        assert [each is not None for each in shared] == [fault == "none"] * 2
    for each in (*shared, *connected):
        if each is not None:
            each.close()
            each.close()
    # mapped memory has a descriptor, too, and an exchange keeps its error, whose frames know the memory
    del each, shared, connected
    assert num_descriptors() == num_open


def leave(record: bytes) -> list[bytes]:
    raise ConnectionError("this rank has left")


@NO_KERNELS
def test_a_closed_rank_computes_nothing(make: Callable[..., list[Collectives]]) -> None:
    ranks = make("shared", 2)
    ranks[0].close()
    with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
        ranks[0].all_reduce(torch.ones(3))
    with pytest.raises(LostPeerError, match="rank 0 has left the group"):
        ranks[1].all_reduce(torch.ones(3))


@NO_KERNELS
def test_what_a_rank_has_published_counts_though_it_has_left_since(make: Callable[..., list[Collectives]]) -> None:
    """It may publish its numbers, compute its result and leave before a waiting rank looks again."""
    waiting: Any = make("shared", 2)[1]
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(waiting.all_reduce, torch.ones(4))
        while not waiting.is_waiting:
            time.sleep(0.001)
        # the places are those of collectives.cpp; rank 0 has published zeros
        ctypes.c_int32.from_buffer(waiting._memory, 64).value = shared_collectives._LEFT
        ctypes.c_uint32.from_buffer(waiting._memory, 128).value = 3  # one piece, and the rank has left
        assert torch.equal(found.result(timeout=300), torch.ones(4))


def test_sums_are_rounded_once() -> None:
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.tensor([0.75], dtype=torch.bfloat16)] * 2]
    assert sum_in_rank_order(parts).item() == 258.0  # rounded after each addition, the sum would be 256
    assert parts[0].item() == 256.0
    for dtype in (torch.float32, torch.int64):
        own, other = torch.tensor([1], dtype=dtype), torch.tensor([2], dtype=dtype)
        assert sum_in_rank_order([own, other]).item() == 3
        assert own.item() == 1  # not reused, unless the caller allows it


# -- ranks that are processes --------------------------------------------------------------------------------------


def main(rank: int, listen_fd: int, ports: list[int]) -> None:
    world = ProcessWorld(
        RankLayout(len(ports), 1),
        rank,
        Rendezvous(
            epoch=1,
            timeout_seconds=300.0,
            token=bytes(TOKEN_BYTES),
            listen_fd=listen_fd,
            addresses=tuple(("127.0.0.1", port) for port in ports),
        ),
        torch.device("cpu"),
    )
    group = world.tensor_parallel_group("model")

    def say(line: str) -> None:
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once, because two threads may speak

    def reduce() -> None:
        try:
            say(f"sum {float(group.all_reduce(torch.tensor([1.0])))}")
        except OSError as error:
            say(f"{type(error).__name__}: {error}")

    kind = SharedCollectives if os.environ.get("INFLIGHT_CPU_KERNELS") != "off" else ChannelCollectives
    assert isinstance(group.collectives, kind)
    say("ready")
    for command in sys.stdin:
        if command == "reduce\n":
            threading.Thread(target=reduce, daemon=True).start()
        elif command == "is waiting\n":
            say(str(world.is_waiting))
        else:
            world.close("the test wants it")
            say("closed")


class Rank:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def says(self, seconds: float = AT_ONCE) -> str:
        return self._lines.get(timeout=seconds)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture(params=KINDS)
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """Three processes; the first two wait for the third in a sum."""
    listeners = [listen("127.0.0.1", 0) for _ in range(3)]
    ports = [str(listener.getsockname()[1]) for listener in listeners]
    kernels = {"INFLIGHT_CPU_KERNELS": "off"} if request.param == "channels" else {}
    found = []
    for rank, listener in enumerate(listeners):
        process = PythonProcess(
            [sys.executable, __file__, str(rank), str(listener.fileno()), *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **kernels},
            pass_fds=[listener.fileno()],
        )
        found.append(Rank(process))
        listener.close()
    try:
        for rank_ in found:
            assert rank_.says(300.0) == "ready"
            rank_.tell("reduce")
        assert [rank_.says() for rank_ in found] == ["sum 3.0"] * 3
        for rank_ in found[:2]:
            rank_.tell("reduce")
            wait_until_waiting(rank_)
        yield found
    finally:
        for rank_ in found:
            rank_.end()


def wait_until_waiting(rank: Rank) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        rank.tell("is waiting")
        if rank.says() == "True":
            return
    raise AssertionError("the rank does not wait")


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_has_the_global_number_of_the_rank_that_has_left(kind: str) -> None:
    connected = exchanges(2)
    for exchange in connected:
        exchange.ranks = (4, 7)
    ranks: list[Collectives] = []
    for shared, exchange in zip(
        share(connected, [load_kernels() if kind == "shared" else None] * 2), connected, strict=True
    ):
        assert (shared is not None) == (kind == "shared")
        ranks.append(shared or ChannelCollectives(exchange))
    ranks[0].close()
    with pytest.raises(LostPeerError) as caught:
        ranks[1].all_reduce(torch.ones(3))
    assert caught.value.ranks == (4,)
    ranks[1].close()
    for exchange in connected:
        exchange.close()


def test_a_rank_that_is_killed_frees_the_others(ranks: list[Rank]) -> None:
    ranks[2].process.send_signal(signal.SIGKILL)
    for rank in ranks[:2]:
        assert rank.says().startswith("LostPeerError: ")
    for rank in ranks[:2]:
        rank.tell("reduce")
        assert rank.says().startswith(("LostPeerError: ", "ConnectionError: "))


def test_close_frees_all_ranks_though_one_is_stopped(ranks: list[Rank]) -> None:
    """The stopped rank comes late. It may find the tensors of this sum, which the others sent before, but not of the next."""
    ranks[2].process.send_signal(signal.SIGSTOP)
    ranks[0].tell("close")
    assert {ranks[0].says(), ranks[0].says()} == {"ConnectionError: this rank has stopped its communication", "closed"}
    assert ranks[1].says().startswith("LostPeerError: ")
    ranks[2].process.send_signal(signal.SIGCONT)
    ranks[2].tell("reduce")
    if (said := ranks[2].says()) == "sum 3.0":
        ranks[2].tell("reduce")
        said = ranks[2].says()
    assert said.startswith(("LostPeerError: ", "ConnectionError: "))
    ranks[1].tell("close")
    assert ranks[1].says() == "closed"
    ranks[1].tell("reduce")
    assert ranks[1].says().startswith("ConnectionError: ")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [int(port) for port in sys.argv[3:]])
