"""`Replicas`: the engines of one front end, and which of them has which request.

Usually there is one engine. If it is lost, requests wait until another process takes its place. If there are several replicas,
the requests of a lost one go on at the others at once. But a request with which MAX_FAULTS engines in a row were lost may be
the cause. It waits until its engine is there again, and runs alone there (scheduler/suspects.py), so it ends no other replica.
If this engine is not there again after the time of a recovery, the request goes to another one, and runs alone there.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from inflight.config.engine import EngineConfig
from inflight.engine.request.output_processor import OutputProcessor, Update
from inflight.engine.request.request_state import RequestState
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.engine_client import GRACE_SECONDS, EngineClient, EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_lengths import OutputLengths
from inflight.engine.serving.routing import Router
from inflight.errors import EngineDeadError, EngineError, EngineRecoveringError, InflightError
from inflight.interface.request import MAX_FAULTS, FinishReason
from inflight.interface.serving import AbortRequests, AddRequest, EngineReady
from inflight.interface.statistics import FaultStatus

logger = logging.getLogger(__name__)


class Replicas:
    """Used on the event loop.

    Attributes:
        engines: the replicas, in the order of their indices.
        router: chooses the engine of a new request.
        on_faults: called whenever `fault_status` changes.
        on_failed: called with the ids of requests that end because their engine was lost, and the reason.
        on_engine_end: called with the number of each engine that has ended, if others are left.
        on_end: called once, with the reason, when the last engine has ended. `summary` is the reason as clients may see it.
    """

    def __init__(self, engines: Sequence[EngineClient], outputs: OutputProcessor, config: EngineConfig) -> None:
        """`outputs` has the unfinished requests."""
        self.engines = engines
        self.router = Router(engines, config.cache.block_size)
        self.on_faults: Callable[[], None] = lambda: None
        self.on_failed: Callable[[Iterable[str], InflightError], None] = lambda _ids, _error: None
        self.on_engine_end: Callable[[int], None] = lambda _: None
        self.on_end: Callable[[str], None] = lambda _: None
        self.summary = ""
        self._outputs = outputs
        # engine -> its last cause and its counts of recoveries. The engine that recovered last is the last key, because
        # `fault_status` reads them in this order.
        self._recoveries = {engine: _recoveries(engine.fault_status) for engine in engines}
        self._limits = config.fault_tolerance
        self._is_closing = False
        for engine in engines:
            engine.on_lost, engine.on_restored = partial(self._note_loss, engine), self._resume
            engine.on_end, engine.on_faults = partial(self._note_end, engine), partial(self._note_faults, engine)

    @property
    def fault_status(self) -> FaultStatus:
        return FaultStatus.of_replicas([engine.fault_status for engine in self._recoveries])

    def _note_faults(self, engine: EngineClient, status: FaultStatus) -> None:
        if (recoveries := _recoveries(status)) != self._recoveries[engine]:
            del self._recoveries[engine]
            self._recoveries[engine] = recoveries
        self.on_faults()

    # -- requests --------------------------------------------------------------------------------------------------

    def give(self, state: RequestState, engine: EngineClient) -> None:
        """Send what is left of a request to this engine. If the engine is lost, the request waits until one is connected."""
        request = state.request
        if state.engine >= 0:
            self.engines[state.engine].note_left()
            self.engines[state.engine].cached.forget(request.request_id)
        state.engine, state.given_time = engine.index, time.monotonic()
        engine.note_begun()
        sequences = state.resumed_sequences()
        if engine.is_connected:
            engine.send(AddRequest(prompt_token_ids=request.prompt_array, sequences=sequences))
            state.was_sent = True
        work = self.router.work(engine, request)
        engine.admission.sent(len(sequences), len(request.prompt_token_ids), work)
        engine.cached.expect(request.request_id, request.block_names)

    def take_back(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        engine = self.engines[state.engine]
        engine.admission.ended()
        engine.cached.forget(state.request.request_id)
        for completion in state.completions:
            if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                engine.admission.lengths.ended(completion.num_tokens)
        engine.note_left()

    def abort(self, update: Update) -> None:
        """Let the engines abort the sequences that `update` names."""
        if update.requests_to_abort:
            message = AbortRequests(request_ids=tuple(update.requests_to_abort))
            for index in {state.engine for state in update.changed}:  # engines ignore ids that they do not have
                self.engines[index].send(message)

    async def reset_prefix_caches(self, *, reset_connector: bool) -> None:
        left = [engine for engine in self.engines if engine.state is not EngineState.ENDED]
        await asyncio.gather(*(engine.reset_prefix_cache(reset_connector=reset_connector) for engine in left))

    async def check_ready(self, start_canary: Callable[[EngineClient], str]) -> Mapping[int, EngineError | None]:
        """`start_canary`: see `ReadinessCheck.check`. `AsyncLLM.check_ready` describes the result.

        Raises:
            EngineError: no engine is ready.
        """
        checks = [self._why_not_ready(engine, start_canary) for engine in self.engines]
        found = await asyncio.gather(*checks)
        if found[0] is not None and None not in found:
            raise found[0]
        return {engine.number: error for engine, error in zip(self.engines, found, strict=True)}

    async def _why_not_ready(
        self, engine: EngineClient, start_canary: Callable[[EngineClient], str]
    ) -> EngineError | None:
        try:
            if engine.state is EngineState.ENDED:
                raise EngineDeadError("the engine's process is gone")
            if (status := engine.fault_status).state == "recovering":
                raise EngineRecoveringError(f"the engine recovers from a fault ({status.last_kind})")
            await engine.readiness.check(partial(start_canary, engine), engine.busy_since)
        except EngineError as error:
            return error
        return None

    # -- losses ----------------------------------------------------------------------------------------------------

    def _note_loss(self, engine: EngineClient, reason: str) -> None:
        """The engine's process is gone, and another one will be started."""
        text = "%s%s; its %d requests go on at other replicas, or wait until it has started again"
        logger.warning(text, self._prefix(engine), reason, engine.num_requests)
        lost = self._lost_requests(engine)
        if not self._limits.resume_requests_after_recovery:
            error = EngineRecoveringError("the engine was lost during this request; send the request again")
            self.on_failed([state.request.request_id for state in lost], error)
        self._resume()
        # requests that have waited for this engine alone
        asyncio.get_running_loop().call_later(self._limits.engine_recovery_timeout_sec + GRACE_SECONDS, self._resume)

    def _note_end(self, engine: EngineClient, reason: str) -> None:
        if all(each.state is EngineState.ENDED for each in self.engines):
            self.summary = engine.summary
            self.on_end(reason)
            return
        if self._is_closing:
            return
        text = "%s%s; its %d requests go on at the other replicas"
        logger.error(text, self._prefix(engine), reason, engine.num_requests)
        self.on_engine_end(engine.number)
        error = EngineDeadError(reason, summary=engine.summary)
        engine.readiness.end(error)
        lost = self._lost_requests(engine)
        if not self._limits.enabled:
            self.on_failed([state.request.request_id for state in lost], error)
        self._resume()

    def _prefix(self, engine: EngineClient) -> str:
        """Returns the beginning of a line of the log, which names the replica if there are several."""
        return f"engine {engine.number}: " if len(self.engines) > 1 else ""

    def _lost_requests(self, engine: EngineClient) -> list[RequestState]:
        """Returns the requests that were at this engine, and counts the loss for each of them."""
        lost = [state for state in self._outputs.unfinished() if state.was_sent and state.engine == engine.index]
        for state in lost:
            state.was_sent, state.given_time = False, time.monotonic()
            state.count_loss()
        return lost

    def _resume(self) -> None:
        """Send all requests that no engine has to connected engines, in the order of their arrival."""
        for state in self._outputs.unfinished():
            if state.was_sent:
                continue
            own = self.engines[state.engine]
            is_suspect = state.num_losses >= MAX_FAULTS and own.state is not EngineState.ENDED
            is_late = time.monotonic() > state.given_time + self._limits.engine_recovery_timeout_sec
            engine = own if is_suspect and not is_late else self.router.best(state.request)
            if engine is not None and engine.is_connected:
                self.give(state, engine)

    async def close(self) -> None:
        """Close the connections. Then `on_end` is called."""
        self._is_closing = True
        await asyncio.gather(*(engine.close() for engine in self.engines))


