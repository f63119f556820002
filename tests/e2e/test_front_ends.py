"""Several front ends before one engine of mock steps: what clients, Prometheus and the supervisor of the command see."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.mock_executor import NAME
from tests.e2e.serve_process import MODEL, ServeProcess, Stream, assert_nothing_left, events_of, serving, tree_of
from tests.support.certificates import make_certificate, needs_openssl
from tests.support.descriptors import open_descriptors
from tests.support.python_process import environment_of
from tests.support.waits import wait_until

TITLES = {"engine", "front end 0", "front end 1"}
LONG = 1500  # tokens, 5 ms each
SLOW = {"MOCK_STEP_SECONDS": "0.02"}


@contextlib.contextmanager
def two_front_ends(temporary: Path, *options: str, **more: Any) -> Iterator[ServeProcess]:
    """The folder of the metrics is in `temporary`."""
    fixed = ["--api-server-count", "2", "--distributed-executor-backend", NAME]
    with serving(*fixed, *options, TMPDIR=str(temporary), **more) as server:
        yield server


def inode_of(server: ServeProcess, port: int) -> str:
    """Of the server's end of this connection. "": the kernel's table, which changes while it is read, did not show it."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().split("\n")[1:] if line]
    ends = f":{server.port:04X}", f":{port:04X}"
    return next((line[9] for line in lines if line[1].endswith(ends[0]) and line[2].endswith(ends[1])), "")


def owner_of(server: ServeProcess, port: int) -> str:
    """The title of the process that serves the client's connection from this port."""
    inode = wait_until(lambda: inode_of(server, port))
    for title, pid in server.children().items():
        with contextlib.suppress(FileNotFoundError):  # the process has just ended
            if f"socket:[{inode}]" in open_descriptors(pid).values():
                return title
    raise AssertionError(f"nobody has socket {inode}")


def streams_on_both(server: ServeProcess, max_tokens: int) -> dict[str, list[Stream]]:
    found: dict[str, list[Stream]] = {"front end 0": [], "front end 1": []}
    for _ in range(100):
        stream = server.start_stream(max_tokens)
        found[owner_of(server, stream.port)].append(stream)
        if all(found.values()):
            return found
    raise AssertionError({title: len(streams) for title, streams in found.items()})


def finish_reason(stream: Stream) -> str:
    return [choice["finish_reason"] for event in events_of(stream.rest()) for choice in event["choices"]][-1]


def test_both_serve_their_metrics_add_up_and_sigterm_ends_all(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, **SLOW) as server:
        pids = tree_of(server.popen.pid)
        assert set(server.children()) >= TITLES
        assert len(list(tmp_path.iterdir())) == 2, "the folders of the metrics and of the responses"
        streams = [stream for each in streams_on_both(server, 75).values() for stream in each]
        for stream in streams:
            assert finish_reason(stream) == "length"
        for _ in range(10):  # whichever answers
            _, text = server.request("GET", "/metrics")
            value = re.search(rf'inflight:generation_tokens_total{{model_name="{MODEL}"}} (\S+)', text)
            assert value is not None
            assert float(value[1]) == 75 * len(streams)
            assert f'inflight:engine_up{{model_name="{MODEL}"}} 1.0' in text
        streams = [stream for each in streams_on_both(server, 150).values() for stream in each]
        lasting = server.start_stream(LONG)  # without it the others might have ended before the next look
        server.popen.send_signal(signal.SIGTERM)
        assert "server_draining" in server.wait_until("/ready", 503)
        lasting.connection.close()
        assert [finish_reason(stream) for stream in streams] == ["length"] * len(streams)
        assert server.end() == 0, server.text_of_log()
        assert_nothing_left(pids, set())
        assert not list(tmp_path.iterdir())


def test_replicas_are_chosen_named_and_replaced(tmp_path: Path) -> None:
    """Each front end is connected to each replica. If a replica is killed, no request is lost."""
    with two_front_ends(tmp_path, "-dp", "2", "--num-threads", "1") as server:
        assert json.loads(server.request("GET", "/ready")[1])["engines"] == {"0": "ready", "1": "ready"}
        for rank in ("2", "-1", "x", "0, 1"):
            status, text = server.request("POST", "/v1/completions", {"prompt": "x"}, {"X-Data-Parallel-Rank": rank})
            assert status == 400 and "replica" in text
        alone = server.start_stream(200, {"X-Data-Parallel-Rank": "0"}).rest()
        truth = "".join(event["choices"][0]["text"] for event in events_of(alone) if event["choices"])
        streams = [server.start_stream(200, {"X-Data-Parallel-Rank": str(i % 2)}) for i in range(8)]
        os.kill(server.wait_for_child("engine 1"), signal.SIGKILL)
        assert server.request("GET", "/health")[0] == 200
        for stream in streams:
            events = [event for event in events_of(stream.rest()) if event["choices"]]
            assert "".join(event["choices"][0]["text"] for event in events) == truth
        status, text = server.request("GET", "/metrics")
        for engine in ("0", "1"):
            found = re.search(rf'inflight:engine_steps_total{{engine="{engine}",model_name="{MODEL}"}} (\S+)', text)
            assert found is not None and float(found[1]) > 0
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text_of_log()


