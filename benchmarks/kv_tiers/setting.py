"""What all measurements share: sizes, engines, prompts, and the rows of the table."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.table import Spread
from benchmarks.shared.report import emit
from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.interface.statistics import TransferCounts
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams

BLOCK_SIZE = 16  # tokens
Tier = Mapping[str, Any]  # Any: as `secondary_tiers` takes it


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        values: one for each round. Empty: nothing was measured.
        bar: what the median must reach. None: the row is for information.
        is_most: whether the bar is the most that is allowed, and not the least.
        note: why nothing was measured, or what else is to be known.
    """

    what: str
    values: Sequence[float] = ()
    bar: float | None = None
    is_most: bool = True
    note: str = ""

    @property
    def is_reached(self) -> bool | None:
        """None if nothing was measured, or there is no bar."""
        if not self.values or self.bar is None:
            return None
        median = Spread.of(self.values).median
        return median <= self.bar if self.is_most else median >= self.bar

    def cells(self) -> list[str]:
        spread = Spread.of(self.values) if self.values else None
        measured = "" if spread is None else f"{spread.median:.3g}"
        between = "" if spread is None or len(self.values) == 1 else f"{spread.low:.3g}-{spread.high:.3g}"
        bar = "" if self.bar is None else f"{'<=' if self.is_most else '>='} {self.bar:g}"
        reached = {None: "", True: "yes", False: "NO"}[self.is_reached]
        return [self.what, measured, between, bar, reached, self.note]


@dataclass
class Setting:
    """
    Attributes:
        folder: for objects of the tier fs.
        num_differing: answers that differed from the computed ones, so far.
    """

    model: Path
    prompt_len: int
    rounds: int
    folder: Path
    num_threads: int | None
    num_differing: int = 0
    num_compared: int = 0
    _rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        config = resolve_config(EngineArgs(model=str(self.model))).model
        self._num_token_ids = min(3900, config.architecture.vocab_size)
        sizes = [each.num_kv_heads * each.head_dim for each in config.architecture.attentions]
        self.block_bytes = BLOCK_SIZE * 2 * sum(sizes) * (4 if config.dtype == "float32" else 2)

    def draw(self, count: int) -> list[int]:
        """A prompt that no engine has seen."""
        return [self._rng.randrange(3, self._num_token_ids) for _ in range(count)]

    def num_bytes(self, num_tokens: int) -> int:
        """The size of an arena or a host pool for so many tokens, with some blocks more."""
        return self.block_bytes * (num_tokens // BLOCK_SIZE + 24)

    @contextmanager
    def engine(
        self,
        arena_tokens: int,
        host_pool_tokens: int = 0,
        tiers: Sequence[Tier] = (),
        *,
        max_model_len: int,
        max_num_seqs: int = 8,
    ) -> Iterator[LLMEngine]:
        """An engine with an arena of this size; 0 `host_pool_tokens`: without a host pool."""
        args: dict[str, Any] = {}  # Any: values of EngineArgs
        if host_pool_tokens:
            args["kv_offloading_size"] = self.num_bytes(host_pool_tokens) / 2**30
            args["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"secondary_tiers": list(tiers)},
            }
        engine = LLMEngine.from_args(
            EngineArgs(
                model=str(self.model),
                block_size=BLOCK_SIZE,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=self.num_bytes(arena_tokens),
                skip_tokenizer_init=True,
                num_threads=self.num_threads,
                **args,
            )
        )
        with closing(engine):
            generate(engine, [self.draw(min(100, max_model_len - 2))], 2)  # what is made at first use
            drain(engine)
            yield engine

    def compare(self, truth: RequestOutput, output: RequestOutput) -> None:
        """Count whether two answers to the same prompt differ."""
        self.num_compared += 1
        self.num_differing += [each.token_ids for each in truth.outputs] != [each.token_ids for each in output.outputs]


def generate(engine: LLMEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[RequestOutput]]:
    """Run the prompts together. Returns the seconds until all have ended, and the answers."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found: dict[str, RequestOutput] = {}
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output
    return time.perf_counter() - start, [found[str(index)] for index in range(len(prompts))]


def first_token(engine: LLMEngine, prompt: Sequence[int]) -> tuple[float, RequestOutput]:
    """Seconds until the first token of a request that has the engine for itself."""
    seconds, (output,) = generate(engine, [prompt], 1)
    return seconds, output


def drain(engine: LLMEngine) -> TransferCounts:
    """Wait until no transfer runs. Returns what the transfers have done since `take_stats` was called last."""
    while engine.core.scheduler.transfers.is_running:
        engine.core.check_ranks()
        time.sleep(0.001)
    return engine.core.take_stats().transfers or TransferCounts()


def forget_arena(engine: LLMEngine) -> None:
    """Empty the prefix cache. The host pool and the tiers keep what they have."""
    engine.core.reset_prefix_cache()


def forget_near(engine: LLMEngine) -> None:
    """Empty the prefix cache and the host pool. The tiers keep what they have."""
    engine.core.scheduler.reset_prefix_cache(reset_host_pool=True)


def tell(case: str, **fields: Any) -> None:  # Any: JSON
    """One measurement as a JSON line."""
    emit(
        benchmark="kv_tiers",
        case=case,
        **{name: round(value, 5) if isinstance(value, float) else value for name, value in fields.items()},
    )
