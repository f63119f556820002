"""Steps while blocks are saved and loaded, against the same steps of an engine that has everything in its arena, in turns.

Streams decode, so that their new blocks are saved all the time. Now and then a request comes whose prompt was computed before:
with a host pool its blocks are loaded, and without one they are in the arena. Both ways run the same requests in the same
order.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from benchmarks.kv_tiers.setting import BLOCK_SIZE, Row, Setting, drain, forget_arena, generate, tell
from benchmarks.shared.mock_executor import MockTokensWorker
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.device.accelerator import SWITCH_SECONDS
from inflight.device.block_copies import BlockCopies
from inflight.engine.core.engine_core import EngineCore
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_connector.rank_transfers import RankTransfers
from inflight.sampling_params import SamplingParams

MOCK_STEP_SECONDS, MOCK_STREAMS, MOCK_TOKENS = 0.005, 256, 300
MOCK_BAR, REAL_BAR, REUSE_BAR = 1.05, 1.25, 0.98
NAME = "benchmarks.kv_tiers.steps:MockExecutor"
# Seconds in which a device copies a block of a 0.6B model (1,835,008 bytes) at 20 GB/s, without the processor.
DEVICE_BLOCK_SECONDS = 1_835_008 / 20e9


class MockCopies(BlockCopies):
    """Copies of a device: they only take about the time that a device needs, move no bytes, and leave the processor alone."""

    host_pool = np.zeros((0, 0), np.uint8)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        time.sleep(len(blocks) * DEVICE_BLOCK_SECONDS)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.save(blocks, slots)


class MockTransfersWorker(MockTokensWorker):
    """A worker with a host pool that has no memory: only the numbers of its slots exist."""

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._transfers = RankTransfers(MockCopies(), None)

    def kv_transfer(self, action: str, *args: Any) -> Future[Any]:  # Any: each action has its own arguments and result
        future: Future[Any] = getattr(self._transfers, action)(*args, *((None,) if action == "load" else ()))
        return future

    def shutdown(self) -> None:
        self._transfers.close()


class MockExecutor(UniProcExecutor):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, MockTransfersWorker)


class _Load:
    """
    Args:
        returning_len: tokens of a prompt that comes again.
        period: how many steps pass between two of them.
    """

    def __init__(self, setting: Setting, num_streams: int, num_tokens: int, returning_len: int, period: int) -> None:
        self._streams = [setting.draw(2 * BLOCK_SIZE + index % BLOCK_SIZE) for index in range(num_streams)]
        self._returning = [setting.draw(returning_len) for _ in range(num_tokens // period)]
        self._num_tokens, self._period = num_tokens, period
        self.arena_tokens = num_streams * (4 * BLOCK_SIZE + num_tokens) + 2 * len(self._returning) * returning_len

    def run(self, engine: LLMEngine, *, has_host_pool: bool) -> float:
        """Seconds a step, from the first step in which all streams run to the first end of a stream."""
        core = engine.core
        core.reset_prefix_cache(reset_connector=has_host_pool)
        for prompt in self._returning:
            generate(engine, [prompt], 1)
        drain(engine)
        if has_host_pool:
            forget_arena(engine)
        for index, prompt in enumerate(self._streams):
            _add(core, f"stream {index}", prompt, self._num_tokens)
        while core.scheduler.num_waiting:
            core.step()
        drain(engine)
        left, steps, start = list(self._returning), 0, time.perf_counter()
        while True:
            if steps % self._period == 0 and left:
                _add(core, f"returning {len(left)}", left.pop(), 1)
            outputs = core.step()
            steps += bool(outputs)
            if any(output.finish_reason and output.request_id.startswith("stream") for output in outputs):
                break
        seconds = time.perf_counter() - start
        while core.has_unfinished_requests():
            core.step()
        counts = drain(engine)
        tell(
            "steps", streams=len(self._streams), host_pool=has_host_pool, ms_a_step=1e3 * seconds / steps, steps=steps,
            returned=len(self._returning) - len(left), loaded_blocks=counts.num_loaded_blocks,
            saved_blocks=counts.num_saved_blocks, skipped_saves=counts.num_skipped_saves, late=counts.num_late,
        )  # fmt: skip
        return seconds / steps


def _add(core: EngineCore, name: str, prompt: list[int], num_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=num_tokens)
    core.add_request(EngineCoreRequest(request_id=name, sampling=sampling), np.array(prompt, np.int32))


def rows(setting: Setting, *, is_quick: bool) -> list[Row]:
    return [_mock(setting, is_quick), _real(setting, is_quick), *_no_reuse(setting, is_quick)]


def _compare(setting: Setting, what: str, bar: float, load: _Load, engines: Sequence[LLMEngine]) -> Row:
    ratios = []
    for index in range(setting.rounds + 1):
        sides = (False, True) if index % 2 else (True, False)
        seconds = {
            has_host_pool: load.run(engines[has_host_pool], has_host_pool=has_host_pool) for has_host_pool in sides
        }
        if index:
            ratios.append(seconds[True] / seconds[False])
    return Row(what, ratios, bar)


def _mock(setting: Setting, is_quick: bool) -> Row:
    load = _Load(setting, MOCK_STREAMS, 60 if is_quick else MOCK_TOKENS, 480, 8)
    with mock_engine(setting, 0) as plain, mock_engine(setting, 2**24) as host_pool:
        what = (
            f"step while blocks are saved and loaded / without a host pool, {MOCK_STREAMS} streams, mock device of 5 ms"
        )
        return _compare(setting, what, MOCK_BAR, load, (plain, host_pool))


@contextmanager
def mock_engine(
    setting: Setting, host_pool_bytes: int, **more: Any
) -> Iterator[LLMEngine]:  # Any: values of EngineArgs
    """An engine with a mock device. 0 `host_pool_bytes`: without a host pool. Meanwhile Python switches threads as with a
    GPU."""
    os.environ["MOCK_STEP_SECONDS"] = str(MOCK_STEP_SECONDS)
    args: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": MOCK_STREAMS + 8, **more}
    engine_args = EngineArgs(
        model=str(setting.model),
        distributed_executor_backend=NAME,
        block_size=BLOCK_SIZE,
        skip_tokenizer_init=True,
        kv_offloading_size=host_pool_bytes / 2**30 if host_pool_bytes else None,
        **args,
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with closing(LLMEngine.from_args(engine_args)) as engine:
            yield engine
    finally:
        sys.setswitchinterval(before)


def _real(setting: Setting, is_quick: bool) -> Row:
    load = _Load(setting, 8, 24 if is_quick else 96, 256, 8)
    tokens = load.arena_tokens
    with (
        setting.engine(tokens, max_model_len=1024, max_num_seqs=16) as plain,
        setting.engine(tokens, tokens, max_model_len=1024, max_num_seqs=16) as host_pool,
    ):
        what = "step while blocks are saved and loaded / without a host pool, 8 streams"
        return _compare(setting, what, REAL_BAR, load, (plain, host_pool))


def _no_reuse(setting: Setting, is_quick: bool) -> list[Row]:
    count, length, num_tokens = (4, 64, 8) if is_quick else (8, 256, 32)
    tokens = 4 * count * (length + num_tokens)
    tier = {"type": "fs", "path": str(setting.folder / "unused"), "timeout_seconds": 10}
    found = []
    with setting.engine(tokens, max_model_len=1024) as plain:
        for name, tiers in (("host pool", []), ("host pool and fs", [tier])):
            with setting.engine(tokens, tokens, tiers, max_model_len=1024) as other:

                def speed(engine: LLMEngine, prompts: list[list[int]]) -> float:
                    """Tokens per second, to the end of the last save and store."""
                    start = time.perf_counter()
                    generate(engine, prompts, num_tokens)
                    drain(engine)
                    return count * (length + num_tokens) / (time.perf_counter() - start)

                ratios = _ratios(
                    setting, name, lambda: [setting.draw(length) for _ in range(count)], plain, other, speed
                )
                found.append(Row(f"tokens per second without reuse, {name} / off", ratios, REUSE_BAR, False))
    return found


def _ratios(
    setting: Setting,
    name: str,
    draw: Callable[[], list[list[int]]],
    plain: LLMEngine,
    other: LLMEngine,
    speed: Callable[[LLMEngine, list[list[int]]], float],
) -> list[float]:
    ratios = []
    for index in range(setting.rounds + 1):
        prompts, speeds = draw(), {}
        for engine in (plain, other) if index % 2 else (other, plain):
            speeds[engine] = speed(engine, prompts)
        if index:
            tell("no reuse", with_=name, tokens_per_s=speeds[other], off_tokens_per_s=speeds[plain])
            ratios.append(speeds[other] / speeds[plain])
    return ratios
