"""The messages between a front end and the process of the engine core. Each front end has a stream of its own.

the core's owner   -- StartEngine (on the control socket, see engine/process/engine_process.py) -->  core
core               -- EngineReady | EngineStartFailed -->  every front end
front end          -- AddRequest, AbortRequests, ResetPrefixCache; EndDamagedEngine, if a frame is damaged -->  core
core               -- EngineOutputs, PrefixCacheReset, FaultStatus; EngineDied, if the core has failed -->  front end
front end          -- Watch, EndRequests (engine_view.py) -->  core
core               -- EngineView, while the front end watches -->  front end
core               -- CachedBlocks, if `ParallelConfig.routes_by_prefix` -->  front end

When a front end's stream ends, the core ends all requests of this front end. When the control socket is closed, the core ends.
If the core's process dies, its owner starts another core. Each front end gets a stream to the new core, and sends its
unfinished requests again.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.config.engine import EngineConfig
from inflight.interface.engine_view import EndRequests, EngineView, Watch
from inflight.interface.messages import WorkerFailure
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, Int32Array
from inflight.interface.statistics import FaultStatus, SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    """The first frame on the control socket.

    Attributes:
        tokenizer: the folder or hub id of the tokenizer that grammars use. None means the model's own tokenizer.
        is_spare: the process waits until another engine core is lost. It and its ranks' processes import their libraries, but
            load no model before they are told to begin.
    """

    config: EngineConfig
    tokenizer: str | None
    skip_tokenizer_init: bool
    is_spare: bool = False


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
    """The n sequences of one request, in order. Each sequence has an id, and no other sequence ever gets the same id.

    A front end sends a request again if the engine core was lost. Then sequences that have ended are left out.
    """

    prompt_token_ids: Int32Array
    sequences: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequests:
    """End the sequences with these ids. Some of their outputs may still be on the way."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache:
    """Forget all cached prompts. The core answers with a `PrefixCacheReset` that has the same `call_id`.

    `with_connector`: also those outside of the KV cache, in host memory and tiers.
    """

    call_id: int
    with_connector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDamagedEngine:
    """The core has sent bytes that are not a valid message, as `reason` says. So the core's process must end at once: its
    memory may be damaged. Its owner starts another one."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    call_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutputs:
    """What steps have added to sequences of this front end, one entry for each sequence.

    Attributes:
        num_received: how many sequences the core had received from this front end when this message was made.
        stats: the engine's state; None if this message does not report it.
    """

    outputs: tuple[EngineCoreOutput, ...]
    num_received: int
    stats: SchedulerStats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedBlocks:
    """Names of blocks that have joined and left the core's prefix cache, one after another, 33 bytes each: the last byte is
    the number of a kind of layers. If `is_first`, the front end forgets the names that it knew before. `kinds`, in the first
    message of a stream: for each kind how many of the last blocks a token needs; 0: all blocks."""

    stored: bytes
    removed: bytes
    is_first: bool = False
    kinds: tuple[int, ...] = ()


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
    | EndDamagedEngine
    | PrefixCacheReset
    | EngineOutputs
    | CachedBlocks
    | Watch
    | EndRequests
    | EngineView
    | EngineDied
    | FaultStatus
)
