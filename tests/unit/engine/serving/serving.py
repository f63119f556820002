"""Engines in a process of their own, for tests: with the embedded model, or with mock steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.shared.mock_executor import NAME
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.async_llm import AsyncLLM
from inflight.engine.serving.output_stream import OutputStream
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams

EMBEDDED = EngineArgs(seed=0, dtype="float32", num_threads=1, max_num_seqs=16, kv_cache_memory_bytes=2**24)


def mock_args(**changes: Any) -> EngineArgs:
    return EngineArgs(**{"distributed_executor_backend": NAME, "dtype": "float32", **changes})


@asynccontextmanager
async def mock_engine(changes: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[AsyncLLM]:
    """Its process is gone afterwards, and no thread or task of it is left."""
    engine = await AsyncLLM.from_args(mock_args(**(changes or {})), **options)
    try:
        yield engine
    finally:
        await engine.close()
        assert "ended" in engine._keepers[0].state or "killed" in engine._keepers[0].state
        assert asyncio.all_tasks() <= {asyncio.current_task()}


def stats_of(engine: AsyncLLM) -> Any:  # Any: a `SchedulerStats`, or None before the first report
    return engine._replicas.engines[0].admission._stats


def endless(max_tokens: int = 1500, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, **changes)


async def submit(
    engine: AsyncLLM,
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    *,
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    timeout: float | None = None,
) -> OutputStream:
    return engine.submit(await engine.process(request_id, prompt, params), kind=kind, timeout=timeout)


async def read(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


def tokens_of(outputs: Sequence[RequestOutput], index: int = 0) -> list[int]:
    return [token for output in outputs for c in output.outputs if c.index == index for token in c.token_ids]


def text_of(outputs: Sequence[RequestOutput], index: int = 0) -> str:
    return "".join(c.text for output in outputs for c in output.outputs if c.index == index)


def reasons_of(outputs: Sequence[RequestOutput]) -> list[str | None]:
    return [completion.finish_reason for completion in outputs[-1].outputs]
