"""`MockExecutor`: steps of a fixed time that need no processor, no model and no torch, to load what stands before the engine.

    AsyncLLM.from_args(EngineArgs(distributed_executor_backend="benchmarks.shared.mock_executor:MockExecutor"))

Tokens are a function of the prompt and the position, ordinary printable ones of the model's own tokenizer: `mock_tokens` says
which. The time of a step is MOCK_STEP_SECONDS of the environment, 5 ms by default. A request that draws under a grammar, or
wants log-probabilities, fails its step. If MOCK_STEP_LOG names a file, it says of each step when it began and how many rows
it had: see `StepLog`.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.shared.precise_sleep import PreciseSleep
from inflight.config.engine import EngineConfig
from inflight.config.ranks import Place
from inflight.executor.uniproc import UniProcExecutor
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.sample.seeds import mix64
from inflight.tokenizer.source import read_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer

STEP_SECONDS = 0.005
CACHE_BYTES = 2**22  # of addresses: nothing is stored
MAX_TOKENS = 512  # different ones
NAME = "benchmarks.shared.mock_executor:MockExecutor"

Int32Array = npt.NDArray[np.int32]


class MockExecutor(UniProcExecutor):
    """One rank, a thread of the engine's process, with a `MockTokensWorker`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, MockTokensWorker)


class MockTokensWorker(WorkerBase):
    """Keeps of each slot where its request's tokens come from, and nothing else."""

    def __init__(self, config: EngineConfig, place: Place, rendezvous: Rendezvous | None) -> None:
        self._config = config
        self._keys = np.zeros(config.scheduler.max_num_seqs, dtype=np.uint64)  # by slot
        self._seconds = float(os.environ.get("MOCK_STEP_SECONDS", STEP_SECONDS))
        self._sleep = PreciseSleep()
        self._log = StepLog(Path(os.environ["MOCK_STEP_LOG"])) if "MOCK_STEP_LOG" in os.environ else None

    def load_model(self) -> None:
        self._tokens = printable_tokens(read_tokenizer(self._config.model.folder, None))

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        block_size = self._config.cache.block_size
        return {"layers.0": KVCacheSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype="float32", itemsize=4)}

    def determine_available_memory(self) -> int:
        return CACHE_BYTES

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """There is no cache."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        start = time.perf_counter()
        plan, end = scheduler_output, start + self._seconds
        if self._log is not None:
            self._log.add(start, len(plan.slots))
        if len(plan.grammar_rows):
            raise NotImplementedError("the mock executor draws no tokens under a grammar")
        for new in plan.new_requests:
            if new.sampling.params.logprobs is not None or new.parts:
                raise NotImplementedError("the mock executor has neither log-probabilities nor results of parts")
            self._keys[new.slot] = prompt_key(new.token_ids[: new.num_prompt_tokens])
        positions = (plan.num_computed_tokens + plan.num_scheduled_tokens)[plan.samples]
        drawn = _draw(self._tokens, self._keys[plan.slots[plan.samples]], positions)
        self._sleep.until(end)
        return ModelRunnerOutput(step_id=plan.step_id, sampled_token_ids=drawn)

    def execute_dummy_batch(self) -> None:
        self._sleep.until(time.perf_counter() + self._seconds)


class StepLog:
    """Rows of (start of a step, its rows) in a file that another process reads meanwhile: both see `time.perf_counter()`."""

    MAX_STEPS = 2**18

    def __init__(self, path: Path) -> None:
        """Empties the file."""
        self._entries = np.memmap(path, dtype=np.float64, mode="w+", shape=(self.MAX_STEPS, 2))
        self._count = 0

    def add(self, start: float, num_rows: int) -> None:
        if self._count < self.MAX_STEPS:
            self._entries[self._count] = (start, num_rows)
            self._count += 1

    @staticmethod
    def last(path: Path) -> float:
        """When the newest step began; 0.0 before the first."""
        entries = np.memmap(path, dtype=np.float64, mode="r", shape=(StepLog.MAX_STEPS, 2))
        return float(entries[:, 0].max())

    @staticmethod
    def periods(path: Path, num_rows: int, begin: float, end: float) -> npt.NDArray[np.float64]:
        """Seconds from each step in [begin, end) to the next one, where both had `num_rows`."""
        entries = np.memmap(path, dtype=np.float64, mode="r", shape=(StepLog.MAX_STEPS, 2))
        starts, rows = entries[:, 0], entries[:, 1]
        is_full = (rows == num_rows) & (starts >= begin) & (starts < end)
        periods: npt.NDArray[np.float64] = np.diff(starts)[is_full[:-1] & is_full[1:]]
        return periods


def printable_tokens(tokenizer: Tokenizer) -> Int32Array:
    """Some ordinary tokens whose text is printable ASCII, whole by itself."""
    found: list[int] = []
    for token_id in range(tokenizer.vocab_size):
        text = "" if token_id in tokenizer.all_special_ids else tokenizer.decode_token(token_id)
        if text and text.isascii() and text.isprintable():
            found.append(token_id)
        if len(found) == MAX_TOKENS:
            break
    return np.array(found, dtype=np.int32)


def mock_tokens(tokenizer: Tokenizer, prompt_token_ids: list[int], count: int) -> list[int]:
    """The first `count` tokens that a request with this prompt gets."""
    prompt = np.array(prompt_token_ids, dtype=np.int32)
    positions = len(prompt) + np.arange(count, dtype=np.int32)
    keys = np.full(count, prompt_key(prompt), dtype=np.uint64)
    tokens: list[int] = _draw(printable_tokens(tokenizer), keys, positions).tolist()
    return tokens


def prompt_key(prompt_token_ids: Int32Array) -> int:
    return zlib.crc32(prompt_token_ids.tobytes())


def _draw(tokens: Int32Array, keys: npt.NDArray[np.uint64], positions: Int32Array) -> Int32Array:
    words = mix64(mix64(keys) + positions.astype(np.uint64))
    drawn: Int32Array = tokens[(words % np.uint64(len(tokens))).astype(np.int64)]
    return drawn
