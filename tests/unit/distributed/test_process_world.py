"""Ranks that are real processes: gloo collectives, channels over TCP, and the ways in which they end.

This file is also the program of each rank: `python test_process_world.py SCENARIO RANK TP PP LISTEN_FD PORT ...`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from inflight.config.ranks import RankLayout
from inflight.distributed import socket_channel
from inflight.distributed.activation_link import LinkSpec
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.process_world import ProcessWorld
from inflight.distributed.socket_channel import SocketMesh
from inflight.distributed.stage_link import StageLink
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import LostPeerError, SilentPeerError
from inflight.handshake import GREETING_BYTES, PROOF_BYTES, Acceptance
from inflight.interface.worker import TOKEN_BYTES, Rendezvous
from inflight.sockets import listen
from inflight.timeline import Timeline
from tests.support.enough_time import with_enough_time
from tests.support.listening import listening_hosts
from tests.support.python_process import PythonProcess

TOKEN = bytes(range(100, 100 + TOKEN_BYTES))
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Places:
    """Where the ranks listen: the port of each rank, and the descriptor of its socket. The world of the rank closes it."""

    ports: tuple[int, ...]
    fds: Mapping[int, int]

    @classmethod
    def new(cls, layout: RankLayout) -> Places:
        return cls.of([listen("127.0.0.1", 0) for _ in range(layout.world_size)])

    @classmethod
    def of(cls, listeners: Sequence[socket.socket]) -> Places:
        ports = tuple(listener.getsockname()[1] for listener in listeners)
        return cls(ports, {rank: listener.detach() for rank, listener in enumerate(listeners)})


def join(
    rank: int, layout: RankLayout, places: Places, *, timeout_seconds: float = 30.0, epoch: int = 2
) -> ProcessWorld:
    rendezvous = Rendezvous(
        epoch=epoch,
        timeout_seconds=timeout_seconds,
        token=TOKEN,
        listen_fd=places.fds[rank],
        addresses=tuple(("127.0.0.1", port) for port in places.ports),
    )
    return ProcessWorld(layout, rank, rendezvous, CPU)


# -- what a rank's process does ------------------------------------------------------------------------------------


def check_collectives(world: ProcessWorld) -> None:
    size, own = world.layout.tensor_parallel_size, world.tp_rank
    group, other = world.tensor_parallel_group("model"), world.tensor_parallel_group("other")
    for dtype in (torch.float32, torch.bfloat16):
        reduced = group.all_reduce(torch.full((3, 5), own + 1.0, dtype=dtype))
        assert torch.equal(reduced, torch.full((3, 5), size * (size + 1) / 2, dtype=dtype))
        noise = torch.randn(7, 11, generator=torch.Generator().manual_seed(own)).to(dtype)
        everyone = other.all_gather(group.all_reduce(noise.clone())[None], dim=0)
        assert all(torch.equal(everyone[0], one) for one in everyone)  # the same bits everywhere
    columns = group.all_gather(torch.full((2, 3), own, dtype=torch.int32))
    assert columns.tolist() == [[i for i in range(size) for _ in range(3)]] * 2
    rows = other.all_gather(torch.full((2, 1), own), dim=0)
    assert rows.flatten().tolist() == [i for i in range(size) for _ in range(2)]
    drawn = torch.tensor([5, -1], dtype=torch.int32) if own == 0 else torch.empty(2, dtype=torch.int32)
    assert group.broadcast(drawn).tolist() == [5, -1]


def pipeline(rank: int, layout: RankLayout, places: Places) -> ProcessWorld:
    """Collectives; then twenty steps through all stages, each adding one, received as posted. Returns the world."""
    world = join(rank, layout, places)
    check_collectives(world)
    is_last = world.pp_rank == layout.pipeline_parallel_size - 1
    template = IntermediateTensors.template(8, torch.bfloat16, CPU)
    neighbours = [layout.rank(world.tp_rank, world.pp_rank + step) for step in (-1, 1)]
    link = StageLink(
        LinkSpec(
            hidden_size=8,
            dtype=torch.bfloat16,
            max_num_tokens=64,
            tensor_parallel_size=layout.tensor_parallel_size,
            split_bytes=256,
        ),
        template,
        world.tensor_parallel_group("link"),
        Timeline(),
        before=world.channel(neighbours[0], "activations") if world.pp_rank else None,
        after=None if is_last else world.channel(neighbours[1], "activations"),
    )
    counts = [(7 * step_id) % 64 + 1 for step_id in range(20)]
    with torch.inference_mode():
        for step_id, count in enumerate(counts):
            if world.pp_rank:
                link.post_receive(step_id, count)
        for step_id, count in enumerate(counts):
            numbers = (torch.arange(count * 8).view(count, 8) % 97 + step_id).to(torch.bfloat16)  # exact in bfloat16
            tensors = link.receive(step_id) if world.pp_rank else IntermediateTensors(numbers, -numbers)
            assert torch.equal(tensors.delta, numbers + world.pp_rank), (rank, step_id)
            assert torch.equal(tensors.residual, -numbers), (rank, step_id)
            if not is_last:
                link.send(step_id, IntermediateTensors(tensors.delta + 1, tensors.residual))
    assert listening_hosts([os.getpid()]) == {"127.0.0.1"}
    world.tensor_parallel_group("end").all_reduce(torch.zeros(1))
    if world.pp_rank == 0:  # what is queued must go out before the channel is closed
        world.channel(neighbours[1], "end").receive(torch.empty(1))
    else:
        if not is_last:
            world.channel(neighbours[1], "end").receive(torch.empty(1))
        world.channel(neighbours[0], "end").send(torch.zeros(1))
    world.close("done")
    link.close()
    return world


def waiting(rank: int, layout: RankLayout, places: Places) -> None:
    """Rank 0 waits for rank 1, which is killed meanwhile."""
    world = join(rank, layout, places)
    for freed in wait_for_the_other(world):
        print(freed, flush=True)
    world.close("done")


def wait_for_the_other(
    world: ProcessWorld, ready: Callable[[], object] = lambda: print("ready", flush=True)
) -> list[str]:
    """Rank 0 waits for rank 1 in a collective and, in another thread, for a tensor; neither comes."""
    group, channel = world.tensor_parallel_group("model"), world.channel(1 - world.rank, "activations")
    group.all_reduce(torch.zeros(4))
    ready()
    if world.rank == 1:
        time.sleep(0.3)
        return []
    freed = []

    def wait(name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (OSError, RuntimeError):
            freed.append(f"{name} freed")

    thread = threading.Thread(target=wait, args=("channel", lambda: channel.receive(torch.zeros(4))))
    thread.start()
    wait("group", lambda: group.all_reduce(torch.zeros(4)))
    thread.join()
    return sorted(freed)


# -- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def spawn(scenario: str, layout: RankLayout, processes: list[subprocess.Popen[str]]) -> None:
    places, sizes = Places.new(layout), (layout.tensor_parallel_size, layout.pipeline_parallel_size)
    for rank, listen_fd in places.fds.items():
        arguments = (rank, *sizes, listen_fd, *places.ports)
        processes.append(
            PythonProcess(
                [sys.executable, __file__, scenario, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                pass_fds=[listen_fd],
            )
        )
        os.close(listen_fd)


@pytest.mark.full
def test_processes_do_what_threads_do(spawned: list[subprocess.Popen[str]]) -> None:
    spawn("pipeline", RankLayout(2, 2), spawned)
    for rank, process in enumerate(spawned):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, f"rank {rank}: {errors}"


@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (1, 3), (3, 2)])
def test_groups_and_links_over_sockets(tp: int, pp: int) -> None:
    """The ranks are threads here, but know each other by sockets only."""
    layout = RankLayout(tp, pp)
    places = Places.new(layout)
    with ThreadPoolExecutor(layout.world_size) as ranks:
        for done in [ranks.submit(pipeline, rank, layout, places) for rank in range(layout.world_size)]:
            done.result(timeout=300)


def test_a_rank_that_is_killed_frees_the_others_at_once(spawned: list[subprocess.Popen[str]]) -> None:
    spawn("waiting", RankLayout(2, 1), spawned)
    first, second = spawned
    assert first.stdout and second.stdout
    assert (first.stdout.readline(), second.stdout.readline()) == ("ready\n", "ready\n")
    start = time.monotonic()
    second.send_signal(signal.SIGKILL)
    assert [first.stdout.readline(), first.stdout.readline()] == ["channel freed\n", "group freed\n"]
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_does_not_come_is_not_waited_for(leaves: bool) -> None:
    """One that leaves frees the others at once, one that is silent within the time limit."""
    layout = RankLayout(2, 1)

    def run(rank: int, places: Places, timeout_seconds: float, done: threading.Event) -> tuple[list[str], float]:
        world = join(rank, layout, places, timeout_seconds=timeout_seconds)
        try:
            freed, start = wait_for_the_other(world, lambda: None), time.monotonic()
            if rank == 1 and not leaves:
                done.wait(300)
        finally:
            world.close("done")
        return freed, start

    def check(timeout_seconds: float) -> None:
        places, done = Places.new(layout), threading.Event()
        with ThreadPoolExecutor(2) as ranks:
            first, second = [ranks.submit(run, rank, places, timeout_seconds, done) for rank in range(2)]
            first.exception(timeout=300)
            done.set()
            freed, end = first.result(timeout=0)
            assert freed == ["channel freed", "group freed"]
            assert end - second.result(timeout=300)[1] < 100.0

    if leaves:
        check(600.0)
    else:
        with_enough_time(check, first=1.0)  # within which the ranks meet


def join_both(epoch: int, listeners: Sequence[socket.socket] = ()) -> list[ProcessWorld]:
    """The worlds of two ranks of one stage."""
    layout = RankLayout(2, 1)
    places = Places.of(listeners) if listeners else Places.new(layout)
    return [join(rank, layout, places, timeout_seconds=300.0, epoch=epoch) for rank in range(2)]


def test_a_group_lives_on_in_the_next_epoch() -> None:
    groups: list[TensorParallelGroup | None] = [None, None]
    with ThreadPoolExecutor(2) as ranks:
        for epoch in (3, 4):
            worlds = join_both(epoch)
            connected = list(ranks.map(lambda world, old: world.tensor_parallel_group("model", old), worlds, groups))
            assert epoch == 3 or connected == groups
            groups = [*connected]
            for result in ranks.map(lambda group: group.all_reduce(torch.tensor([group.rank + 1.0])), connected):
                assert float(result) == 3.0
            for world in worlds:
                world.close("the epoch is over")
            with pytest.raises(ConnectionError):
                connected[0].all_reduce(torch.zeros(1))


class Part:
    """A group or a channel, which may also wait."""

    def __init__(self) -> None:
        self.is_waiting = self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_what_is_made_while_the_world_closes_is_closed_too() -> None:
    world, other = join_both(5)
    first, second, late = Part(), Part(), Part()
    assert world._own(first) is first and world._own(second) is second
    assert not world.is_waiting
    second.is_waiting = True
    assert world.is_waiting
    world.close("the epoch is over")
    assert first.is_closed and second.is_closed
    with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
        world._own(late)
    assert late.is_closed
    other.close("the epoch is over")


@pytest.mark.parametrize("failing", [1, 2])
def test_no_connection_of_a_group_that_could_not_be_made_is_left(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    world, other = join_both(5)
    made: list[socket.socket] = []

    def connection(peer: int, name: str) -> socket.socket:
        if peer == failing:
            raise ConnectionError("it does not come")
        made.append(socket.socket())
        return made[-1]

    monkeypatch.setattr(world._mesh, "connection", connection)
    with pytest.raises(ConnectionError, match="it does not come"):
        world._open_exchange([1, 0, 2], "group x")
    assert len(made) == failing - 1 and all(each.fileno() < 0 for each in made)
    for each in (world, other):
        each.close("done")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_world_that_is_closed_waits_for_no_channel(rank: int) -> None:
    """Rank 1 waits until rank 0 connects, and rank 0 waits until rank 1, which listens nowhere yet, accepts."""
    with listen("127.0.0.1", 0) as full:
        full.listen(0)
        filling = [socket.socket() for _ in range(4)]
        for caller in filling:  # the queue of a listener is full: further callers wait
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        listeners = [listen("127.0.0.1", 0), full.dup()]
        worlds = join_both(300, listeners if rank == 0 else listeners[::-1])
        world, other = worlds[rank], worlds[1 - rank]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(world.channel, 1 - rank, "x")
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            start = time.monotonic()
            world.close("the epoch is over")
            with pytest.raises(ConnectionError, match="has stopped its communication"):
                waiting.result(300)
            assert time.monotonic() - start < 60
        other.close("the test is over")
        for caller in filling:
            caller.close()


def test_a_rank_may_call_another_before_it_joins() -> None:
    """The sockets listen from the beginning: nobody else can take a port, and no caller is turned away."""
    layout = RankLayout(2, 1)
    places = Places.new(layout)
    first = join(0, layout, places)
    with ThreadPoolExecutor(1) as early:
        group = early.submit(first.tensor_parallel_group, "model")
        with pytest.raises(TimeoutError):
            group.result(0.2)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", places.ports[1])
        second = join(1, layout, places)
        second.tensor_parallel_group("model")
        group.result(300)
    for world in (first, second):
        world.close("done")


def mesh_of(
    rank: int, address: Callable[[], tuple[str, int]], token: bytes = TOKEN, seconds: float = 300.0
) -> SocketMesh:
    return SocketMesh(rank, listen("127.0.0.1", 0), token, lambda _: address(), seconds)


def test_the_token_does_not_travel_and_a_stranger_is_not_taken_for_a_rank() -> None:
    """A stranger who has put his address into the store gets callers, but learns nothing with which he could call."""
    with listen("127.0.0.1", 0) as stranger, ThreadPoolExecutor(1) as pool:
        mesh = mesh_of(0, stranger.getsockname)
        calling = pool.submit(mesh.connection, 1, "activations")
        called, _ = stranger.accept()
        with called:
            called.sendall(Acceptance(b"mesh", 40).greeting)
            answer = called.recv(104, socket.MSG_WAITALL)
            called.sendall(b"\x01" * PROOF_BYTES)
            with pytest.raises(LostPeerError, match=r"rank 0 .*rank 1: .*token"):
                calling.result(300)
        assert TOKEN not in answer and len(answer) == 104
        honest = mesh_of(2, stranger.getsockname, seconds=0.1)
        with socket.create_connection(honest.address) as replayed:  # what rank 1 was told is worth nothing with rank 2
            replayed.sendall(answer)
            with pytest.raises(TimeoutError, match="rank 0 did not connect"):
                honest.connection(0, "activations")
    mesh.close()
    honest.close()


def test_a_stranger_does_not_stand_between_two_ranks() -> None:
    """It has put its address into the store, and passes all bytes on."""

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with listen("127.0.0.1", 0) as between, ThreadPoolExecutor(4) as pool:
        first, second = mesh_of(0, between.getsockname), mesh_of(1, between.getsockname)
        connecting, accepting = pool.submit(first.connection, 1, "a"), pool.submit(second.connection, 0, "a")
        near, _ = between.accept()
        with near, socket.create_connection(second.address) as far:
            relays = [pool.submit(pass_on, near, far), pool.submit(pass_on, far, near)]
            with pytest.raises(LostPeerError, match=r"rank 0 .*rank 1: .*accept"):
                connecting.result(300)
            for relay in relays:
                relay.result(300)
        assert not accepting.done()
        second.close()
        with pytest.raises(ConnectionError, match="has stopped"):
            accepting.result(300)
    first.close()


def test_a_rank_that_connects_does_not_wait_for_ever() -> None:
    with listen("127.0.0.1", 0) as silent:
        mesh = mesh_of(0, silent.getsockname, seconds=0.05)
        with pytest.raises(SilentPeerError, match="rank 1 did not answer within"):
            mesh.connection(1, "a")
        mesh.close()


def test_silent_callers_delay_nobody() -> None:
    mesh = mesh_of(1, lambda: mesh.address)
    member = mesh_of(0, lambda: mesh.address)
    with contextlib.ExitStack() as open_sockets, ThreadPoolExecutor(1) as pool:
        for index in range(100):
            silent = open_sockets.enter_context(socket.create_connection(mesh.address))
            silent.sendall(b"\xff" * index * 2)  # some send more than an answer
        calling = pool.submit(member.connection, 1, "a")
        start = time.monotonic()
        ours, theirs = mesh.connection(0, "a"), calling.result(300)
        assert time.monotonic() - start < 60
    for part in (mesh, member, theirs, ours):
        part.close()


def test_a_silent_caller_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise callers that say nothing would hold the descriptors of a rank that waits."""
    monkeypatch.setattr(socket_channel, "_HELLO_SECONDS", 0.05)
    mesh = SocketMesh(1, listen("127.0.0.1", 0), bytes(TOKEN_BYTES), lambda rank: mesh.address, timeout_seconds=300.0)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(mesh.address, timeout=300) as silent:
        waiting = pool.submit(mesh.connection, 0, "a")
        try:
            assert len(silent.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
            assert silent.recv(1) == b"", "the rank closes it"
        finally:
            mesh.close()
        with pytest.raises(ConnectionError, match="has stopped"):
            waiting.result(timeout=300)


def test_a_caller_without_the_token_is_dropped() -> None:
    mesh = mesh_of(1, lambda: mesh.address)
    stranger, member = mesh_of(0, lambda: mesh.address, bytes(TOKEN_BYTES)), mesh_of(0, lambda: mesh.address)
    with ThreadPoolExecutor(2) as pool:
        intruding = pool.submit(stranger.channel, 1, "other")
        calling = pool.submit(member.channel, 1, "activations")
        ours, theirs = mesh.channel(0, "activations"), calling.result(300)
        accepting = pool.submit(mesh.channel, 0, "other")
        with pytest.raises(LostPeerError, match="it does not accept"):
            intruding.result(300)
        mesh.close()
        with pytest.raises(ConnectionError):
            accepting.result(300)
    theirs.send(torch.tensor([3.5]))
    received = torch.empty(1)
    ours.receive(received)
    assert float(received) == 3.5
    for part in (stranger, member, theirs, ours):
        part.close()


def test_a_closed_channel_says_so() -> None:
    meshes = [mesh_of(rank, lambda: meshes[1].address, seconds=5.0) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(meshes[0].channel, 1, "x")
        second, first = meshes[1].channel(0, "x"), calling.result(300)
    first.close()
    with pytest.raises(ConnectionError, match="was closed here"):
        first.send(torch.zeros(1))
    with pytest.raises(ConnectionError, match="lost rank 0: the connection was closed"):
        second.receive(torch.zeros(1))
    for part in (second, *meshes):
        part.close()


def test_a_peer_without_a_route_is_named_in_a_connection_error() -> None:
    """Other ranks are the reason for such an error, so the rank that raises it is not replaced."""
    mesh = SocketMesh(0, listen("127.0.0.1", 0), TOKEN, lambda rank: ("255.255.255.255", 9), timeout_seconds=300.0)
    with pytest.raises(LostPeerError, match="rank 0 cannot reach rank 1: ") as caught:
        mesh.connection(1, "activations")
    assert caught.value.ranks == (1,)
    mesh.close()


if __name__ == "__main__":
    run = {"pipeline": pipeline, "waiting": waiting}[sys.argv[1]]
    rank, tp, pp, listen_fd, *ports = map(int, sys.argv[2:])
    run(rank, RankLayout(tp, pp), Places(tuple(ports), {rank: listen_fd}))