@needs_openssl
@pytest.mark.usefixtures("new_interpreters")  # for `environment_of`
def test_keys_reach_both_sighup_reads_them_again_and_one_of_both_logs(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("first-key-1\n")
    certificate, private_key = make_certificate(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ["--ssl-certfile", certificate, "--ssl-keyfile", private_key, "--api-key-file", str(key_file)]
    options += ["--log-stats-interval", "0.5", "--log-requests"]

    def answers(server: ServeProcess, key: str) -> set[int]:
        shown = {"Authorization": f"Bearer {key}"}
        return {server.request("GET", "/v1/models", headers=shown)[0] for _ in range(12)}

    def wait_for(server: ServeProcess, text: str, count: int) -> None:
        end = time.monotonic() + 300
        while server.text_of_log().count(text) < count:
            assert time.monotonic() < end, server.text_of_log()
            time.sleep(0.05)

    trusting = ssl.create_default_context(cafile=certificate)
    with two_front_ends(temporary, *options, tls=trusting, INFLIGHT_API_KEY="a-key-of-the-test") as server:
        for key, status in (("first-key-1", 200), ("a-key-of-the-test", 200), ("second-key-2", 401)):
            assert answers(server, key) == {status}
        assert environment_of(server.popen.pid)["INFLIGHT_API_KEY"] == "a-key-of-the-test"
        for title in TITLES:
            pid = server.children()[title]
            assert b"-key-" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            environment = environment_of(pid)
            assert environment["TMPDIR"] == str(temporary), "it is the server's environment"
            assert not any("-key-" in value for value in environment.values()), "but without the keys"
        stream = server.start_stream(500, {"Authorization": "Bearer first-key-1"})
        key_file.write_text("second-key-2\n")
        make_certificate(tmp_path)
        server.popen.send_signal(signal.SIGHUP)
        wait_for(server, "SIGHUP: new connections get the certificate", 2)
        wait_for(server, "SIGHUP: 2 API keys are in use", 2)
        with pytest.raises(ssl.SSLCertVerificationError):
            server.request("GET", "/live")
        server.tls = ssl.create_default_context(cafile=certificate)
        assert answers(server, "first-key-1") == {401}
        assert answers(server, "second-key-2") == {200} == answers(server, "a-key-of-the-test")
        key_file.write_text("short\n")
        Path(certificate).write_text("no certificate")
        server.popen.send_signal(signal.SIGHUP)
        wait_for(server, "stays in use", 2)
        wait_for(server, "stay in use", 2)
        assert answers(server, "second-key-2") == {200}
        assert finish_reason(stream) == "length", "it has gone on"
        wait_for(server, "the engine is idle now", 1)
        log = server.text_of_log()
        lines = [line for line in log.split("\n") if "prompt tokens/s" in line]
        assert all("front end 0" in line for line in lines), "one front end writes them"
        assert "1 requests run, 0 wait" in lines[0]
        assert log.count(" began: /v1/completions, ") == 1 and log.count(" ended: length, ") == 1
        assert "-key-" not in log and "Once upon" not in log


def test_what_outlives_the_shutdown_timeout_is_ended_on_both_and_a_second_signal_cuts(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, "--shutdown-timeout", "0.3") as server:
        streams = [stream for each in streams_on_both(server, LONG).values() for stream in each]
        server.popen.send_signal(signal.SIGINT)
        assert [finish_reason(stream) for stream in streams] == ["abort"] * len(streams)
        assert server.end() == 0
    with two_front_ends(tmp_path) as server:
        pids = tree_of(server.popen.pid)
        streams = [stream for each in streams_on_both(server, LONG).values() for stream in each]
        server.popen.send_signal(signal.SIGTERM)
        server.wait_until("/ready", 503)
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM
        assert not any("[DONE]" in stream.rest() for stream in streams)
        assert_nothing_left(pids, set())
        assert not list(tmp_path.iterdir())


def test_without_fault_tolerance_the_death_of_one_drains_the_others_and_fails_the_command(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, "--shutdown-timeout", "0.5", "--no-enable-fault-tolerance") as server:
        pids = tree_of(server.popen.pid)
        streams = streams_on_both(server, LONG)
        os.kill(server.children()["front end 0"], signal.SIGKILL)
        assert [finish_reason(stream) for stream in streams["front end 1"]] == ["abort"] * len(streams["front end 1"])
        assert server.end() == 1
        assert "a front end has died" in server.text_of_log()
        for stream in streams["front end 0"]:
            assert "[DONE]" not in stream.rest()
        assert_nothing_left(pids, set())
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_is_stopped_is_replaced_and_the_other_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    with two_front_ends(tmp_path) as server:
        before = server.children()
        streams = streams_on_both(server, LONG)
        os.kill(before["front end 0"], number)
        assert {finish_reason(stream) for stream in streams["front end 1"]} == {"length"}
        for stream in streams["front end 0"]:
            assert "[DONE]" not in stream.rest()
        deadline = time.monotonic() + 300
        while "front end 0 is ready again" not in server.text_of_log():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        after = server.children()
        assert after["front end 0"] != before["front end 0"]
        assert {title: after[title] for title in ("engine", "front end 1")} == {
            title: before[title] for title in ("engine", "front end 1")
        }
        again = streams_on_both(server, 20)
        assert {finish_reason(stream) for each in again.values() for stream in each} == {"length"}
        assert '"num_recoveries":{"front_end_died":1}' in server.request("GET", "/fault_tolerance/status")[1]


def test_the_death_of_the_engine_and_of_the_command_end_all(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, "--fault-tolerance-config", '{"max_recoveries": 0}') as server:
        pids = tree_of(server.popen.pid)
        streams = [stream for each in streams_on_both(server, LONG).values() for stream in each]
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert {events_of(stream.rest())[-1]["error"]["code"] for stream in streams} == {"engine_dead"}
        assert server.end() == 1
        assert_nothing_left(pids, set())
    with two_front_ends(tmp_path) as server:
        pids = tree_of(server.popen.pid)
        server.popen.kill()
        assert server.end() == -signal.SIGKILL
        assert_nothing_left(pids, set(), seconds=60.0)
    left = set(tmp_path.iterdir())  # nobody could remove the folders of the metrics and of the responses
    assert len(left) == 2
    with two_front_ends(tmp_path) as server:
        assert not left & set(tmp_path.iterdir())
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("victim", ["front end 1", "engine"])
def test_a_stopped_process_does_not_outlive_the_command(tmp_path: Path, victim: str) -> None:
    with two_front_ends(tmp_path) as server:
        pids = tree_of(server.popen.pid)
        os.kill(server.children()[victim], signal.SIGSTOP)
        server.popen.kill()
        server.end()
        assert_nothing_left(pids, set(), seconds=60.0)


def test_one_that_is_stopped_while_the_server_starts_is_replaced(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, ready=False) as server:
        server.wait_until("/live", 200)
        stopped = server.wait_for_child("front end 1")
        os.kill(stopped, signal.SIGSTOP)
        server.wait_until("/ready", 200)
        assert server.wait_for_child("front end 1") != stopped
        streams = [stream for each in streams_on_both(server, 20).values() for stream in each]
        assert {finish_reason(stream) for stream in streams} == {"length"}


def test_one_that_is_stopped_while_it_drains_does_not_hold_the_others(tmp_path: Path) -> None:
    """Nothing keeps its port, and the command ends as after any drain."""
    with two_front_ends(tmp_path, **SLOW) as server:
        pids, stopped = tree_of(server.popen.pid), server.children()["front end 1"]
        streams = streams_on_both(server, 150)
        lasting = streams_on_both(server, LONG)  # without them both might have ended before they are looked at
        server.popen.send_signal(signal.SIGTERM)
        server.wait_until("/ready", 503)
        os.kill(stopped, signal.SIGSTOP)
        for stream in lasting["front end 0"]:
            stream.connection.close()
        assert [finish_reason(stream) for stream in streams["front end 0"]] == ["length"] * len(streams["front end 0"])
        for stream in streams["front end 1"] + lasting["front end 1"]:
            stream.rest()  # it was cut when the front end was killed
        assert server.end() == 0, server.text_of_log()
        assert_nothing_left(pids, set())


def test_a_signal_while_starting_and_a_start_that_fails_leave_nothing(tmp_path: Path) -> None:
    with two_front_ends(tmp_path, ready=False) as server:
        server.wait_until("/live", 200)
        pids = tree_of(server.popen.pid)
        server.popen.send_signal(signal.SIGTERM)
        assert server.end() == 0, server.text_of_log()
        assert_nothing_left(pids, set())
    with two_front_ends(tmp_path, "--tokenizer", str(tmp_path), ready=False) as server:
        assert server.end() == 2
        assert server.text_of_log().count("error: ") == 1, server.text_of_log()
    assert not list(tmp_path.iterdir())
