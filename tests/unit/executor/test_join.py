"""Several nodes: ranks that join over TCP, strangers that may not, and links that are cut."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from benchmarks.shared.free_port import free_port
from inflight import counted_warning
from inflight.config.engine import EngineConfig
from inflight.errors import ConfigError, EngineError, InflightError, WorkerDiedError
from inflight.executor import node
from inflight.executor.join import RankAcceptor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.node import NodeArgs, run_node
from inflight.executor.recovery import recover
from inflight.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES, REFUSED, introduce
from inflight.interface.codec import schema_digest
from inflight.interface.start_up import Hello, Ready
from inflight.processes import acceptor as acceptor_module
from inflight.processes.acceptor import connect
from inflight.processes.io_thread import IoThread
from inflight.processes.streams import BlockingStream, IoStream
from inflight.strangers import MAX_STRANGERS
from tests.conformance.configs import engine_config, plan
from tests.support.enough_time import with_enough_time
from tests.support.processes import children, have_ended
from tests.unit.executor.processes import SCRIPTED, run_script

TOKEN = "a long random text"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", TOKEN)


@pytest.fixture
def port() -> int:
    return free_port()


def two_node_config(port: int, *, ranks: int = 2, budget: float = 10.0, host: str = "127.0.0.1") -> EngineConfig:
    config = engine_config(tensor_parallel_size=ranks, backend="mp", budget=budget)
    return replace(config, parallel=replace(config.parallel, nnodes=2, master_addr=host, master_port=port))


def node_args(port: int, *, ranks: int = 2, nnodes: int = 2, node_rank: int = 1) -> NodeArgs:
    return NodeArgs(
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr="127.0.0.1",
        master_port=port,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=1,
    )


def in_thread(function: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a failing test leaves it, and pytest still ends
    return future


NODE = """
    import sys
    from inflight.entrypoints.cli.main import app
    from inflight.executor import node
    node.REJOIN_SECONDS = 1.0
    app(["-v", "worker", "--nnodes", "2", "--node-rank", "1", "--master-address", sys.argv[1], "--master-port", sys.argv[2],
         "--tensor-parallel-size", sys.argv[3]])
"""


# -- two nodes on one machine ------------------------------------------------------------------------------------------


def test_two_nodes_are_one_executor(port: int) -> None:
    with run_script(NODE, "127.0.0.1", str(port), "4") as other:  # it waits for node 0
        executor = MultiprocExecutor(two_node_config(port, ranks=4), SCRIPTED)
        pids = executor.collective_rpc("pid")
        assert set(pids[:2]) == set(children(os.getpid())) - {other.pid} - set(children(other.pid))
        assert set(pids[2:]) == set(children(other.pid))
        # a rank may hold the interpreter's lock, and read nothing, for as long as a step may take
        link = executor._ranks[3].stream._socket  # type: ignore[union-attr]
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
        large = np.arange(1_000_000)
        for rank, (answering, (array,), _) in enumerate(executor.collective_rpc("echo", (large,))):
            assert answering == rank
            np.testing.assert_array_equal(array, large)
        assert executor.execute_model(plan(1)).sampled_token_ids.tolist() == [1000]
        for addresses, *_ in executor.collective_rpc("place"):
            assert [host for host, _ in addresses] == ["127.0.0.1"] * 4
        executor.shutdown()
        output, errors = other.communicate(timeout=300)
        assert (other.returncode, output) == (0, "")
        assert "ranks 2 to 3 of 4 run on this node" in errors
        assert have_ended(pids)
    with socket.create_server(("127.0.0.1", port)):
        pass  # nobody listens any more


@pytest.mark.parametrize("victim", ["worker", "node"])
def test_the_death_of_a_remote_rank_is_known_at_once(port: int, victim: str) -> None:
    with run_script(NODE, "127.0.0.1", str(port), "2") as other:
        executor = MultiprocExecutor(two_node_config(port), SCRIPTED)
        pids = executor.collective_rpc("pid")
        executor.collective_rpc("script", (1, 0, "sleep", 300))
        future = executor.execute_model(plan(0), non_block=True)
        start = time.monotonic()
        os.kill(pids[1] if victim == "worker" else other.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"rank 1 was lost \(its? .*stream"):
            future.result(timeout=300)
        assert time.monotonic() - start < 60
        executor.shutdown()
        assert have_ended(pids)
        _, errors = other.communicate(timeout=300)
        if victim == "worker":
            assert re.search(
                r"rank 1 was lost: process \d+ was killed by SIGKILL.*; a new process tries to connect", errors
            )


MASTER = f"""
    import sys, time
    from tests.unit.executor.test_join import two_node_config
    from inflight.executor.multiproc import MultiprocExecutor
    executor = MultiprocExecutor(two_node_config(int(sys.argv[2]), host=sys.argv[1], budget=float(sys.argv[3])), "{SCRIPTED}")
    print(*executor.collective_rpc("pid"))
    time.sleep(3600)
