"""The messages between a front end and the process of the engine core. Each front end has a stream of its own.

the core's starter   -- StartEngine (on the stream of the first front end) -->  core
core               -- EngineReady | EngineStartFailed -->  every front end
front end          -- AddRequest, AbortRequests, ResetPrefixCache -->  core
core               -- EngineOutputs, PrefixCacheReset; EngineDied, if it has failed -->  front end

When a front end's stream ends, the core ends all requests of this front end. When all streams have ended, the core ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.messages import WorkerFailure
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest
from inflight.interface.statistics import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """The first frame on the first front end's stream. `tokenizer` is the folder or hub id of the tokenizer that grammars use.
    None means the model's own tokenizer."""

    config: EngineConfig
    tokenizer: str | None
    skip_tokenizer_init: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The core accepts requests from now on. `front_end` is the number of the front end that gets this message."""

    front_end: int
    num_kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartFailed:
    """The engine could not start. Its process ends."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """One request, as its n sequences in order. An id of a sequence is never used twice."""

    children: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End the sequences with these ids. Some of their outputs may still be on the way."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Forget all cached prompts. The core answers with a `PrefixCacheReset` that has the same `call_id`."""

    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """What steps have added to sequences of this front end, one entry for each sequence. `stats` may be the engine's state.

    `num_received`: how many sequences the core had received from this front end when it made `stats`.
    """

    outputs: tuple[EngineCoreOutput, ...]
    num_received: int
    stats: SchedulerStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The core cannot continue. Its process ends. `summary` is the reason as clients may see it, or "" if it is not known."""

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
