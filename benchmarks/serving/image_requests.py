"""Images that come over HTTP: what the event loop, other clients and the memory of a server see of them.

    python -m benchmarks.image_requests [start] [loop] [fair] [memory] [--images 2000] [--disconnects 200]

- start: seconds from the start of the server until it is ready, and until the first image that comes then is answered; beside
  it, a later image.
- loop: bodies with images of 1, 4 and 15 MB in base64, one after another: the longest callback of the front end's event loop.
  Goal: at most 5 ms of work.
- fair: one client sends large images without a pause. How long the small image of another client takes, against the small
  image alone.
- memory: the resident memory of all processes before and after many distinct images, and after clients that left at each stage
  of an image's way: in the middle of the body, behind it, in the queue for a process, before the answer, and behind its first
  event. The cache of processed images has 64 MiB.

The model is tiny and has no weights (benchmarks/shared/image_model.py), so this measures all that happens before its tower.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import itertools
import json
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.shared.image_model import write_image_model
from benchmarks.shared.loop_watch import WatchedProcess
from benchmarks.shared.report import MIB, allow_slow_steps, emit, print_table, verdict
from benchmarks.shared.served_process import ServedProcess

LOOP_GOAL = 0.005  # seconds
CACHE_BYTES = 64 * MIB
NUM_CLIENTS = 4
KEYS = ("key-of-the-first-client", "key-of-the-second-client")
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "dtype": "float32", "max_model_len": 16384, "kv_cache_memory_bytes": "256M", "num_threads": 1,
    "mm_processor_cache_gb": CACHE_BYTES / 2**30, "max_body_bytes": "32M", "max_total_body_bytes": "512M",
    "mm_processor_kwargs": '{"max_pixels": 262144}',
}  # fmt: skip


def picture(seed: int, width: int, height: int, *, kind: str = "JPEG") -> bytes:
    """A file with noise, which compresses badly."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"compress_level": 0} if kind == "PNG" else {"quality": 90}))
    return file.getvalue()


def body_of(image: bytes, **more: Any) -> bytes:  # Any: JSON
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}).encode()


def ask(server: ServedProcess, body: bytes, key: str = KEYS[0]) -> float:
    """Returns the seconds until the answer."""
    connection = http.client.HTTPConnection(*server.address, timeout=600)
    begin = time.perf_counter()
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {text[:300]!r}")
    finally:
        connection.close()
    return time.perf_counter() - begin


