"""Replicas of the engine on one machine: throughput, balance, hits of the prefix cache, and the time to the first token.

    python -m benchmarks.replicas [http] [threads] [burst] [chats] [losses] [--rounds 3]

http: tokens/s of 8 replicas of the mock executor behind one server, divided by 8 times those of one replica, in turns
(goal: 0.95).

threads: tokens/s of two replicas with a thread each, divided by those of one replica with one thread, a model of 61 million
random weights, without HTTP, in turns (goal: 1.9; two cores must be free). Also the ratio of tokens per second of processor
time of the engines' processes, which depends less on other programs on these cores.

burst: 512 prompts of mixed lengths at once over 4 replicas: prompt tokens of the replica that got the most, divided by the mean
of the replicas (goal: 1.1).

chats: 64 chats of 8 turns over 4 replicas with the mock executor, whose steps of at most 256 tokens take 20 ms: tokens found in
the prefix caches, divided by those of one replica with the memory of all four (goal: 0.95), and the median time to the first
token with `--data-parallel-routing prefix`, divided by that with `load` (goal: 0.5).

losses: one of two replicas of the mock executor is killed under 8 streams, once in each round: the longest silence of a stream
(goal: 0.3 s), and the number of streams whose tokens differ from those without a loss (goal: 0).

For requests to a real model while replicas die or hang: python -m benchmarks.faults --target engine -- -dp 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.http_load import completion_request, connect_all
from benchmarks.shared.mock_executor import NAME
from benchmarks.shared.report import allow_slow_steps, emit, print_table, verdict
from benchmarks.shared.served_process import ServedProcess
from inflight import AsyncLLM, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.engine.process.engine_keeper import EngineKeeper
from inflight.engine.request.request_state import RequestOutputKind

SCALING_GOAL, THREADS_GOAL, BALANCE_GOAL, HITS_GOAL, FIRST_TOKEN_GOAL = 0.95, 1.9, 1.1, 0.95, 0.5
SILENCE_GOAL = 0.3
NUM_REPLICAS, STREAMS, HTTP_TOKENS, HTTP_STEP_SECONDS = 8, 8, 60, 0.05
NUM_CHATS, NUM_TURNS, FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 64, 8, 600, 60, 20
CHAT_STEP_SECONDS = 0.02
BLOCK_BYTES, BLOCK_SIZE = 128, 16  # of the mock executor
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}

Row = tuple[str, str, str, str]


def mock_args(num_replicas: int, **changes: Any) -> EngineArgs:  # Any: of `EngineArgs`
    fields = {"distributed_executor_backend": NAME, "num_threads": 1, "seed": 0, "dtype": "float32"}
    return EngineArgs(**{**fields, "data_parallel_size": num_replicas, **changes})


def http(rounds: int) -> list[Row]:
    """The steps of the mock executor take no processor, so the front end is what may be too slow."""
    environment = {"MOCK_STEP_SECONDS": str(HTTP_STEP_SECONDS)}
    speeds: dict[int, list[float]] = {1: [], NUM_REPLICAS: []}
    options = {"distributed_executor_backend": NAME, "num_threads": 1, "max_num_seqs": STREAMS, "seed": 0}
    with (
        ServedProcess(options, environment) as one,
        ServedProcess({**options, "data_parallel_size": NUM_REPLICAS}, environment) as all_of_them,
    ):
        servers = {1: one, NUM_REPLICAS: all_of_them}
        for _ in range(rounds + 1):  # the first round does not count
            for count, server in servers.items():
                speeds[count].append(asyncio.run(http_speed(server.port, count * STREAMS)))
    ratios = [many / (NUM_REPLICAS * one) for one, many in zip(speeds[1][1:], speeds[NUM_REPLICAS][1:], strict=True)]
    emit(part="http", replicas=NUM_REPLICAS, tokens_per_second={str(count): found for count, found in speeds.items()})
    ratio = statistics.median(ratios)
    name = f"{NUM_REPLICAS} replicas over HTTP / {NUM_REPLICAS} x one"
    return [(name, f"{ratio:.2f}", f"{SCALING_GOAL}", verdict(ratio >= SCALING_GOAL))]


async def http_speed(port: int, num_streams: int) -> float:
    """Returns tokens per second."""
    connections = await connect_all(port, num_streams)
    begin = time.perf_counter()
    requests = [completion_request([50 + i, 60, 70], HTTP_TOKENS) for i in range(num_streams)]
    answers = await asyncio.gather(*(each.send(it) for each, it in zip(connections, requests, strict=True)))
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    return sum(answer.num_tokens for answer in answers) / seconds


async def threads(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        fields: dict[str, Any] = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}
        fields |= {"num_threads": 1, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**26, "max_model_len": 1024}
        async with (
            await AsyncLLM.from_args(EngineArgs(**fields)) as one,
            await AsyncLLM.from_args(EngineArgs(**fields, data_parallel_size=2)) as two,
        ):
            ratios, shares = [], []
            for number in range(rounds + 1):
                alone, together = await offline_speed(one, 8), await offline_speed(two, 16)
                emit(part="threads", one=alone, two=together, load_average=os.getloadavg()[0])
                if number:
                    ratios.append(together[0] / alone[0])
                    shares.append(together[1] / alone[1])
    ratio, share = statistics.median(ratios), statistics.median(shares)
    return [
        ("two replicas, a thread each / one", f"{ratio:.2f}", f"{THREADS_GOAL}", verdict(ratio >= THREADS_GOAL)),
        ("the same by processor seconds", f"{share:.2f}", "", ""),
    ]


def processor_seconds(engine: AsyncLLM) -> float:
    """Returns the processor time that the engines' processes have used since their start."""
    total = 0
    for keeper in engine._keepers:
        assert isinstance(keeper, EngineKeeper) and keeper.process is not None
        fields = Path(f"/proc/{keeper.process.process.pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def offline_speed(engine: AsyncLLM, num_requests: int) -> tuple[float, float]:
    """Returns tokens per second, and per processor second, prompts included. No two requests have the same
    prompt."""
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [[random.randrange(8000) for _ in range(64)] for _ in range(num_requests)]
    begin, used = time.perf_counter(), processor_seconds(engine)

    async def one(i: int) -> None:
        async for _ in engine.generate({"prompt_token_ids": prompts[i]}, params, kind=RequestOutputKind.FINAL_ONLY):
            pass

    await asyncio.gather(*map(one, range(num_requests)))
    num_tokens = num_requests * (64 + 64)
    return num_tokens / (time.perf_counter() - begin), num_tokens / (processor_seconds(engine) - used)


async def burst() -> list[Row]:
    draws = random.Random(1)
    lengths = [round(8 * 128 ** draws.random()) for _ in range(512)]  # 8 to 1,024 tokens
    args = mock_args(4, max_num_seqs=256, enable_prefix_caching=False)
    async with await AsyncLLM.from_args(args) as engine:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompts = [[draws.randrange(300) for _ in range(length)] for length in lengths]
        requests = [await engine.process(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        streams = [engine.submit(request, kind=RequestOutputKind.FINAL_ONLY) for request in requests]
        tokens = [0] * 4
        for state in engine._requests.outputs.unfinished():  # `AsyncLLM` has no public method for this
            tokens[state.engine] += len(state.request.prompt_token_ids)
        for stream in streams:
            async for _ in stream:
                pass
    ratio = max(tokens) * 4 / sum(tokens)
    emit(part="burst", prompt_tokens=tokens)
    return [("burst of 512: most loaded / mean", f"{ratio:.3f}", f"{BALANCE_GOAL}", verdict(ratio <= BALANCE_GOAL))]


@dataclass
class Chats:
    """Counts and times of all chats of one run."""

    hits: int = 0
    prompt_tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.first_tokens)


async def chats(rounds: int) -> list[Row]:
    """Measures hits and first tokens. The caches have room for 1.2 times all conversations."""
    os.environ["MOCK_STEP_SECONDS"] = str(CHAT_STEP_SECONDS)
    longest = FIRST_TOKENS + NUM_TURNS * (TURN_TOKENS + ANSWER_TOKENS)
    memory = int(1.2 * NUM_CHATS * longest) // BLOCK_SIZE * BLOCK_BYTES
    found: dict[str, list[Chats]] = {"one": [], "prefix": [], "load": []}
    for number in range(rounds):
        for name, runs in found.items():
            count = 1 if name == "one" else 4
            routing = "prefix" if name == "one" else name
            args = mock_args(
                count,
                data_parallel_routing=routing,
                kv_cache_memory_bytes=memory // count,
                max_num_batched_tokens=256,
                max_num_seqs=64,
                target_inter_token_latency="none",
                max_step_time="none",
            )
            async with await AsyncLLM.from_args(args) as engine:
                seen = Chats()
                draws = random.Random(number)
                await asyncio.gather(*(chat(engine, seen, random.Random(draws.random())) for _ in range(NUM_CHATS)))
            runs.append(seen)
            emit(part="chats", name=name, hits=seen.hits, of=seen.prompt_tokens, first_token_ms=seen.median_ms)
    hits = statistics.median(each.hits / one.hits for each, one in zip(found["prefix"], found["one"], strict=True))
    times = statistics.median(
        each.median_ms / other.median_ms for each, other in zip(found["prefix"], found["load"], strict=True)
    )
    return [
        ("chats: hit tokens, 4 replicas / one", f"{hits:.3f}", f"{HITS_GOAL}", verdict(hits >= HITS_GOAL)),
        (
            "chats: first token p50, prefix / load",
            f"{times:.2f}",
            f"{FIRST_TOKEN_GOAL}",
            verdict(times <= FIRST_TOKEN_GOAL),
        ),
    ]


async def chat(engine: AsyncLLM, seen: Chats, draws: random.Random) -> None:
    """One user, who waits up to 0.3 s before each turn."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=0.0)
    history = [draws.randrange(300) for _ in range(FIRST_TOKENS)]
    for _ in range(NUM_TURNS):
        await asyncio.sleep(draws.uniform(0.0, 0.3))
        history += [draws.randrange(300) for _ in range(TURN_TOKENS)]
        begin, is_first = time.perf_counter(), True
        outputs = engine.generate({"prompt_token_ids": list(history)}, params, kind=RequestOutputKind.DELTA)
        async for output in outputs:
            if is_first:
                is_first = False
                seen.first_tokens.append(time.perf_counter() - begin)
                seen.hits += output.num_cached_tokens
                seen.prompt_tokens += len(history)
            answer: Sequence[int] = output.outputs[0].token_ids
            history += answer


async def losses(rounds: int) -> list[Row]:
    params = SamplingParams(max_tokens=600, ignore_eos=True, temperature=0.0)
    silences, num_wrong = [], 0

    async def stream(engine: AsyncLLM) -> tuple[list[int], float]:
        """Returns the tokens and the longest silence."""
        tokens: list[int] = []
        longest, last = 0.0, time.perf_counter()
        async for output in engine.generate({"prompt_token_ids": [9, 8, 7]}, params, kind=RequestOutputKind.DELTA):
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            tokens += output.outputs[0].token_ids
        return tokens, longest

    async with await AsyncLLM.from_args(mock_args(2)) as engine:
        truth, _ = await stream(engine)
        for number in range(rounds):
            while engine.fault_status.state == "recovering":
                await asyncio.sleep(0.1)
            running = [asyncio.create_task(stream(engine)) for _ in range(8)]
            await asyncio.sleep(random.uniform(0.5, 1.5))
            keeper = engine._keepers[number % 2]
            assert isinstance(keeper, EngineKeeper) and keeper.process is not None
            os.kill(keeper.process.process.pid, signal.SIGKILL)
            found = await asyncio.gather(*running)
            num_wrong += sum(tokens != truth for tokens, _ in found)
            silences.append(max(silence for _, silence in found))
            emit(part="losses", longest_silence=silences[-1], recoveries=engine.fault_status.num_recoveries)
    silence = max(silences)
    return [
        ("killed: longest silence, s", f"{silence:.2f}", f"{SILENCE_GOAL}", verdict(silence <= SILENCE_GOAL)),
        (f"killed: wrong streams of {8 * rounds}", str(num_wrong), "0", verdict(num_wrong == 0)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", default=["http", "threads", "burst", "chats", "losses"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    allow_slow_steps()
    rows: list[Row] = []
    for part in options.parts:
        match part:
            case "http":
                rows += http(options.rounds)
            case "threads":
                rows += asyncio.run(threads(options.rounds))
            case "burst":
                rows += asyncio.run(burst())
            case "chats":
                rows += asyncio.run(chats(options.rounds))
            case "losses":
                rows += asyncio.run(losses(options.rounds))
            case _:
                parser.error(f"there is no part {part!r}")
    print_table(["", "found", "goal", ""], rows)


if __name__ == "__main__":
    main()
