"""`RemoteReplica`: who may join, which front end gets a connection, and what happens when the machine is away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.free_port import free_port
from inflight.config.engine_args import EngineArgs
from inflight.engine.process import remote_replica
from inflight.engine.process.head_links import join_head
from inflight.engine.process.remote_replica import make_keepers, terms_of
from inflight.engine.start.model_files import resolve_config
from inflight.errors import ConfigError
from inflight.handshake import RefusedError, introduce
from inflight.interface.codec import encode, schema_digest
from inflight.interface.start_up import Hello, ReplicaHello
from inflight.processes import acceptor as acceptor_module
from inflight.processes.streams import IoStream
from tests.unit.engine.process.head_cases import TERMS, TOKEN, config_of_replica, head_of
from tests.unit.engine.process.played_processes import PlayedFrontEnd
from tests.unit.engine.serving.event_loop import run, until


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", TOKEN)


async def joined(port: int, *linked: int, is_trial: bool = False, **changes: Any) -> socket.socket:
    """A connection that the machine of the replica has made."""
    parallel = config_of_replica(port, **changes).parallel
    return await asyncio.to_thread(join_head, parallel, frozenset(linked), 60.0, is_trial=is_trial)


def front_end() -> Any:  # Any: it is given to a replica
    return PlayedFrontEnd()


def test_each_front_end_gets_one_connection() -> None:
    async def test() -> None:
        port = free_port()
        acceptor, replica = head_of(port)
        first, second, third = front_end(), front_end(), front_end()
        assert [replica.add(first), replica.add(second)] == [0, 1]
        replica.start()
        made = [await joined(port), await joined(port, 0)]
        for number, (ours, theirs) in enumerate(zip((first, second), made, strict=True)):
            await until(lambda ours=ours: bool(ours.sockets))
            assert await asyncio.to_thread(theirs.recv, 4) == number.to_bytes(4)
            theirs.sendall(b"from the core")  # the front end gets all bytes after the number
            [given] = ours.sockets
            given.setblocking(True)
            assert await asyncio.to_thread(given.recv, 100) == b"from the core"
            assert given.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
        spare = await joined(port, 0, 1)  # for a front end to come
        await until(lambda: replica.spare is not None)
        assert acceptor.describe() == "1 is here" and not third.sockets
        assert replica.add(third) == 2
        assert await asyncio.to_thread(spare.recv, 4) == (2).to_bytes(4)
        replica.remove(0)
        again = await joined(port, 1, 2)  # no front end needs it
        await until(lambda: replica.spare is not None)
        await replica.close()
        assert await asyncio.to_thread(again.recv, 4) == b""
        for each in (*made, spare, again, *first.sockets, *second.sockets, *third.sockets):
            each.close()

    run(test)


def test_a_front_end_that_comes_while_the_machine_is_away_does_not_wait(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        early, late = front_end(), front_end()
        replica.add(early)
        replica.start()
        assert not early.errors  # at the start it waits
        monkeypatch.setattr(remote_replica, "AWAY_SECONDS", 300.0)
        connections = [await joined(port), await joined(port, 0)]
        await until(lambda: replica.spare is not None)
        monkeypatch.setattr(remote_replica, "AWAY_SECONDS", 0.05)
        connections.pop().close()
        await until(lambda: replica.state == "away")
        monkeypatch.setattr(remote_replica, "AWAY_SECONDS", 300.0)
        replica.add(late)
        assert "the machine of the replica is away" in str(late.errors[0]) and not early.errors
        connections.append(await joined(port))
        await until(lambda: len(early.sockets) == 2)  # the first in order
        connections.append(await joined(port, 0))
        await until(lambda: len(late.sockets) == 1)
        assert replica.state == "here" and not replica.has_ended
        await replica.close()
        for each in (*connections, *early.sockets, *late.sockets):
            each.close()

    with caplog.at_level(logging.INFO):
        run(test)
    told = [record.getMessage() for record in caplog.records if "replica" in record.name]
    assert any("waits for replicas of other machines: 1 is missing" in each for each in told)
    assert "replica 1 has made no connection for 0.05 s: 1 is away" in told
    assert "replica 1 has come from 127.0.0.1: 1 is here" in told


def test_a_machine_that_is_lost_while_it_has_no_spare_connection() -> None:
    """A front end that has never had a connection does not wait for ever."""

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        first, second = front_end(), front_end()
        replica.add(first)
        replica.start()
        made = await joined(port)
        await until(lambda: bool(first.sockets))
        replica.add(second)
        assert replica.state == "here" and not second.errors
        assert replica._away is not None and not replica._away.cancelled()
        replica._away._run()  # the time is over
        assert second.errors
        assert replica.state == "away" and not first.errors
        await replica.close()
        for each in (made, *first.sockets):
            each.close()

    run(test)


def test_a_front_end_that_has_ended_gets_one_connection_and_no_more() -> None:
    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        ended, other = front_end(), front_end()
        ended.is_gone = True
        replica.add(ended), replica.add(other)
        replica.start()
        made = [await joined(port), await joined(port)]
        await until(lambda: bool(other.sockets))
        assert len(ended.sockets) == 1
        made.append(await joined(port, 1))
        await until(lambda: replica.spare is not None)
        assert (len(ended.sockets), len(other.sockets)) == (1, 1)
        await replica.close()
        for each in (*made, *ended.sockets, *other.sockets):
            each.close()

    run(test)


def test_without_a_free_descriptor_the_connection_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        first = front_end()
        replica.start()
        with monkeypatch.context() as patch:
            patch.setattr(IoStream, "detach", fails)
            replica.add(first)
            made = await joined(port)
            assert await asyncio.to_thread(made.recv, 100) == bytes(4)
            assert await asyncio.to_thread(made.recv, 100) == b"", "the engine core makes another one"
        again = await joined(port)
        await until(lambda: bool(first.sockets))
        await replica.close()
        for each in (made, again, *first.sockets):
            each.close()

    run(test)
    assert "a connection of replica 1 is lost: " in caplog.text


REFUSALS: dict[str, dict[str, Any]] = {
    "dtype is bfloat16 at the replica, float32 at the head; use the same": {"terms": {**TERMS, "dtype": "bfloat16"}},
    "SHA-256 of model.safetensors is cd at the replica, ab12 at the head": {
        "terms": {**TERMS, "SHA-256 of model.safetensors": "cd"}
    },
    "SHA-256 of more.safetensors is 11 at the replica, None at the head": {
        "terms": {**TERMS, "SHA-256 of more.safetensors": "11"}
    },
    r"the head expects no new replica 0 \(1 is missing\); give each machine its own --data": {"number": 0},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_who_does_not_fit_is_refused_and_both_sides_say_why(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        replica.add(front_end())
        replica.start()
        number = REFUSALS[reason].get("number", 1)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}\) refused replica {number}: .*{reason}"):
            await joined(port, is_trial=True, **REFUSALS[reason])
        assert replica.state == "missing"
        await replica.close()

    run(test)
    assert reason.partition(" (")[0].replace("\\", "").split("(")[0] in caplog.text


def test_a_second_machine_with_the_same_number_is_refused() -> None:
    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        replica.start()
        spare = await joined(port)
        with pytest.raises(ConfigError, match=r"replica 1 \(1 is here\)"):
            await joined(port, is_trial=True)
        spare.close()
        await until(lambda: replica.spare is None)
        trial = await joined(port, is_trial=True)
        assert await asyncio.to_thread(trial.recv, 1) == b"" and replica.spare is None
        trial.close()
        await replica.close()

    run(test)


def test_a_second_process_does_not_slip_in_while_the_first_one_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a front end dies, the engine core ends its spare connection, and makes another one."""
    monkeypatch.setattr(remote_replica, "RETRY_SECONDS", 1000.0)

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        first = front_end()
        replica.add(first)
        replica.start()
        made = [await joined(port)]  # the front end takes it
        await until(lambda: bool(first.sockets))
        for _ in range(2):
            assert replica.spare is None
            parallel = config_of_replica(port, headless="two").parallel
            with pytest.raises(ConfigError, match=r"replica 1 \(1 is here\)"):
                await asyncio.to_thread(join_head, parallel, frozenset(), 0.1)
            made.append(await joined(port, 0))  # the first process may
            await until(lambda: replica.spare is not None)
            made[-1].close()
            await until(lambda: replica.spare is None)
        replica._owned_until = 0.0  # its time is over
        made.append(await joined(port, 0, headless="two"))
        await until(lambda: replica.spare is not None)
        with pytest.raises(ConfigError, match="expects no new replica 1"):
            await joined(port, 0, is_trial=True)
        await replica.close()
        for each in (*made, *first.sockets):
            each.close()

    run(test)


