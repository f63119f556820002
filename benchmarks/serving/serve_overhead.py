"""What serving adds: tokens per second against offline, the engine's steps under a front end, the time to the first byte.

    python -m benchmarks.serve_overhead [throughput] [steps] [first-byte] [apis] [--model qwen3-0.6b] [--rounds 3]
        [--batch 32]

throughput: --batch streams through `inflight serve` against `LLM.generate` of the same prompts, with the same arguments, in
turns (goal: 0.95 times). steps: the mock executor under 256 streams, see `serve_step_period.py` (goal: a period at most
1.05 times that of the core alone). first-byte: the time to the first token through HTTP and through `AsyncLLM`, in turns, one
request at a time. apis: --batch streams of chats through /v1/responses, /v1/messages and /api/chat, each against the same
chats through /v1/chat/completions, in turns (goal: 0.98 times).

The load generator is `http_load.py`, in this process: it takes cores from the server, and says how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvloop

from benchmarks.serving import serve_step_period
from benchmarks.serving.http_load import Connection, completion_request, connect_all, post
from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.mock_executor import NAME, STEP_SECONDS
from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.report import allow_slow_steps, emit, percentile, print_table, verdict
from benchmarks.shared.served_process import ServedProcess
from inflight import LLM, AsyncLLM, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.request_state import RequestOutputKind

EMBEDDED = "embedded"
PROMPT_LEN = 16
THROUGHPUT_GOAL = 0.95
FIRST_BYTE_WARM_UP = 20
API_GOAL = 0.98
CHAT = "/v1/chat/completions"
# path -> the name of the number of tokens at the end of a stream
APIS = {
    CHAT: "completion_tokens",
    "/v1/responses": "output_tokens",
    "/v1/messages": "output_tokens",
    "/api/chat": "eval_count",
}


def throughput(options: argparse.Namespace) -> None:
    model = None if options.model == EMBEDDED else str(model_folder(options.model, options.models))
    engine_args: dict[str, Any] = {  # Any: as `EngineArgs` takes them
        "max_model_len": 1024,
        "max_num_seqs": options.batch,
        "kv_cache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
        **({} if model is None else {"model": model}),
        **options.engine_args,
    }
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1500) for _ in range(PROMPT_LEN)] for _ in range(options.batch)]
    requests = [completion_request(prompt, options.output_len) for prompt in prompts]
    num_tokens = options.batch * options.output_len
    shares: list[float] = []
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)

    with (
        LLM(**engine_args) as llm,
        ServedProcess(engine_args) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):

        def offline() -> float:
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == num_tokens
            return float(num_tokens / seconds)

        async def served() -> float:
            connections = await connect_all(server.port, options.batch)
            start, cpu = time.perf_counter(), time.process_time()
            answers = await asyncio.gather(
                *(connection.send(request) for connection, request in zip(connections, requests, strict=True))
            )
            seconds = max(answer.ended for answer in answers) - start
            shares.append((time.process_time() - cpu) / seconds)
            assert sum(answer.num_tokens for answer in answers) == num_tokens
            for connection in connections:
                connection.close()
            return float(num_tokens / seconds)

        row = compare_in_turns(
            "serve_overhead",
            f"{options.model}, {options.batch} streams",
            offline,
            lambda: runner.run(served()),
            options.rounds,
        )
    emit(benchmark="serve_overhead", load_generator_share_of_a_core=round(max(shares), 3))
    met = verdict(float(row[-1].split()[0]) >= THROUGHPUT_GOAL)
    header = ["tokens/s", "LLM", "HTTP", "ratio", f">= {THROUGHPUT_GOAL}", "load generator"]
    print_table(header, [[*row, met, f"{max(shares):.1%} of a core"]])


def apis(options: argparse.Namespace) -> None:
    """Greedy chats, so all APIs give the same tokens."""
    model = {} if options.model == EMBEDDED else {"model": str(model_folder(options.model, options.models))}
    engine_args = {**model, "max_num_seqs": options.batch, "kv_cache_memory_bytes": 1 << 29, **options.engine_args}
    requests = {path: [_chat_request(path, i, options.output_len) for i in range(options.batch)] for path in APIS}
    rows = []
    cpu: dict[str, list[float]] = {path: [] for path in APIS}  # processor time of the front end, in us per token
    with ServedProcess(engine_args) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def speed(path: str) -> float:
            before = server.cpu_seconds()["front end"]
            num_tokens, seconds = runner.run(_load(server.port, requests[path], APIS[path]))
            cpu[path].append((server.cpu_seconds()["front end"] - before) / num_tokens * 1e6)
            return num_tokens / seconds

        for path in list(APIS)[1:]:
            row = compare_in_turns("serve_apis", path, partial(speed, CHAT), partial(speed, path), options.rounds)
            met = verdict(float(row[-1].split()[0]) >= API_GOAL)
            each = [statistics.median(cpu[api]) for api in (CHAT, path)]
            emit(benchmark="serve_apis_cpu", case=path, chat_us=round(each[0], 1), us=round(each[1], 1))
            rows.append([*row, met, *(f"{us:.0f}" for us in each)])
    header = [f"tokens/s, {options.model}", "chat", "this API", "ratio", f">= {API_GOAL}"]
    print_table([*header, "front end, us/token: chat", "this API"], rows)


def _chat_request(path: str, index: int, num_tokens: int) -> bytes:
    text = f"Tell me a long story about a fox named Anna, who has {index} friends in the forest."
    fields: dict[str, Any] = {
        "temperature": 0,
        "max_tokens": num_tokens,
        "messages": [{"role": "user", "content": text}],
    }
    if path == "/v1/responses":
        fields = {"temperature": 0, "max_output_tokens": num_tokens, "input": text}
    elif path == "/api/chat":
        fields = {"messages": fields["messages"], "options": {"temperature": 0, "num_predict": num_tokens}}
    elif path == CHAT:
        fields["stream_options"] = {"include_usage": True}
    return post(path, {**fields, "stream": True})


async def _load(port: int, requests: Sequence[bytes], count_name: str) -> tuple[int, float]:
    """Send these requests at the same time. Returns the number of their tokens, and the seconds."""
    connections = await connect_all(port, len(requests))
    start = time.perf_counter()
    sent = (connection.send(request) for connection, request in zip(connections, requests, strict=True))
    answers = await asyncio.gather(*sent)
    seconds = max(answer.ended for answer in answers) - start
    for connection in connections:
        connection.close()
    counts = [re.findall(rb'"%s":(\d+)' % count_name.encode(), b"".join(answer.pieces)) for answer in answers]
    return sum(int(found[-1]) for found in counts), seconds


def steps(options: argparse.Namespace) -> None:
    serve_step_period.measure(options.streams, options.stream_tokens, STEP_SECONDS, options.step_rounds)


def first_byte(options: argparse.Namespace) -> None:
    """Both engines are idle when a request comes, so what differs is the way there and back."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ServedProcess(_MOCK_ARGS) as server:
        through_http, direct = runner.run(_first_bytes(server.port, options.requests))
    rows = []
    for share in (0.5, 0.99):
        http, engine = percentile(through_http, share) * 1e3, percentile(direct, share) * 1e3
        emit(benchmark="serve_first_byte", percentile=share, http_ms=http, async_llm_ms=engine, added_ms=http - engine)
        rows.append([f"p{share * 100:g}", f"{http:.2f}", f"{engine:.2f}", f"{http - engine:.2f}"])
    print_table(["first token, ms", "HTTP", "AsyncLLM", "added"], rows)


