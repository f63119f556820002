"""The messages between a front end and the process of the engine core. Each front end has a stream of its own.

whoever starts it  -- StartEngine -->  core  -- EngineReady | EngineStartFailed -->  every front end
front end          -- AddRequest, AbortRequests, ResetPrefixCache -->  core
core               -- EngineOutputs, PrefixCacheReset -->  front end;   if the core has failed: EngineDied

When a front end's stream ends, the core ends its requests. When the streams of all front ends have ended, the core ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.messages import WorkerFailure
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.statistics import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """The first frame on the first front end's stream. `tokenizer`: folder or hub id, for grammars; None for the model's
    own."""

    config: EngineConfig
    tokenizer: str | None
    skip_tokenizer_init: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The core takes requests. `front_end`: the number of this front end, with which its request ids begin."""

    front_end: int
    num_kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartFailed:
    """The engine could not start; its process ends."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One request: its n sequences, in the order of their index. An id is never used twice."""

    children: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End the sequences with these ids. Some of their outputs may still be on the way."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Forget the KV blocks of earlier prompts. The core answers with a `PrefixCacheReset` of the same id."""

    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """What commits have added to sequences of this front end, one entry per sequence, and sometimes the engine's state.

    `num_received` counts the sequences that the core had received from this front end when it took `stats`.
    """

    outputs: tuple[EngineCoreOutput, ...]
    num_received: int
    stats: SchedulerStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The core cannot go on; its process ends. `summary`: the reason as a client may see it; "" if not known."""

    reason: str
    summary: str = ""


ServingMessage = (
    StartEngine
    | EngineReady
    | EngineStartFailed
    | AddRequest
    | AbortRequests
    | ResetPrefixCache
    | PrefixCacheReset
    | EngineOutputs
    | EngineDied
)
