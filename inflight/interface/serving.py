"""What a front end and the process of the engine core say to each other. Each front end has a stream of its own.

whoever starts it  -- StartEngine -->  core  -- EngineReady | EngineStartFailed -->  every front end
front end          -- AddRequest, AbortRequests, ResetPrefixCache -->  core
core               -- EngineOutputs, PrefixCacheReset -->  front end;   at the end of a core that has failed: EngineDied

The end of a front end's stream is the end of its requests; the end of all of them is the end of the core.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.messages import WorkerFailure
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.statistics import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """The first frame, on the first front end's stream. `tokenizer`: folder or hub id, for grammars; None: the model's own."""

    config: EngineConfig
    tokenizer: str | None
    skip_tokenizer_init: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """Requests may come. `front_end`: a number that is this front end's alone; its request ids begin with it."""

    front_end: int
    num_kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartFailed:
    """The engine could not start; its process ends."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One request: its n sequences, in the order of their index. Their ids are used once only."""

    children: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End sequences, by their ids. Outputs of theirs may still be on the way."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Forget the KV blocks of earlier prompts; answered by `PrefixCacheReset` with the same id."""

    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """What commits have added to sequences of this front end, one entry a sequence, and now and then the engine's state.

    `num_received` counts the sequences that have come from this front end so far: `stats` knows of no later one.
    """

    outputs: tuple[EngineCoreOutput, ...]
    num_received: int
    stats: SchedulerStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The core cannot go on; its process ends. `summary`: why, in words that a client may see; "" if not known."""

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