_MOCK_ARGS = {"distributed_executor_backend": NAME, "enable_prefix_caching": False}


async def _first_bytes(port: int, count: int) -> tuple[list[float], list[float]]:
    through_http, direct = [], []
    prompt = list(range(5, 5 + PROMPT_LEN))
    async with await AsyncLLM.from_args(EngineArgs.from_kwargs(_MOCK_ARGS)) as engine:
        (connection,) = await connect_all(port, 1)
        for index in range(FIRST_BYTE_WARM_UP + count):
            request = completion_request([*prompt, 100 + index], 1)
            http = await _first_byte(connection, request)
            own = await _first_output(engine, [*prompt, 100 + index])
            if index >= FIRST_BYTE_WARM_UP:
                through_http.append(http)
                direct.append(own)
        connection.close()
    return through_http, direct


async def _first_byte(connection: Connection, request: bytes) -> float:
    answer = await connection.send(request)
    return answer.first_byte - answer.sent


async def _first_output(engine: AsyncLLM, prompt: Sequence[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    async for _ in engine.generate(prompt, params, kind=RequestOutputKind.DELTA):
        break
    return time.perf_counter() - start


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "throughput": throughput,
    "steps": steps,
    "first-byte": first_byte,
    "apis": apis,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} [all]")
    add_model_arguments(parser, EMBEDDED)
    parser.add_argument(
        "--rounds", type=int, default=5, help="of throughput and apis; one more is a warm-up [%(default)s]"
    )
    parser.add_argument(
        "--output-len", type=int, default=64, help="tokens of a stream, throughput and apis [%(default)s]"
    )
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help='JSON, as {"num_threads": 1}; throughput and apis'
    )
    parser.add_argument("--batch", type=int, default=32, help="streams of throughput and apis [%(default)s]")
    parser.add_argument("--streams", type=int, default=256, help="of steps [%(default)s]")
    parser.add_argument("--stream-tokens", type=int, default=1200, help="of each, steps [%(default)s]")
    parser.add_argument("--step-rounds", type=int, default=1, help="of steps [%(default)s]")
    parser.add_argument("--requests", type=int, default=200, help="of first-byte [%(default)s]")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"{name!r} is not one of {', '.join(PARTS)}")
    allow_slow_steps()
    for name in options.parts or PARTS:
        PARTS[name](options)


if __name__ == "__main__":
    main()
