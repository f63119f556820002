"""`Replicas`: the engines of one front end, and which of them has which request.

Usually there is one engine. If it is lost, requests wait until another process takes its place. If there are several replicas,
the requests of a lost one go on at the others at once. But a request with which MAX_FAULTS engines in a row were lost may be
the cause. It waits until its engine is there again, and runs alone there (scheduler/quarantine.py), so it ends no other
replica. If this engine is not there again after the time of a recovery, the request goes to another one, and runs alone there.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from inflight.config.engine import EngineConfig
from inflight.engine.request.output_processor import Update
from inflight.engine.request.request_state import RequestState
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.client import Shares
from inflight.engine.serving.engine_client import GRACE_SECONDS, EngineClient, EngineListener, EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_lengths import OutputLengths
from inflight.engine.serving.routing import Router
from inflight.engine.serving.running_requests import RunningRequests
from inflight.errors import EngineDeadError, EngineError, EngineRecoveringError, InflightError, RequestTimeoutError
from inflight.interface.request import MAX_FAULTS, EngineCoreOutput, FinishReason
from inflight.interface.serving import AbortRequests, AddRequest, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus

logger = logging.getLogger(__name__)


class Replicas:
    """Used on the event loop.

    Attributes:
        engines: the replicas, in the order of their indices.
        router: chooses the engine of a new request.
    """

    def __init__(
        self,
        requests: RunningRequests,
        config: EngineConfig,
        make_engines: Callable[[EngineListener], Sequence[EngineClient]],
    ) -> None:
        """`make_engines` gets these `Replicas`, which listen to the engines, and returns the engines."""
        self.engines = make_engines(self)
        self.router = Router(self.engines, config.cache.block_size)
        self._requests = requests
        # engine -> its last cause and its counts of recoveries. The engine that recovered last is the last key, because
        # `fault_status` reads them in this order.
        self._recoveries: dict[EngineClient, tuple[str, dict[str, int]]] = {}
        self._limits = config.fault_tolerance
        self._has_begun = self._is_closing = False

    async def open(self) -> list[EngineReady]:
        """Connect to all engines, and wait until they have started. Of several engines, some may have been given up before
        this front end came; they are left out.

        Raises:
            InflightError: an engine could not start. Nothing is left open but the `EngineSockets`.
        """
        opening = [asyncio.create_task(_open(engine)) for engine in self.engines]
        try:
            ready = await asyncio.gather(*opening)
            if all(engine.state is EngineState.ENDED for engine in self.engines):
                raise EngineDeadError("the engine's process is gone, and it is not started again")
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in self.engines if each.state is not EngineState.STARTING))
            raise
        number = max(each.front_end for each in ready)  # all engines know this front end by the same number
        if number < 0:  # none is connected: use a number that no other front end has
            number = 2**31 + secrets.randbits(31)
        return [replace(each, front_end=number) for each in ready]

    def begin(self) -> None:
        """Serve requests. Before this call nobody is told what happens to the engines."""
        self._has_begun = True
        self._recoveries = {engine: _recoveries(engine.fault_status) for engine in self.engines}
        for engine in self.engines:
            if engine.state is EngineState.ENDED:  # it was given up before this front end started
                self._requests.observers.engine_ended(engine.number)
        self._requests.observers.faults_changed(self.fault_status)

    @property
    def fault_status(self) -> FaultStatus:
        return FaultStatus.of_replicas([engine.fault_status for engine in self._recoveries])

    # -- requests --------------------------------------------------------------------------------------------------

    def give(self, state: RequestState, engine: EngineClient) -> None:
        """Send what is left of a request to this engine. If the engine is lost, the request waits until one is connected."""
        request = state.request
        if state.engine >= 0:
            self.engines[state.engine].record_left()
            self.engines[state.engine].cached.forget(request.request_id)
        state.engine = engine.index
        state.given_time = time.monotonic()
        engine.record_begun()
        sequences = state.resumed_sequences()
        if engine.is_connected:
            engine.send(AddRequest(prompt_token_ids=request.prompt_array, sequences=sequences))
            state.was_sent = True
        work = self.router.work(engine, request)
        engine.admission.sent(len(sequences), len(request.prompt_token_ids), work)
        engine.cached.expect(request.request_id, request.block_names)

    def _take_back(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        engine = self.engines[state.engine]
        engine.admission.ended()
        engine.admission.shares.release(state.request.request_id)
        engine.cached.forget(state.request.request_id)
        for completion in state.completions:
            if completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                engine.admission.lengths.ended(completion.num_tokens)
        engine.record_left()

    def end(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        """End requests. Ids of unknown or ended requests are ignored."""
        self._settle(self._requests.outputs.abort(request_ids, reason))

    def fail(self, request_ids: Iterable[str], error: InflightError, reason: FinishReason = FinishReason.ERROR) -> None:
        """End requests with an error."""
        failed = list(request_ids)
        self._requests.fail(failed, error)
        self.end(failed, reason)

    def expire(self, request_id: str, timeout: float) -> None:
        """End a request that has not ended within its timeout."""
        text = f"the request did not end within its timeout of {timeout:g} s, so it was aborted"
        self.fail([request_id], RequestTimeoutError(text), FinishReason.ABORT)

    def _settle(self, update: Update) -> None:
        """Let the readers of the changed requests know, and the engines of those that have ended."""
        self._requests.publish(update)
        for state in update.changed:
            if state.finished:
                self._take_back(state)
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

    # -- `EngineListener` ----------------------------------------------------------------------------------------------

    def process(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._settle(self._requests.outputs.update(outputs))

    def outputs_arrived(self, engine: EngineClient, message: EngineOutputs) -> None:
        if message.stats is not None and self._has_begun:
            self._requests.observers.stats_changed(replace(message.stats, engine=engine.number))

    def faults_changed(self, engine: EngineClient, status: FaultStatus) -> None:
        if not self._has_begun:
            return
        if (recoveries := _recoveries(status)) != self._recoveries[engine]:
            del self._recoveries[engine]
            self._recoveries[engine] = recoveries
        self._requests.observers.faults_changed(self.fault_status)

    def engine_lost(self, engine: EngineClient, reason: str) -> None:
        if not self._has_begun:
            return
        text = "%s%s; its %d requests go on at other replicas, or wait until it has started again"
        logger.warning(text, self._prefix(engine), reason, engine.num_requests)
        lost = self._lost_requests(engine)
        if not self._limits.resume_requests_after_recovery:
            error = EngineRecoveringError("the engine was lost during this request; send the request again")
            self.fail([state.request.request_id for state in lost], error)
        self._resume()
        # requests that have waited for this engine alone
        asyncio.get_running_loop().call_later(self._limits.engine_recovery_timeout_sec + GRACE_SECONDS, self._resume)

    def engine_restored(self, engine: EngineClient) -> None:
        self._resume()

    def engine_ended(self, engine: EngineClient, reason: str) -> None:
        if not self._has_begun:
            return
        if all(each.state is EngineState.ENDED for each in self.engines):
            self._requests.record_death(reason, engine.summary)
            for each in self.engines:
                each.readiness.end(self._requests.end_error())
            self.fail(self._requests.outputs.request_ids(), self._requests.end_error())
            return
        if self._is_closing:
            return
        text = "%s%s; its %d requests go on at the other replicas"
        logger.error(text, self._prefix(engine), reason, engine.num_requests)
        self._requests.observers.engine_ended(engine.number)
        error = EngineDeadError(reason, summary=engine.summary)
        engine.readiness.end(error)
        lost = self._lost_requests(engine)
        if not self._limits.enabled:
            self.fail([state.request.request_id for state in lost], error)
        self._resume()

    # -- losses ----------------------------------------------------------------------------------------------------

    def _prefix(self, engine: EngineClient) -> str:
        """Returns the beginning of a line of the log, which names the replica if there are several."""
        return f"engine {engine.number}: " if len(self.engines) > 1 else ""

    def _lost_requests(self, engine: EngineClient) -> list[RequestState]:
        """Returns the requests that were at this engine, and counts the loss for each of them."""
        lost = [
            state for state in self._requests.outputs.unfinished() if state.was_sent and state.engine == engine.index
        ]
        for state in lost:
            state.was_sent = False
            state.given_time = time.monotonic()
            state.count_loss()
        return lost

    def _resume(self) -> None:
        """Send all requests that no engine has to connected engines, in the order of their arrival."""
        for state in self._requests.outputs.unfinished():
            if state.was_sent:
                continue
            own = self.engines[state.engine]
            may_be_cause = state.num_losses >= MAX_FAULTS and own.state is not EngineState.ENDED
            is_late = time.monotonic() > state.given_time + self._limits.engine_recovery_timeout_sec
            engine = own if may_be_cause and not is_late else self.router.best(state.request)
            if engine is not None and engine.is_connected:
                self.give(state, engine)

    async def close(self) -> None:
        """Close the connections. Then unfinished requests end with an error."""
        self._is_closing = True
        self._requests.close()
        await asyncio.gather(*(engine.close() for engine in self.engines))


def _recoveries(status: FaultStatus) -> tuple[str, dict[str, int]]:
    return status.last_cause, dict(status.num_recoveries)


def make_engines(
    config: EngineConfig, sockets: Sequence[EngineSockets], limits: QueueLimits | None, listener: EngineListener
) -> list[EngineClient]:
    """Returns a client for each engine that this front end uses; there is one of `sockets` for each."""
    lengths, shares = OutputLengths(), Shares()
    return [
        EngineClient(
            each,
            config.fault_tolerance,
            listener,
            index=index,
            number=number,
            is_remote=number not in config.parallel.replicas,
            limits=limits,
            lengths=lengths,
            shares=shares,
            max_num_seqs=config.scheduler.max_num_seqs,
            step_budget=config.execute_model_timeout_seconds,
        )
        for index, (number, each) in enumerate(zip(config.parallel.served, sockets, strict=True))
    ]


async def _open(engine: EngineClient) -> EngineReady:
    try:
        return await engine.open()
    except EngineDeadError:
        if engine.has_seen_process:
            raise
        return EngineReady(front_end=-1, num_kv_cache_tokens=0)
