"""How the router does with many replicas and many sessions: a simulation in one process, without engines.

    python -m benchmarks.routing_scale [--replicas 64] [--sessions 10000] [--turns 4]

The real router, with the real counts of load and indices of cached blocks, places each turn of each session, in random order. A
turn repeats the session so far, and adds tokens. The replicas are simulated: each computes the same number of tokens in a tick
and reports after each tick, and its prefix cache forgets the blocks that were not used for the longest time. The caches have
room for 1.2 times all sessions together.

Prints the time of a decision, the memory of an index, the tokens found in caches divided by those that one cache of all would
have, and the tokens that the replica with the most work has computed, divided by the mean.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.shared.report import print_table
from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.serving.admission import Admission, QueueLimits
from inflight.engine.serving.cached_index import ENTRY_BYTES, CachedIndex
from inflight.engine.serving.engine_client import EngineClient, EngineState
from inflight.engine.serving.routing import Router
from inflight.interface.serving import CachedBlocks
from inflight.interface.statistics import SchedulerStats
from inflight.kv_cache.block_hash import NAME_BYTES
from inflight.sampling_params import SamplingParams

BLOCK_SIZE, FIRST_TOKENS, TURN_TOKENS = 16, 608, 80
WAITING = 8  # requests for each replica that have not been computed, on average


@dataclass
class OneToken:
    """The fields of a sequence that the router reads. It has one token, because the simulation is about prompts."""

    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    emitted_token_ids: tuple[int, ...] = ()


@dataclass
class Prompt:
    """The fields of a `ProcessedRequest` that the router reads."""

    request_id: str
    block_names: bytes
    prompt_token_ids: range
    sequences: tuple[OneToken] = (OneToken(),)
    params: SamplingParams = field(default_factory=SamplingParams)


class Replica:
    """Stands in for an `EngineClient`, and for the engine behind it."""

    state, is_connected, makes_steps = EngineState.CONNECTED, True, True

    def __init__(self, index: int, num_blocks: int) -> None:
        self.index = self.number = index
        self.admission, self.cached = Admission(QueueLimits(), 256), CachedIndex()
        self.admission.lengths.mean = 1.0
        self.computed = self.num_found = 0
        self._num_blocks, self._num_received = num_blocks, 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._queue: deque[int] = deque()  # tokens to compute

    def take(self, prompt: Prompt) -> None:
        names = [prompt.block_names[i : i + NAME_BYTES] for i in range(0, len(prompt.block_names), NAME_BYTES)]
        num_cached = next((i for i, name in enumerate(names) if name not in self._blocks), len(names)) * BLOCK_SIZE
        tokens = len(prompt.prompt_token_ids) - num_cached
        self.admission.sent(1, len(prompt.prompt_token_ids), tokens + 1)
        self.num_found, self.computed = self.num_found + num_cached, self.computed + tokens
        self._num_received += 1
        self._queue.append(tokens)
        stored = [name for name in names if name not in self._blocks]
        for name in reversed(names):  # the first blocks of a prompt are forgotten last
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._num_blocks)]
        self.cached.apply(CachedBlocks(stored=_reported(stored), removed=_reported(removed), is_first=False))

    def tick(self, num_tokens: int) -> None:
        while self._queue and num_tokens > 0:
            done = min(self._queue[0], num_tokens)
            num_tokens, self._queue[0] = num_tokens - done, self._queue[0] - done
            if not self._queue[0]:
                self._queue.popleft()
        state: dict[str, Any] = {"num_running": 0, "num_waiting": len(self._queue)}
        stats = SchedulerStats(step_id=0, num_waiting_tokens=sum(self._queue), kv_cache_usage=0.0, **state)
        self.admission.reported(stats, self._num_received)


def _reported(names: Iterable[bytes]) -> bytes:
    """The names of blocks of full attention, as an engine reports them: each with the number of its kind of layers."""
    return b"".join(name + b"\0" for name in names)


def simulate(num_replicas: int, num_sessions: int, num_turns: int) -> list[tuple[str, str]]:
    draws = random.Random(1)
    longest = (FIRST_TOKENS + num_turns * TURN_TOKENS) // BLOCK_SIZE
    replicas = [Replica(i, int(1.2 * num_sessions * longest / num_replicas)) for i in range(num_replicas)]
    router = Router(cast("list[EngineClient]", replicas), BLOCK_SIZE)
    names = [draws.randbytes(longest * NAME_BYTES) for _ in range(num_sessions)]
    order = [session for session in range(num_sessions) for _ in range(num_turns)]
    draws.shuffle(order)
    lengths = [FIRST_TOKENS] * num_sessions
    seconds: list[float] = []
    could_be_found = waiting = 0
    for number, session in enumerate(order):
        length = lengths[session]
        could_be_found += 0 if length == FIRST_TOKENS else length - TURN_TOKENS
        prompt = Prompt(str(number), names[session][: length // BLOCK_SIZE * NAME_BYTES], range(length))
        begin = time.perf_counter()
        [engine] = router.place([cast("ProcessedRequest", prompt)])
        seconds.append(time.perf_counter() - begin)
        replicas[engine.index].take(prompt)
        lengths[session] = length + TURN_TOKENS
        waiting += 1
        if waiting == WAITING * num_replicas:
            waiting = 0
            computed = sum(each.computed for each in replicas) / (number + 1)
            for each in replicas:
                each.tick(int(WAITING * computed))
    work = [each.computed for each in replicas]
    sizes = [len(each.cached) * ENTRY_BYTES for each in replicas]
    return [
        ("time of a decision, p50 / p99, us", " / ".join(f"{1e6 * each:.0f}" for each in quantiles(seconds))),
        ("memory of an index, mean / most, MB", f"{statistics.mean(sizes) / 1e6:.2f} / {max(sizes) / 1e6:.2f}"),
        (
            "tokens found / tokens that one cache of all would have",
            f"{sum(each.num_found for each in replicas) / could_be_found:.3f}",
        ),
        ("computed tokens, most / mean", f"{max(work) / statistics.mean(work):.3f}"),
    ]


def quantiles(seconds: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49], cuts[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    print_table(["", "found"], simulate(options.replicas, options.sessions, options.turns))


if __name__ == "__main__":
    main()