"""


def test_no_remote_rank_outlives_the_engine(port: int) -> None:
    with (
        run_script(MASTER, "127.0.0.1", str(port), "10") as master,
        run_script(NODE, "127.0.0.1", str(port), "2") as other,
    ):
        assert master.stdout is not None
        pids = [int(pid) for pid in master.stdout.readline().split()]
        master.kill()
        assert have_ended(pids)
        _, errors = other.communicate(timeout=300)
        assert other.returncode == 1
        assert "error: rank 1 has lost node 0" in errors


def test_an_interrupted_node_leaves_nothing(port: int) -> None:
    with run_script(NODE, "127.0.0.1", str(port), "2") as other:
        executor = MultiprocExecutor(two_node_config(port), SCRIPTED)
        pid = executor.collective_rpc("pid")[1]
        other.send_signal(signal.SIGINT)
        assert have_ended([pid])
        assert other.wait(300) == 130
        with pytest.raises(WorkerDiedError):
            executor.check_health()
        executor.shutdown()
        other.communicate()


# -- who may not join ----------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(port: int) -> Iterator[int]:
    """A port on which node 0 waits for rank 1, until the test says hello properly."""
    starting = in_thread(lambda: MultiprocExecutor(two_node_config(port), SCRIPTED, max_join_seconds=300).shutdown())
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    yield port
    run = in_thread(lambda: run_node(node_args(port)))  # it still starts
    starting.result(timeout=300)
    run.result(timeout=300)


HELLO = Hello(schema=schema_digest(), rank=1, world_size=2, nnodes=2)


def test_a_hello_that_does_not_fit_is_refused(waiting: int) -> None:
    for changes, text in (
        ({"schema": "old"}, "another version of Inflight"),
        ({"world_size": 4}, "started for 4 ranks on 2 nodes, but node 0 for 2 ranks on 2 nodes"),
        ({"nnodes": 3}, "on 3 nodes"),
        ({"rank": 0}, "rank 0 does not belong to a node other than node 0"),
        ({"rank": 7}, "rank 7 does not belong"),
    ):
        hello = replace(HELLO, **changes)
        with pytest.raises(ConfigError, match=text):
            connect(("127.0.0.1", waiting), hello, TOKEN, max_seconds=300)
    for token in ("guessed", ""):
        with pytest.raises(ConfigError, match="INFLIGHT_CLUSTER_TOKEN"):
            connect(("127.0.0.1", waiting), HELLO, token, max_seconds=300)


def test_a_stranger_is_dropped(waiting: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted_warning, "SECONDS", 0.0)
    for data in (
        b"GET / HTTP/1.1\r\nHost: localhost:8000\r\nUser-Agent: a browser\r\n\r\n.....",
        b"InFl" + b"\xff" * 64,
    ):
        with socket.create_connection(("127.0.0.1", waiting)) as stranger:
            stranger.sendall(data[:68])
            stranger.settimeout(300)
            assert stranger.recv(GREETING_BYTES, socket.MSG_WAITALL).startswith(MAGIC)
            assert stranger.recv(100) in (REFUSED, b"")
    connected = socket.create_connection(("127.0.0.1", waiting))
    introduce(connected, b"join", (1).to_bytes(4), TOKEN.encode())
    stream = BlockingStream(connected)
    stream.send(Ready(rank=1))  # no hello
    assert stream.receive() is None
    stream.close()
    end = time.monotonic() + 300
    while "expected one of Hello" not in caplog.text:  # logged after the stream was closed
        assert time.monotonic() < end, caplog.text
        time.sleep(0.01)


def test_a_rank_that_calls_itself_another_one_is_dropped(waiting: int) -> None:
    connected = socket.create_connection(("127.0.0.1", waiting))
    introduce(connected, b"join", (7).to_bytes(4), TOKEN.encode())
    stream = BlockingStream(connected)
    stream.send(HELLO)
    assert stream.receive() is None
    stream.close()


def test_strangers_cause_a_line_a_second(waiting: int, caplog: pytest.LogCaptureFixture) -> None:
    begin = time.monotonic()
    num_strangers = 0
    lines: list[str] = []
    # a line of the test before may be less than a second old
    while num_strangers < 300 or (not lines and time.monotonic() < begin + 300):
        with socket.create_connection(("127.0.0.1", waiting)) as stranger:
            stranger.sendall(b"x" * 68)
            stranger.settimeout(300)
            stranger.recv(GREETING_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        num_strangers += 1
        lines = [text for text in caplog.messages if "was dropped" in text]
    assert 1 <= len(lines) <= 2 + time.monotonic() - begin


def test_silent_strangers_delay_no_rank(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_HELLO_SECONDS", 600.0)
    with contextlib.ExitStack() as open_sockets:
        for _ in range(MAX_STRANGERS + 44):
            stranger = open_sockets.enter_context(socket.create_connection(("127.0.0.1", waiting)))
            stranger.sendall(b"InFl")
        start = time.monotonic()
        with pytest.raises(ConfigError, match="INFLIGHT_CLUSTER_TOKEN is not the same"):
            connect(("127.0.0.1", waiting), HELLO, "guessed", max_seconds=300)
        assert time.monotonic() - start < 300


def all_streams() -> list[object]:
    gc.collect()
    # not `isinstance`, which asks odd objects for their class
    return [each for each in gc.get_objects() if type(each) is IoStream]


def test_a_storm_of_strangers_leaves_nothing_behind(port: int) -> None:
    config = two_node_config(port)
    before = all_streams()
    io = IoThread("io")
    acceptor = RankAcceptor(io, ("127.0.0.1", port), "", config.parallel, TOKEN, 10.0, lambda rank, stream: None)
    io.start()
    io.run(acceptor.start)
    for _ in range(200):
        socket.create_connection(("127.0.0.1", port)).close()
    start = time.monotonic()
    num_left = 1  # a number, for a list would keep the streams
    while num_left or time.monotonic() < start + 0.5:  # half a second, in which all are accepted
        assert time.monotonic() < start + 300, num_left
        time.sleep(0.1)
        num_left = sum(not any(each is known for known in before) for each in all_streams())
    io.run(acceptor.close)
    io.stop()


def test_a_rank_joins_once(port: int) -> None:
    hello = replace(HELLO, rank=3, world_size=4)

    def check(seconds: float) -> None:
        config = two_node_config(port, ranks=4)
        starting = in_thread(lambda: MultiprocExecutor(config, SCRIPTED, max_join_seconds=seconds).shutdown())
        waits = pytest.raises(EngineError, match=rf"127\.0\.0\.1:\d+ within {seconds:g} s")
        joined = is_refused = False
        with waits as caught, contextlib.ExitStack() as stack:
            with contextlib.suppress(EngineError):  # it no longer waits
                stack.enter_context(connect(("127.0.0.1", port), hello, TOKEN, max_seconds=seconds))
                joined = True
                with pytest.raises(ConfigError, match="rank 3 has joined before"):
                    connect(("127.0.0.1", port), hello, TOKEN, max_seconds=seconds)
                is_refused = True
            starting.result(timeout=300)
        assert joined and is_refused and "ranks 2 did not" in str(caught.value)

    with_enough_time(check, first=2.0)


def test_a_rank_with_a_token_of_its_own_joins_with_it_once(port: int) -> None:
    config, io, name = two_node_config(port, ranks=4), IoThread("io"), f"inflight-test-{os.getpid()}"
    joined: list[int] = []
    acceptor = RankAcceptor(
        io, ("127.0.0.1", 0), name, config.parallel, "unknown", 10.0, lambda rank, _: joined.append(rank)
    )
    io.start()
    io.run(acceptor.start)
    for rank, token in ((2, "second"), (3, "third")):
        acceptor.expect(rank, token)
    third = replace(HELLO, rank=3, world_size=4)
    for address in (acceptor.address, name):
        for wrong, token in ((replace(third, rank=2), "third"), (third, "unknown"), (replace(third, rank=1), "third")):
            with pytest.raises(ConfigError, match="INFLIGHT_CLUSTER_TOKEN is not the same"):
                connect(address, wrong, token, max_seconds=300)
    connect(name, third, "third", max_seconds=300).close()
    with pytest.raises(ConfigError, match="rank 3 has joined before"):
        connect(acceptor.address, third, "third", max_seconds=300)
    assert joined == [3]
    assert acceptor.missing == {2}
    io.run(acceptor.close)
    with pytest.raises(EngineError, match=f"node 0 did not answer on {name} within 0 s"):
        connect(name, third, "third", max_seconds=0)
    io.stop()


def test_what_is_no_node_0_is_named(port: int) -> None:
    with pytest.raises(EngineError, match=r"node 0 .*127\.0\.0\.1:\d+ within 0\.1 s"):
        run_node(node_args(port), max_connect_seconds=0.1)
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(b"220 smtp ready\r\n")

        in_thread(answer)
        with pytest.raises(EngineError, match="is not node 0 of Inflight"):
            run_node(node_args(port), max_connect_seconds=300)


# -- the user's mistakes ---------------------------------------------------------------------------------------------------


def test_a_port_in_use(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} .*in use"):
        MultiprocExecutor(two_node_config(port), SCRIPTED)
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1"):
        MultiprocExecutor(two_node_config(port, host="203.0.113.1"), SCRIPTED)


def test_without_a_token_nobody_listens(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CLUSTER_TOKEN")
    calls: list[Callable[[], object]] = [
        lambda: MultiprocExecutor(two_node_config(port), SCRIPTED),
        lambda: run_node(node_args(port)),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="INFLIGHT_CLUSTER_TOKEN"):
            call()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"node_rank": 0}, "node 0 runs the engine itself"),
        ({"node_rank": 2}, "node_rank=2"),
        ({"nnodes": 3}, "cannot be split evenly"),
    ],
)
def test_a_node_that_does_not_fit(port: int, changes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        run_node(replace(node_args(port), **changes))  # type: ignore[arg-type]  # only sizes


def test_a_rank_that_fails_on_another_node_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = two_node_config(port)
    config = replace(config, model=replace(config.model, name="1:config"))
    monkeypatch.setattr(node, "REJOIN_SECONDS", 0.5)
    run = in_thread(lambda: run_node(node_args(port)))
    with pytest.raises(ConfigError, match="no such model"):
        MultiprocExecutor(config, SCRIPTED)
    assert isinstance(run.exception(timeout=300), InflightError)


def test_the_last_ranks_of_a_node_do_not_stay(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is stopped cannot see that its node's others have ended with the engine."""
    monkeypatch.setattr(node, "LAST_RANKS_SECONDS", 0.3)
    run = in_thread(lambda: run_node(node_args(port, ranks=4)))
    executor = MultiprocExecutor(two_node_config(port, ranks=4, budget=10.0), SCRIPTED)
    pids = executor.collective_rpc("pid")
    os.kill(pids[3], signal.SIGSTOP)
    executor.shutdown()
    assert have_ended(pids)
    assert run.exception(timeout=300) is None