def leave(server: ServedProcess, body: bytes, share: float, *, reads: int, seconds: float = 0.0) -> None:
    """Send a share of a request, read so many pieces of the answer, wait, and close the connection."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    with socket.create_connection(server.address, timeout=600) as connection:
        connection.sendall(head + body[: int(len(body) * share)])
        for _ in range(reads):
            connection.recv(65536)
        time.sleep(seconds)


@contextmanager
def served(folder: Path, kind: Callable[..., Any] = ServedProcess, *more: Any) -> Iterator[Any]:
    """Any: of the kind of process."""
    options = {"model": folder, **OPTIONS}
    with kind(options, *more) as server:
        yield server


def start(folder: Path, args: argparse.Namespace) -> list[list[str]]:
    ready, first, later = [], [], []
    for seed in range(args.rounds):
        with served(folder) as server:
            ready.append(server.cold_start_seconds)
            first.append(ask(server, body_of(picture(2 * seed, 640, 480))))
            later.append(ask(server, body_of(picture(2 * seed + 1, 640, 480))))
        emit(benchmark="image_requests", case="start", ready=ready[-1], first=first[-1], later=later[-1])
    median = statistics.median
    return [
        ["seconds until the server is ready", f"{median(ready):.2f}", "", ""],
        ["seconds of the first image then", f"{median(first):.2f}", "", ""],
        ["seconds of a later image", f"{median(later):.2f}", "", ""],
    ]


def loop(folder: Path, args: argparse.Namespace) -> list[list[str]]:
    rows = []
    with tempfile.TemporaryDirectory() as place, served(folder, WatchedProcess, Path(place) / "seen.json") as server:
        ask(server, body_of(picture(0, 64, 64)))
        for side, name in ((500, "1 MB"), (1000, "4 MB"), (1930, "15 MB")):
            server.take()
            for seed in range(args.rounds * 3):
                ask(server, body_of(picture(seed, side, side, kind="PNG")))
            seen = sorted(server.take(), key=lambda each: each[1], reverse=True)
            longest = max((each[0] for each in seen), default=0.0)
            work, what = (seen[0][1], seen[0][2]) if seen else (0.0, "")
            emit(
                benchmark="image_requests", case="loop", size=name, seconds=longest, work=work, what=what, all=seen[:5]
            )
            rows.append([
                f"longest callback, bodies of {name}: ms of work (with waits)",
                f"{1e3 * work:.1f} ({1e3 * longest:.1f})", f"{1e3 * LOOP_GOAL:g}", verdict(work <= LOOP_GOAL),
            ])  # fmt: skip
    return rows


def fair(folder: Path, args: argparse.Namespace) -> list[list[str]]:
    """The large images are files of 4,000 x 3,000 pixels, each of which takes some tenths of a second."""
    with served(folder, _with_keys) as server:
        ask(server, body_of(picture(0, 64, 64)))
        large = [picture(seed, 4000, 3000) for seed in range(2)]
        numbers = itertools.count()

        def another() -> bytes:  # bytes behind the end of a file make it another image for the cache
            number = next(numbers)
            return body_of(large[number % 2] + number.to_bytes(8, "big"))

        def small(count: int, seed: int) -> float:
            return statistics.median(ask(server, body_of(picture(seed + i, 64, 48)), KEYS[1]) for i in range(count))

        alone = small(20, 1000)
        stop = threading.Event()

        def flood() -> None:
            while not stop.is_set():
                ask(server, another())

        one = statistics.median(ask(server, another()) for _ in range(4))
        with ThreadPoolExecutor(16) as threads:
            flooding = [threads.submit(flood) for _ in range(16)]
            time.sleep(2 * one)
            beside = small(20, 2000)
            stop.set()
            for each in flooding:
                each.result()
    emit(benchmark="image_requests", case="fair", alone=alone, large=one, beside=beside)
    return [
        ["seconds of a small image alone", f"{alone:.3f}", "", ""],
        ["seconds of a large image alone", f"{one:.3f}", "", ""],
        ["seconds of a small image beside 16 requests with large ones", f"{beside:.3f}", "", ""],
    ]


def _with_keys(options: dict[str, Any]) -> ServedProcess:
    return ServedProcess(options, arguments=["--api-key", *KEYS])


def memory(folder: Path, args: argparse.Namespace) -> list[list[str]]:
    rows = []

    def report(name: str) -> int:
        time.sleep(2.0)  # what was cancelled ends
        found: dict[str, int] = server.memory_bytes()
        total = sum(found.values())
        emit(benchmark="image_requests", case="memory", after=name, total=total, processes=found)
        rows.append([f"MiB after {name}", f"{total / MIB:.0f}", "", ""])
        return total

    with served(folder) as server, ThreadPoolExecutor(NUM_CLIENTS) as threads:

        def send(first: int, count: int) -> None:
            list(threads.map(lambda seed: ask(server, body_of(picture(seed, 512, 384))), range(first, first + count)))

        report("the start")
        send(0, 200)  # the cache is full, and each process has met each size
        before = report("200 images")
        send(200, args.images)
        after = report(f"{args.images} more")
        stages: dict[str, Callable[[bytes], None]] = {
            "in the middle of the body": lambda body: leave(server, body, 0.5, reads=0),
            "behind the body": lambda body: leave(server, body, 1.0, reads=0),
            "before the answer": lambda body: leave(server, body, 1.0, reads=0, seconds=0.02),
            "behind the first event": lambda body: leave(server, body, 1.0, reads=1),
        }
        seeds = itertools.count(10**6)
        for name, go in stages.items():
            bodies = (
                body_of(picture(next(seeds), 512, 384), stream=True, max_tokens=64) for _ in range(args.disconnects)
            )
            list(threads.map(go, bodies))
            after = report(f"{args.disconnects} clients that left {name}")
        with ThreadPoolExecutor(args.disconnects) as many:  # all but one of them wait in the queue
            bodies = (body_of(picture(next(seeds), 512, 384)) for _ in range(args.disconnects))
            list(many.map(stages["behind the body"], bodies))
        after = report(f"{args.disconnects} clients that left the queue")
    growth = (after - before) / MIB
    rows.append(["growth in MiB since the first 200 images", f"{growth:.0f}", "", ""])
    return rows


PARTS = {"start": start, "loop": loop, "fair": fair, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description="Images that come over HTTP.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--images", type=int, default=2000, help="of memory [%(default)s]")
    parser.add_argument("--disconnects", type=int, default=200, help="of each stage of memory [%(default)s]")
    args = parser.parse_args()
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    allow_slow_steps()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = write_image_model(Path(place) / "model")
        for part in args.parts or PARTS:
            rows += PARTS[part](folder, args)
    print_table(["images over HTTP", "found", "goal", ""], rows)


if __name__ == "__main__":
    main()