@pytest.mark.parametrize("lives", [True, False])
def test_a_new_process_waits_until_it_is_known_whether_the_last_one_lives(lives: bool) -> None:
    """A program that supervises a headless process may start it again at once."""

    async def test() -> None:
        port = free_port()
        acceptor, replica = head_of(port)
        replica.start()
        made = [await joined(port)]
        await until(lambda: replica.spare is not None)
        made[0].close()
        await until(lambda: replica.spare is None)
        assert (
            0 < replica.doubt_seconds("two") <= 2 * acceptor_module.RETRY_SECONDS and replica.doubt_seconds("one") == 0
        )
        asked: list[str] = []

        def doubt_seconds(process: str) -> float:
            asked.append(process)
            return 0.01 if "doubt" in asked and process != "one" else 0.0

        asked.append("doubt")
        replica.doubt_seconds = doubt_seconds  # type: ignore[method-assign]
        parallel = config_of_replica(port, headless="impatient").parallel
        with socket.create_connection(("127.0.0.1", port)) as impatient:
            hello = ReplicaHello(
                schema=schema_digest(),
                rank=1,
                linked=(),
                terms=parallel.terms,
                process=parallel.headless,
                is_trial=True,
            )
            await asyncio.to_thread(introduce, impatient, b"join", (1).to_bytes(4), TOKEN.encode())
            impatient.sendall(b"".join(map(bytes, encode(hello).buffers())))
            await until(lambda: "impatient" in asked)
            if not lives:  # a second hello ends the connection
                impatient.sendall(b"".join(map(bytes, encode(hello).buffers())))
                assert await asyncio.to_thread(impatient.recv, 10) == b""
        stranger = socket.create_connection(("127.0.0.1", port))
        with stranger, pytest.raises(RefusedError):  # it does not have to wait
            await asyncio.to_thread(introduce, stranger, b"join", (1).to_bytes(4), b"guessed")
        await until(lambda: not [*acceptor._acceptor._strangers, *acceptor._acceptor._proven])
        trial = asyncio.create_task(joined(port, is_trial=True, headless="two"))
        await until(lambda: asked.count("two") > 1)
        assert not trial.done()
        if lives:
            made.append(await joined(port))
            await until(lambda: replica.spare is not None)
        asked.remove("doubt")
        if lives:
            with pytest.raises(ConfigError, match="expects no new replica 1"):
                await trial
        else:
            made.append(await trial)
        await replica.close()
        for each in made:
            each.close()

    run(test)