def test_a_lost_rank_does_not_hold_up_the_end_of_its_node(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends while a new process for the rank tries in vain to connect."""
    run = in_thread(lambda: run_node(node_args(port, ranks=4)))
    executor = MultiprocExecutor(two_node_config(port, ranks=4, budget=10.0), SCRIPTED)
    pids, has_tried = executor.collective_rpc("pid"), threading.Event()

    def connect_in_vain(*_: object, **__: object) -> NoReturn:
        has_tried.set()
        raise EngineError("node 0 did not answer")

    monkeypatch.setattr(node, "connect", connect_in_vain)
    monkeypatch.setattr(node, "REJOIN_SECONDS", 300.0)
    os.kill(pids[3], signal.SIGKILL)
    assert has_tried.wait(300)
    executor.shutdown()
    assert run.exception(timeout=250) is None
    assert have_ended(pids)


def test_a_lost_rank_of_another_node_is_replaced_there(port: int) -> None:
    """Once it dies, and once it is stopped, which only its own node can see."""
    with run_script(NODE, "127.0.0.1", str(port), "2") as other, contextlib.ExitStack() as at_end:
        executor = MultiprocExecutor(two_node_config(port), SCRIPTED)
        at_end.callback(executor.shutdown)
        for epoch, number in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            pids = executor.collective_rpc("pid")
            future = executor.collective_rpc("sleep", (1, 20.0), non_block=True)
            os.kill(pids[1], number)
            error = future.exception(timeout=300)
            assert isinstance(error, WorkerDiedError)
            result = recover(executor, error)
            assert (result.epoch, result.replaced) == (epoch, (1,))
            new = executor.collective_rpc("pid")
            assert new[0] == pids[0] and new[1] != pids[1]
        executor.shutdown()
        other.communicate(timeout=300)
        assert other.returncode == 0


# -- a link that is cut, between two network namespaces --------------------------------------------------------------------


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one cable: the first has the address 10.213.7.1, and the cable's end "cable0"."""
    first, second = f"inflight-{os.getpid()}-0", f"inflight-{os.getpid()}-1"
    try:
        _ip("netns", "add", first)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs `ip netns`, and the right to use it")
    try:
        _ip("netns", "add", second)
        _ip("-n", first, "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", second)
        for namespace, end, address in ((first, "cable0", "10.213.7.1"), (second, "cable1", "10.213.7.2")):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", namespace, "link", "set", end, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        yield first, second
    finally:
        for namespace in (first, second):
            if Path(f"/run/netns/{namespace}").exists():
                _ip("netns", "delete", namespace)


CUT = """
    import sys, time
    from inflight.errors import RankError
    from inflight.executor.multiproc import MultiprocExecutor
    from tests.conformance.configs import plan
    from tests.unit.executor.processes import SCRIPTED
    from tests.unit.executor.test_join import two_node_config
    executor = MultiprocExecutor(two_node_config(29777, host="10.213.7.1", budget=2.0), SCRIPTED)
    print(*executor.collective_rpc("pid"))
    input()
    start = time.monotonic()
    try:
        if sys.argv[1] == "running":
            executor.execute_model(plan(5))
        else:
            while True:
                executor.check_health() if time.monotonic() - start > 4 else time.sleep(0.05)
    except RankError as error:
        print(f"{time.monotonic() - start:.2f} {type(error).__name__} rank={error.rank} step={error.step_id} {error}")
    executor.shutdown()
"""


@pytest.mark.parametrize("state", ["running", pytest.param("idle", marks=pytest.mark.full)])
def test_a_cut_link_is_noticed_within_the_budget(two_machines: tuple[str, str], state: str) -> None:
    first, second = two_machines

    def on(namespace: str, script: str, *arguments: str) -> subprocess.Popen[str]:
        return run_script(script, *arguments, prefix=("ip", "netns", "exec", namespace))

    with on(second, NODE, "10.213.7.1", "29777", "2") as other, on(first, CUT, state) as master:
        assert master.stdout is not None
        assert master.stdin is not None
        pids = [int(pid) for pid in master.stdout.readline().split()]
        assert len(pids) == 2
        _ip("-n", first, "link", "set", "cable0", "down")
        print("cut", file=master.stdin, flush=True)
        seconds, kind, text = master.stdout.readline().split(" ", 2)
        assert "rank=1" in text
        if state == "running":
            assert float(seconds) < 60.0  # the budget is 2 s; without it, the kernel gives up after minutes
            assert "step=5" in text
        else:
            assert kind == "WorkerDiedError"
            assert "its stream was lost: Connection timed out" in text
        assert master.wait(300) == 0
        assert other.wait(300) == 1  # the other node has noticed by itself
        assert have_ended(pids)
        other.communicate()
