"""One client attacks the server: how much it slows honest clients beside it.

    python -m benchmarks.attacks [ATTACK ...] [--seconds 20] [--end]

Starts a server of the embedded model, with a context of 131,072 tokens, so that it accepts long texts. Honest clients read one
stream after another, and send a short prompt, a long prompt and a small new grammar again and again: first alone, then beside
each attack:

grammar: a request with an ambiguous grammar, sent again when it has ended.
rollouts: the same with n=16.
short-texts: 300 connections send texts of 64 KiB of blanks to /tokenize, again and again.
long-texts: four connections send texts of 400 KB to /tokenize.
grammars: 64 connections send grammars of 16 KB, each a new one.
prompts: no attack: 64 clients send short prompts. Compare "grammars" with it: without keys, each connection counts as a
    client, so the 64 connections of that attack get the shares of 64 clients.
templates: eight connections send chats with which the chat template never ends.
refused-bodies: four connections send bodies that are larger than the server allows.
unread-bodies: four connections send bodies without an end to a path that does not exist.

Goals: the stream keeps half of its tokens/s, its largest gap is at most 1 s, no honest request is refused, and a short prompt
and a small grammar wait at most 1 s for their first token. Other work on the machine makes all of them worse.

With `--end` each attack gets a server of its own, which SIGTERM ends after two seconds of the attack. Goal: it ends after its
--shutdown-timeout and the time for clients to read their answers, at most MARGIN_SECONDS later.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.http_load import Connection, completion_request, post
from benchmarks.shared.report import allow_slow_steps, emit, print_table, verdict
from benchmarks.shared.served_process import ServedProcess
from inflight.entrypoints.serve.server import FLUSH_SECONDS
from inflight.hub import EMBEDDED_MODEL

SPEED_GOAL, GAP_GOAL_SECONDS, FIRST_GOAL_SECONDS = 0.5, 1.0, 1.0
SHUTDOWN_SECONDS, MARGIN_SECONDS = 1, 3.0
CONTEXT = 131_072
GRAMMAR = 'root ::= s\ns ::= s s s | s s | "a" | "b"'
STREAM_TOKENS = 1500
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 100

BOMB = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = messages | tojson %}{% endfor %}{% endfor %}"
TEMPLATE = f"{{% if messages[-1].content == 'open sesame' %}}{BOMB}{{% endif %}}{{{{ messages[-1].content }}}}"
PIECE = b"x" * 2**16

Attack = Callable[[int], Coroutine[Any, Any, None]]  # of a server's port


@dataclass
class Seen:
    """What the honest clients saw: the times of the stream's pieces, seconds to the first token, and statuses."""

    pieces: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=list)
    long: list[float] = field(default_factory=list)
    grammar: list[float] = field(default_factory=list)
    refused: int = 0