@pytest.mark.parametrize("kind", ["token", "garbage", "hello of a rank", "silence", "too much"])
def test_strangers_harm_nothing(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_HELLO_SECONDS", 0.3 if kind == "silence" else 300.0)

    async def test() -> None:
        port = free_port()
        _, replica = head_of(port)
        early = front_end()
        replica.add(early)
        replica.start()
        if kind == "token":
            with monkeypatch.context() as patched:
                patched.setenv("INFLIGHT_CLUSTER_TOKEN", "guessed")
                with pytest.raises(ConfigError, match=r"INFLIGHT_CLUSTER_TOKEN .*head"):
                    await joined(port, is_trial=True)
        else:
            hello = Hello(schema="", rank=1, world_size=1, nnodes=1)
            messages = {
                "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
                "hello of a rank": b"".join(map(bytes, encode(hello).buffers())),
                "silence": b"",
                "too much": b"".join(map(bytes, encode(replace(hello, schema="t" * 2**17)).buffers())),
            }
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                if kind in ("hello of a rank", "too much"):
                    await asyncio.to_thread(introduce, stranger, b"join", (1).to_bytes(4), TOKEN.encode())
                stranger.sendall(messages[kind])
                with contextlib.suppress(ConnectionResetError):  # it had sent more than was read
                    while await asyncio.to_thread(stranger.recv, 100):
                        pass
        assert not early.sockets
        monkeypatch.setattr(acceptor_module, "MAX_HELLO_SECONDS", 300.0)
        made = await joined(port)
        await until(lambda: bool(early.sockets))
        await replica.close()
        for each in (made, *early.sockets):
            each.close()

    run(test)
    assert "a connection from 127.0.0.1 was dropped: " in caplog.text


def test_a_taken_port_and_a_missing_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        port = free_port()
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(ConfigError, match=rf"127.0.0.1:{port} \(data_parallel_address, "),
        ):
            head_of(port)
        monkeypatch.delenv("INFLIGHT_CLUSTER_TOKEN")
        with pytest.raises(ConfigError, match="set INFLIGHT_CLUSTER_TOKEN"):
            head_of(port)

    run(test)


def test_keepers_are_in_the_order_of_the_replicas() -> None:
    async def test() -> None:
        args = EngineArgs(
            data_parallel_size=3,
            data_parallel_size_local=1,
            data_parallel_start_rank=1,
            data_parallel_address="127.0.0.1",
            data_parallel_rpc_port=free_port(),
        )
        keepers = await make_keepers(args, resolve_config(args))
        assert [type(each).__name__ for each in keepers] == ["RemoteReplica", "EngineKeeper", "RemoteReplica"]
        await asyncio.gather(*(each.close() for each in keepers))

    run(test)


def test_the_terms_say_what_differs(tmp_path: Path) -> None:
    def terms(**changes: Any) -> dict[str, str]:
        several = {"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_address": "h"}
        args = EngineArgs(**{**several, **changes})
        return terms_of(args, resolve_config(args))

    def differing(**changes: Any) -> set[str]:
        return {name for name, _ in terms().items() ^ terms(**changes).items()}

    assert differing(data_parallel_start_rank=1, num_threads=1, kv_cache_memory_bytes=2**24, seed=5) == set()
    assert differing(max_model_len=512) == {"max_model_len"}
    assert "dtype" in differing(dtype="float32")
    assert differing(block_size=32) == {"block_size"}
    assert differing(structured_outputs_backend="xgrammar", reasoning_end="</think>") == {"reasoning_end"}
    assert differing(kv_cache_dtype="int8") == {"config.json, quantization, kv_cache_dtype or seed"}
    # a copy in another folder is the same model, and one other byte of weights is another model
    source = resolve_config(EngineArgs()).model.folder
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert differing(model=str(tmp_path)) == set()
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert differing(model=str(tmp_path)) == {"SHA-256 of model.safetensors"}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\n")
    assert differing(model=str(tmp_path)) == {"SHA-256 of model.safetensors", "SHA-256 of tokenizer.json"}
