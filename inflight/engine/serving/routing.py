"""`Router`: decides which replica of the engine gets a request.

A replica's score is its load (`Admission.load`) plus the work of the request: tokens of prompts that have to be computed, and
tokens that sequences are expected to draw. Of the replicas whose queue has room, the one with the smallest score gets the
request. All sequences of a request go to the same replica, because they share the prompt.

Tokens that are in a replica's prefix cache (`CachedIndex`) do not have to be computed, so they make the score smaller. Prompts
that were given to a replica count as cached there. So if a replica has too much to do, the first of several requests with the
same beginning pays for a second copy of it, and the others are divided.

If scores are equal, a hash of the prompt's first block and the replica's number decides (rendezvous hashing). So all front ends
send prompts with the same first block to the same replica. Without the names of blocks, the request's id is hashed instead.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.engine.request.processed import ProcessedRequest
from inflight.engine.serving.engine_client import EngineClient, EngineState
from inflight.errors import InvalidRequestError, OverloadedError
from inflight.kv_cache.block_hash import NAME_BYTES

# When replicas are compared, a token of a prompt counts as this many drawn tokens. The tokens of a prompt are computed
# together, which takes less time for each of them than a step for each (`python -m benchmarks.prefix_groups`).
COMPUTING = 0.5


@dataclass(slots=True)
class _Planned:
    """What an engine gets from those requests of this call of `place` that have an engine already."""

    num_sequences: int = 0
    num_tokens: int = 0
    work: int = 0
    names: set[bytes] = field(default_factory=set)  # `CachedIndex.entries` of their prompts


class Router:
    """
    Args:
        engines: the replicas. At least one of them must not have ended when a method is called.
        block_size: tokens of a KV block.
    """

    def __init__(self, engines: Sequence[EngineClient], block_size: int) -> None:
        self._engines = engines
        self._block_size = block_size

    def check(self, num_sequences: int, num_tokens: int) -> None:
        """Check that there is room for requests of this size. Each of several replicas needs room for an equal share of them.

        Raises: the same as `Admission.check`.
        """
        engines = self._usable()
        sequences = -(-num_sequences // len(engines))
        tokens = num_tokens // len(engines)
        refusals = [refusal for each in engines if (refusal := _refusal(each, sequences, tokens)) is not None]
        if len(refusals) == len(engines):
            if sequences < num_sequences:
                refusals[0].args = (f"for each of {len(engines)} replicas: {refusals[0]}",)
            raise refusals[0]

    def place(self, requests: Sequence[ProcessedRequest], rank: int | None = None) -> list[EngineClient]:
        """Returns the engine for each of these requests, which belong together. `rank`: the replica that the client has chosen.
        While it recovers, another one is returned.

        Raises:
            InvalidRequestError: there is no replica `rank`, or the requests are too many for the queues.
            OverloadedError: the queue of each replica is full.
        """
        wanted = [engine for engine in self._engines if rank in (None, engine.number)]
        if not wanted:
            first, last = self._engines[0].number, self._engines[-1].number
            raise InvalidRequestError(
                f"data_parallel_rank={rank} names no replica; this server has the replicas {first} to {last}: give one of "
                "these numbers in data_parallel_rank or X-Data-Parallel-Rank, or leave it out",
                "data_parallel_rank",
            )
        engines = [engine for engine in self._usable() if engine in wanted] or self._usable()
        if len(engines) == 1:
            num_sequences = sum(len(request.sequences) for request in requests)
            engines[0].admission.check(num_sequences, sum(len(request.prompt_token_ids) for request in requests))
            return engines * len(requests)
        planned = {engine.index: _Planned() for engine in engines}
        return [self._choose(engines, request, planned) for request in requests]

    def best(self, request: ProcessedRequest) -> EngineClient | None:
        """Returns the engine that goes on with a request whose engine was lost; None if no engine is connected."""
        return min(self._connected(), key=lambda engine: self._score(engine, request), default=None)

    def _connected(self) -> list[EngineClient]:
        """The engines that make steps; if there is none, those that are connected and recover."""
        connected = [engine for engine in self._engines if engine.is_connected]
        return [engine for engine in connected if engine.makes_steps] or connected

    def _usable(self) -> list[EngineClient]:
        """The engines that make steps. If there is none, those that recover: requests wait for them."""
        return self._connected() or [engine for engine in self._engines if engine.state is not EngineState.ENDED]

    def _choose(
        self, engines: Sequence[EngineClient], request: ProcessedRequest, planned: dict[int, _Planned]
    ) -> EngineClient:
        num_sequences = len(request.sequences)
        num_tokens = len(request.prompt_token_ids)
        open_engines, refusals = [], []
        for engine in engines:
            plan = planned[engine.index]
            refusal = _refusal(engine, plan.num_sequences + num_sequences, plan.num_tokens + num_tokens)
            if refusal is None:
                open_engines.append(engine)
            else:
                refusals.append(refusal)
        if not open_engines:  # an engine that only has too much to do may accept the request later
            raise min(refusals, key=lambda refusal: isinstance(refusal, InvalidRequestError))
        best = min(open_engines, key=lambda engine: self._score(engine, request, planned[engine.index]))
        plan = planned[best.index]
        plan.num_sequences += num_sequences
        plan.num_tokens += num_tokens
        plan.work += self.work(best, request, plan)
        plan.names.update(best.cached.entries(request.block_names))
        return best

    def work(
        self, engine: EngineClient, request: ProcessedRequest, plan: _Planned | None = None, *, computing: float = 1.0
    ) -> int:
        """Returns the work of a request at this engine: tokens of the prompt that are not in its prefix cache, times
        `computing`, and tokens that its sequences are expected to draw."""
        more = () if plan is None else plan.names
        num_cached = engine.cached.num_cached(request.block_names, more) * self._block_size
        return int(computing * (len(request.prompt_token_ids) - num_cached)) + engine.admission.lengths.work_of(request)

    def _score(
        self, engine: EngineClient, request: ProcessedRequest, plan: _Planned | None = None
    ) -> tuple[int, bytes]:
        planned = 0 if plan is None else plan.work
        score = engine.admission.load + planned + self.work(engine, request, plan, computing=COMPUTING)
        first = request.block_names[:NAME_BYTES] or request.request_id.encode()
        return score, hashlib.sha256(first + bytes([engine.index])).digest()


def _refusal(engine: EngineClient, num_sequences: int, num_tokens: int) -> OverloadedError | InvalidRequestError | None:
    try:
        engine.admission.check(num_sequences, num_tokens)
    except (OverloadedError, InvalidRequestError) as error:
        return error
    return None