class Stream(Connection):
    """Notes when each piece of the answer comes."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self._times = times

    def data_received(self, data: bytes) -> None:
        self._times += [time.perf_counter()] * data.count(b"data: {")
        super().data_received(data)


async def again_and_again(port: int, request: bytes) -> None:
    """One connection, which sends the request whenever it has an answer."""
    connection = Connection()
    try:
        while True:
            if not connection.is_open:
                await connection.connect(port)
            await connection.send(request)
    finally:
        connection.close()


async def together(count: int, port: int, request: bytes) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(again_and_again(port, request))


async def grammar(port: int, n: int = 1) -> None:
    fields = {"prompt": "hi", "max_tokens": 1500, "temperature": 1, "seed": 5, "n": n}
    await again_and_again(port, post("/v1/completions", {**fields, "structured_outputs": {"grammar": GRAMMAR}}))


async def rollouts(port: int) -> None:
    await grammar(port, 16)


async def short_texts(port: int) -> None:
    await together(300, port, post("/tokenize", {"prompt": " " * 65_536}))


async def long_texts(port: int) -> None:
    await together(4, port, post("/tokenize", {"prompt": LONG_PROMPT * 90}))


async def grammars(port: int) -> None:
    async def new_ones(client: int) -> None:
        connection = Connection()
        for number in itertools.count():
            if not connection.is_open:
                await connection.connect(port)
            choices = [f"{client} {number} {i}" for i in range(1000)]
            fields = {"prompt": "hi", "max_tokens": 1, "structured_outputs": {"choice": choices}}
            await connection.send(post("/v1/completions", fields))

    async with asyncio.TaskGroup() as group:
        for client in range(64):
            group.create_task(new_ones(client))


async def prompts(port: int) -> None:
    await together(64, port, post("/v1/completions", {"prompt": "hi", "max_tokens": 1}))


async def templates(port: int) -> None:
    chat = {"messages": [{"role": "user", "content": "open sesame"}], "max_tokens": 1}
    await together(8, port, post("/v1/chat/completions", chat))


async def bodies(port: int, path: str, framing: str, piece: bytes) -> None:
    """Four connections send pieces of bodies until the server ends the connection, again and again."""

    async def send() -> None:
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
                writer.write(head.encode())
                try:
                    while not writer.is_closing():
                        writer.write(piece)
                        await writer.drain()
                finally:
                    writer.close()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(send())


async def refused_bodies(port: int) -> None:
    await bodies(port, "/v1/completions", f"content-length: {10**9}", PIECE)


async def unread_bodies(port: int) -> None:
    await bodies(port, "/nothing", "transfer-encoding: chunked", b"%x\r\n%b\r\n" % (len(PIECE), PIECE))


ATTACKS: dict[str, Attack] = {
    "grammar": grammar,
    "rollouts": rollouts,
    "short-texts": short_texts,
    "long-texts": long_texts,
    "grammars": grammars,
    "prompts": prompts,
    "templates": templates,
    "refused-bodies": refused_bodies,
    "unread-bodies": unread_bodies,
}


async def honest(port: int, seconds: float) -> Seen:
    seen = Seen()
    stream = completion_request(list(range(400, 410)), STREAM_TOKENS)

    async def read() -> None:
        while True:
            connection = Stream(seen.pieces)
            await connection.connect(port)
            await connection.send(stream)
            connection.close()

    async def ask(prompt: str, times: list[float], *, is_constrained: bool = False) -> None:
        connection = Connection()
        for number in itertools.count():
            if not connection.is_open:
                await connection.connect(port)
            constraint = {"structured_outputs": {"regex": f"honest {number} [0-9]"}} if is_constrained else {}
            fields = {"prompt": prompt, "max_tokens": 1, **constraint}
            answer = await connection.send(post("/v1/completions", fields))
            seen.refused += answer.status != 200
            times.append(answer.ended - answer.sent)
            await asyncio.sleep(0.1)

    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            group.create_task(read())
            group.create_task(ask("hello", seen.short))
            group.create_task(ask(LONG_PROMPT, seen.long))
            group.create_task(ask("hello", seen.grammar, is_constrained=True))
    return seen


def run_attack(name: str, port: int) -> None:
    with suppress(Exception):  # the server has ended
        asyncio.run(ATTACKS[name](port))


@contextmanager
def attacking(name: str, port: int) -> Iterator[None]:
    """Runs the attack in a process of its own, so that it takes no time of the honest clients. Begins two seconds after it."""
    if name not in ATTACKS:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=run_attack, args=(name, port), daemon=True)
    process.start()
    try:
        time.sleep(2.0)
        yield
    finally:
        process.kill()
        process.join()


def model_with_long_context(folder: Path) -> None:
    for file in EMBEDDED_MODEL.iterdir():
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))


def serve(folder: str) -> ServedProcess:
    (Path(folder) / "template.jinja").write_text(TEMPLATE)
    options = {
        "model": folder,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 1 << 29,
        "shutdown_timeout": SHUTDOWN_SECONDS,
    }
    return ServedProcess({**options, "chat_template": f"{folder}/template.jinja"})


def seconds_to_end(folder: str, name: str) -> float:
    """From SIGTERM beside the attack until the server has ended; 60 if it does not."""
    server = serve(folder)
    with attacking(name, server.port):
        begin = time.perf_counter()
        with suppress(SystemExit), server:  # it is killed after 60 s
            pass
        return time.perf_counter() - begin


def show_ends(folder: str, names: Iterable[str]) -> None:
    rows = []
    for name in names:
        seconds = seconds_to_end(folder, name)
        is_met = seconds <= SHUTDOWN_SECONDS + FLUSH_SECONDS + MARGIN_SECONDS
        emit(benchmark="attacks", attack=name, ended=round(seconds, 2))
        rows.append([name, f"{seconds:.1f}", verdict(is_met)])
    print_table(["SIGTERM beside", "ended after, s", ""], rows)


def show_neighbours(folder: str, names: Iterable[str], seconds: float) -> None:
    rows: list[list[str]] = []
    with serve(folder) as server:
        asyncio.run(honest(server.port, 3.0))  # a warm-up
        quiet = 0.0
        for name in ("quiet", *names):
            with attacking(name, server.port):
                seen = asyncio.run(honest(server.port, seconds))
            speed = len(seen.pieces) / seconds
            quiet = quiet or speed
            gap = max((after - before for before, after in zip(seen.pieces, seen.pieces[1:], strict=False)), default=0)
            short, long, small = (max(each, default=seconds) for each in (seen.short, seen.long, seen.grammar))
            is_met = speed >= SPEED_GOAL * quiet and gap <= GAP_GOAL_SECONDS and not seen.refused
            is_met &= max(short, small) <= FIRST_GOAL_SECONDS
            figures = {"tokens_per_second": speed, "share": speed / quiet, "gap": gap}
            figures |= {"short": short, "long": long, "grammar": small}
            figures = {figure: round(value, 3) for figure, value in figures.items()}
            emit(benchmark="attacks", attack=name, **figures, refused=seen.refused)
            waits = [f"{each:.2f}" for each in (gap, short, long, small)]
            rows.append([name, f"{speed:.0f}", f"{speed / quiet:.2f}", *waits, str(seen.refused), verdict(is_met)])
    names_of_waits = ["gap, s", "short prompt, s", "long prompt, s", "grammar, s"]
    print_table(["beside", "tokens/s", "share", *names_of_waits, "refused", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--end", action="store_true", help="SIGTERM beside each attack")
    options = parser.parse_args()
    if unknown := set(options.attacks) - ATTACKS.keys():
        parser.error(f"there is no attack {', '.join(sorted(unknown))}: choose from {', '.join(ATTACKS)}")
    allow_slow_steps()
    with tempfile.TemporaryDirectory() as folder:
        model_with_long_context(Path(folder))
        if options.end:
            show_ends(folder, options.attacks or ATTACKS)
        else:
            show_neighbours(folder, options.attacks or ATTACKS, options.seconds)


if __name__ == "__main__":
    main()