def _recoveries(status: FaultStatus) -> tuple[str, dict[str, int]]:
    return status.last_cause, dict(status.num_recoveries)


async def connect(
    config: EngineConfig, sockets: Sequence[EngineSockets], limits: QueueLimits | None
) -> tuple[list[EngineClient], list[EngineReady]]:
    """Connect to all engines, and wait until they have started. Of several engines, some may have been given up before this
    front end came; they are left out.

    Raises:
        InflightError: an engine could not start. Nothing is left open but `sockets`.
    """
    lengths = OutputLengths()
    engines = [
        EngineClient(
            each,
            config.fault_tolerance,
            index=index,
            number=number,
            is_remote=number not in config.parallel.replicas,
            limits=limits,
            lengths=lengths,
            max_num_seqs=config.scheduler.max_num_seqs,
            step_budget=config.execute_model_timeout_seconds,
        )
        for index, (number, each) in enumerate(zip(config.parallel.served, sockets, strict=True))
    ]
    opening = [asyncio.create_task(_open(engine)) for engine in engines]
    try:
        ready = await asyncio.gather(*opening)
        if all(engine.state is EngineState.ENDED for engine in engines):
            raise EngineDeadError("the engine's process is gone, and it is not started again")
    except BaseException:
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in engines if each.state is not EngineState.STARTING))
        raise
    number = max(each.front_end for each in ready)  # all engines know this front end by the same number
    if number < 0:  # none is connected: use a number that no other front end has
        number = 2**31 + secrets.randbits(31)
    return engines, [replace(each, front_end=number) for each in ready]


async def _open(engine: EngineClient) -> EngineReady:
    try:
        return await engine.open()
    except EngineDeadError:
        if engine.has_seen_process:
            raise
        return EngineReady(front_end=-1, num_kv_cache_tokens=0)
