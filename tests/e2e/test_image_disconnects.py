"""Clients that go while their image is on its way: in the body, while it is fetched, in the queue for a process, there,
in the tower, and while the answer is written. Most stages are held until the client has gone.

Nothing of them is left: no sequence, no KV block, no task, no descriptor, no process, no file, and no memory that is counted
for images that wait. `INFLIGHT_TEST_FULL=1`: 200 of each stage.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.entrypoints.serve.settings import ServerSettings
from inflight.multimodal import source as sources
from inflight.multimodal.fetch import fetch
from inflight.multimodal.images import Images
from inflight.processes.child_process import ChildProcess
from tests.conftest import FULL
from tests.e2e.openai_server import MODEL, RunningServer, demo_args, running_server
from tests.e2e.test_disconnects import engine_counts, leftovers
from tests.support.served_image_model import data_url, picture, write_served_image_model

NUM_CLIENTS = 200 if FULL else 3  # of each stage
CHAT = "/v1/chat/completions"
HOST = "images.example.com"
LONG = 700  # tokens of an answer beside which images are encoded slice by slice


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_served_image_model(tmp_path_factory.mktemp("model") / "images")
    temporary = tmp_path_factory.mktemp("temporary")
    settings = ServerSettings(served_model_names=(MODEL,), access_log="off", stream_keep_alive_interval=None)
    args = demo_args(
        model=str(folder),
        max_model_len=1024,
        allowed_media_domains=(HOST,),
        limit_mm_per_prompt={"image": 16},
        enable_prefix_caching=False,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("TMPDIR", str(temporary))
        with running_server(args, settings) as running:
            yield running


def images_of(server: RunningServer) -> Images:
    found = server.engine.input_processor.images._images
    assert found is not None
    return found


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def body_of(*urls: str, **more: Any) -> dict[str, Any]:
    content = [*map(image_part, urls), {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return {**body, "stream": True, "ignore_eos": True, **more}


@contextmanager
def sent(server: RunningServer, body: dict[str, Any], share: float = 1.0) -> Iterator[socket.socket]:
    """A connection on which this share of a request was sent. It is cut at the end of the block."""
    url = httpx.URL(server.url)
    assert url.port is not None
    content = json.dumps(body).encode()
    fields = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    request = f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content
    with socket.create_connection((url.host, url.port), 300) as connection:
        connection.sendall(request[: int(len(request) * share)])
        yield connection


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"not reached: {what}"
        time.sleep(0.002)


def no_requests(server: RunningServer) -> bool:
    return not len(server.engine._requests)


def counter(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=300, headers={"connection": "close"}).text
    return sum(
        float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"inflight:{name}_total")
    )


def waiting(server: RunningServer) -> dict[str, int]:
    """What is counted as waiting, or running, on the way of images."""
    images = images_of(server)
    pools = {"processes": images._processors._threads, "fetches": images._fetching, "files": images._reading}
    found = {f"{name} waiting": len(pool._waiting) for name, pool in pools.items()}
    found |= {f"{name} running": pool._num_running for name, pool in pools.items()}
    found |= {f"size of {name}": pool._queue._size for name, pool in pools.items()}
    return {**found, "images": len(images._running)}


def processes(server: RunningServer) -> dict[int, int]:
    """The processes for images, and how many descriptors each has open."""
    pids = [process._child.pid for process in images_of(server)._processors._processes.values()]
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}


def files() -> set[str]:
    """Temporary files of the server."""
    return {str(each) for each in Path(tempfile.gettempdir()).rglob("*")}


@contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    """Inside, the process for images stands still, in the middle of its image. It stands for one that computes for long, so it
    is not killed for being stopped."""
    pids = processes(server)
    assert pids
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChildProcess, "kill_if_stopped", lambda process: None)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def in_the_body(server: RunningServer, seed: int) -> None:
    with sent(server, body_of(data_url(picture(seed))), share=0.6):
        pass


def while_it_is_fetched(server: RunningServer, seed: int) -> None:
    """From a server that takes the request and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with sent(server, body_of(f"http://{HOST}:{port}/{seed}.png")):
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(4096).startswith(b"GET")
        wait_for(partial(no_requests, server), "the request is gone")


def in_the_process_and_in_its_queue(server: RunningServer, seed: int) -> None:
    urls = [data_url(picture(2 * seed + each)) for each in range(2)]
    with stopped(server):
        with sent(server, body_of(*urls)):
            pool = images_of(server)._processors._threads
            wait_for(lambda: pool._num_running == 1 and len(pool._waiting) >= 1, "one image runs, one waits")
        wait_for(lambda: not pool._waiting, "the image that waits leaves its queue, though the other one still runs")
    # before the process is stopped again: an image may take 60 s, and the time for which its process stands still counts
    wait_for(lambda: not pool._num_running, "the image that runs is done")


def in_the_tower(server: RunningServer, seed: int) -> None:
    """Beside a long answer, whose steps have time for some slices only. Its own text waits for the image."""
    before = counter(server, "encoder_slices")
    urls = [data_url(picture(100 * seed + each, 60, 60)) for each in range(8)]
    with sent(server, body_of(*urls)):
        wait_for(lambda: counter(server, "encoder_slices") > before, "slices are computed")


def while_it_reads(server: RunningServer, seed: int) -> None:
    with sent(server, body_of(data_url(picture(seed)), max_tokens=500)) as connection:
        found = b""
        while b"data:" not in found:
            found += connection.recv(4096)


STAGES: list[Callable[[RunningServer, int], None]] = [
    in_the_body,
    while_it_is_fetched,
    in_the_process_and_in_its_queue,
    in_the_tower,
    while_it_reads,
]


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name leads to this machine, which is allowed."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **keywords: real("127.0.0.1" if host == HOST else host, *more, **keywords),
    )
    monkeypatch.setattr(sources, "fetch", partial(fetch, is_allowed=lambda address: True))


@pytest.mark.parametrize("go", STAGES, ids=lambda go: go.__name__)
@pytest.mark.usefixtures("reachable")
def test_nothing_is_left_of_clients_that_go(server: RunningServer, go: Callable[[RunningServer, int], None]) -> None:
    def answer() -> dict[str, Any]:
        given = httpx.post(server.url + CHAT, json=body_of(data_url(picture(1)), stream=False), timeout=300)
        assert given.status_code == 200, given.text
        found: dict[str, Any] = given.json()["choices"][0]["message"]
        return found

    wanted = answer()
    beside = threading.Thread(
        target=lambda: httpx.post(
            server.url + CHAT,
            json={"messages": [{"role": "user", "content": "x"}], "max_tokens": LONG, "ignore_eos": True},
            timeout=300,
        )
    )
    counts_before, left_before = waiting(server), leftovers(server)
    before = processes(server), files()
    if go is in_the_tower:
        beside.start()
    for number in range(NUM_CLIENTS):
        go(server, 1000 * STAGES.index(go) + number + 2)
    if go is in_the_tower:
        beside.join()
    wait_for(lambda: not any(engine_counts(server).values()), f"the engine is empty: {engine_counts(server)}")
    wait_for(lambda: waiting(server) == counts_before, f"{waiting(server)} is {counts_before}")
    wait_for(lambda: (processes(server), files()) == before, "the same processes and files")
    wait_for(lambda: all(count <= left_before[name] for name, count in leftovers(server).items()), "tasks, descriptors")
    assert no_requests(server)
    assert answer() == wanted
