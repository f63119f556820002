"""`AsyncLLM`: serves many requests at once on an event loop. The engine runs in its own process. The server uses this class.

    process()  renders and tokenises in threads                  |  engine core's process
    submit()   -- AddRequest -->  ........................socket.|.......................  scheduler, executor, compute
    OutputStream  <-- detokenizer <-- slices of the event loop <-|-- EngineOutputs --

Everything except `process` runs on the event loop. The engine's outputs are processed in short slices (see `Backlog`).

If the engine's process dies or hangs, it is started again (`EngineKeeper`). Meanwhile requests wait, and new requests are
accepted. Then all unfinished requests are sent to the new process, with the tokens that they have emitted, and go on.

With `data_parallel_size` there are several replicas of the engine (`Replicas`). `Router` divides the requests among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self, Unpack

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.process.remote_replica import Keeper, make_keepers
from inflight.engine.request.input_processor import InputProcessor, ProcessedRequest, RequestOptions
from inflight.engine.request.model_info import ModelInfo, make_input_processor
from inflight.engine.request.output_processor import OutputProcessor, Update
from inflight.engine.request.prompt import Prompt
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.admission import Drain, QueueLimits
from inflight.engine.serving.engine_client import EngineClient, EngineState
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_stream import OutputStream
from inflight.engine.serving.replicas import Replicas, connect
from inflight.engine.serving.texts import Texts
from inflight.engine.start.model_files import resolve_config
from inflight.errors import EngineClosedError, EngineDeadError, EngineError, InflightError, RequestTimeoutError
from inflight.interface.request import FinishReason
from inflight.interface.serving import AddRequest, EngineOutputs, EngineReady
from inflight.interface.statistics import FaultStatus
from inflight.metrics.observer import EngineObserver, Observers
from inflight.outputs import RequestOutput
from inflight.sample.seeds import front_end_seed
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM(Texts):
    """Make an engine with `from_args` or `attach`. End it with `close`, or use `async with`. All calls must be made on one
    event loop.

        async with await AsyncLLM.from_args(EngineArgs(model="path/to/model")) as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text)

    Attributes:
        model: the model that is served.
        num_kv_cache_tokens: how many tokens fit into the KV cache of each replica.
    """

    def __init__(
        self,
        input_processor: InputProcessor,
        engines: Sequence[EngineClient],
        ready: Sequence[EngineReady],
        *,
        seed: int = 0,
        observers: Sequence[EngineObserver] = (),
    ) -> None:
        super().__init__(input_processor, seed)
        config = input_processor.config
        self.num_kv_cache_tokens = [each.num_kv_cache_tokens for each in ready]
        self.reasoning = config.reasoning
        self.model = ModelInfo.of(config, sum(self.num_kv_cache_tokens))
        self._id_prefix = f"{ready[0].front_end}."
        self._observers = Observers(observers)
        self._keepers: list[Keeper] = []  # one for each engine; none if another process started the engines
        self._outputs = OutputProcessor(input_processor.tokenizer, observers)
        self._replicas = Replicas(engines, self._outputs, config)
        self._replicas.on_failed, self._replicas.on_end = self._fail, self._note_end
        self._replicas.on_faults = lambda: self._observers.faults_changed(self.fault_status)
        self._replicas.on_engine_end = lambda index: self._observers.engine_ended(index)
        self._streams: dict[str, OutputStream] = {}
        self._serials = itertools.count()
        self._drain = Drain()
        self._death = ""  # why the last engine has died; "" while one lives
        self._closing: asyncio.Task[None] | None = None
        for engine in engines:
            engine.process = lambda outputs: self._publish(self._outputs.update(outputs))
            engine.on_outputs = partial(self._note_stats, engine)
            if engine.state is EngineState.ENDED:  # it was given up before this front end started
                self._observers.engine_ended(engine.number)
        self._observers.faults_changed(self.fault_status)

    # -- start -----------------------------------------------------------------------------------------------------

    @classmethod
    async def from_args(
        cls, args: EngineArgs, *, limits: QueueLimits | None = None, observers: Sequence[EngineObserver] = ()
    ) -> AsyncLLM:
        """Start the engine's process. It loads the model while this process reads the tokenizer.

        Raises:
            ConfigError: the arguments are wrong, or do not fit the model or the machine. No process is left running.
            EngineError: the engine could not start for another reason.
        """
        begin = time.perf_counter()
        config = await asyncio.to_thread(resolve_config, args)
        logger.debug("the configuration was resolved in %.2f s", time.perf_counter() - begin)
        keepers = await make_keepers(args, config)
        sockets = [EngineSockets() for _ in keepers]
        try:
            for keeper, each in zip(keepers, sockets, strict=True):
                keeper.add(each)
                keeper.start()
            engine = await cls._connect(args, config, sockets, limits, observers)
        except BaseException:
            for each in sockets:
                each.close()
            await asyncio.gather(*(keeper.close() for keeper in keepers))
            raise
        engine._keepers = keepers
        logger.debug("%s is ready after %.2f s", config.model.name, time.perf_counter() - begin)
        return engine

    @classmethod
    async def attach(
        cls,
        args: EngineArgs,
        *sockets: EngineSockets,
        limits: QueueLimits | None = None,
        observers: Sequence[EngineObserver] = (),
    ) -> AsyncLLM:
        """Make another front end of an engine that another process has started with the same `args` (see `EngineKeeper`).
        There is one of `sockets` for each replica. It has a socket to the replica's present process, and gets one to each later
        process.

        Raises: the same as `from_args`.
        """
        config = await asyncio.to_thread(resolve_config, args)
        return await cls._connect(args, config, sockets, limits, observers)

    @classmethod
    async def _connect(
        cls,
        args: EngineArgs,
        config: EngineConfig,
        sockets: Sequence[EngineSockets],
        limits: QueueLimits | None,
        observers: Sequence[EngineObserver],
    ) -> AsyncLLM:
        try:
            begin = time.perf_counter()
            input_processor = await asyncio.to_thread(make_input_processor, args, config)
            logger.debug("the tokenizer was read in %.2f s", time.perf_counter() - begin)
            engines, ready = await connect(config, sockets, limits)
        except BaseException:
            for each in sockets:
                each.close()
            raise
        seed = front_end_seed(args.seed, ready[0].front_end)
        return cls(input_processor, engines, ready, seed=seed, observers=observers)

    # -- requests --------------------------------------------------------------------------------------------------

    def check_admission(self, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """Check that a request of this size would be accepted now. Call it, for example, before the prompt is tokenised.

        Raises:
            InvalidRequestError: the request has more sequences than can ever be accepted together.
            OverloadedError: the queue is full.
            EngineClosedError: the engine was closed, or `drain` was called.
            EngineDeadError: the engine's process is gone.
        """
        self._check_open()
        self._drain.check_new()
        self._replicas.router.check(num_sequences, num_tokens)

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """A context in which a request is prepared (for example tokenised) and submitted. `drain` waits until the context ends.

        Raises: the same as `check_admission`.
        """
        self.check_admission()
        with self._drain.accepted():
            yield

    def submit(
        self,
        request: ProcessedRequest,
        *,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        timeout: float | None = None,
    ) -> OutputStream:
        """Start a request that `process` returned. If it has not ended `timeout` seconds after its arrival, it is aborted.

        Raises: the same as `submit_all`.
        """
        return self.submit_all([request], kind=kind, timeout=timeout)[0]

    def submit_all(
        self,
        requests: Sequence[ProcessedRequest],
        *,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        timeout: float | None = None,
        data_parallel_rank: int | None = None,
    ) -> list[OutputStream]:
        """Like `submit`, for requests that belong together: either all are started, or none is. `data_parallel_rank`: the
        replica that gets them. While it recovers, another one gets them.

        Raises:
            InvalidRequestError: a request with one of these ids still runs, two of these requests have the same id, there is no
                such replica, or `check_admission` raises it.
            OverloadedError, EngineClosedError, EngineDeadError: as in `check_admission`. But if a request was `accepted` before
                `drain` was called, it may still be submitted.
        """
        self._check_open()
        self._drain.check_submit()
        engines = self._replicas.router.place(requests, data_parallel_rank)
        self._outputs.check_ids([request.request_id for request in requests])
        return [self._start(request, each, kind, timeout) for request, each in zip(requests, engines, strict=True)]

    def _start(
        self, request: ProcessedRequest, engine: EngineClient, kind: RequestOutputKind, timeout: float | None
    ) -> OutputStream:
        request = self._with_own_ids(request)
        state = self._outputs.add_request(request, kind)
        stream = OutputStream(state, partial(self._end, [request.request_id], FinishReason.ABORT))
        self._streams[request.request_id] = stream
        self._drain.note_running(len(self._streams))
        self._replicas.give(state, engine)
        if timeout is not None:
            left = max(request.arrival_time + timeout - time.monotonic(), 0.0)
            stream.timer = asyncio.get_running_loop().call_later(left, self._expire, request.request_id, timeout)
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        timeout: float | None = None,
        data_parallel_rank: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Call `process` and `submit`, and yield the outputs. If the caller closes the generator, the request is aborted."""
        with self.accepted():
            request_id = f"request-{next(self._serials)}" if request_id is None else request_id
            request = await self.process(request_id, prompt, params, **options)
            [stream] = self.submit_all([request], kind=kind, timeout=timeout, data_parallel_rank=data_parallel_rank)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request. Ids of unknown or ended requests are ignored."""
        self._end([request_id], FinishReason.ABORT)

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget all cached prompts. With `reset_connector` also those outside of the KV cache, in host memory and tiers."""
        self._check_open()
        await self._replicas.reset_prefix_caches(reset_connector=reset_connector)

    def _with_own_ids(self, request: ProcessedRequest) -> ProcessedRequest:
        """Returns the request with ids that the core has never received. So this front end cannot mistake late outputs of an
        earlier request with the same id, or outputs for other front ends, for outputs of this request."""
        prefix = f"{self._id_prefix}{next(self._serials)}."
        sequences = [
            replace(
                sequence,
                request_id=prefix + sequence.request_id,
                prompt_leader=None if sequence.prompt_leader is None else prefix + sequence.prompt_leader,
            )
            for sequence in request.sequences
        ]
        return replace(request, sequences=tuple(sequences))

    def _end(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        self._publish(self._outputs.abort(request_ids, reason))

    def _expire(self, request_id: str, timeout: float) -> None:
        error = RequestTimeoutError(f"the request did not end within its timeout of {timeout:g} s, so it was aborted")
        self._streams[request_id].fail(error)
        self._end([request_id], FinishReason.ABORT)

    # -- outputs ---------------------------------------------------------------------------------------------------

    def _note_stats(self, engine: EngineClient, message: EngineOutputs) -> None:
        if message.stats is not None:
            self._observers.stats_changed(replace(message.stats, engine=engine.number))

    def _publish(self, update: Update) -> None:
        for state in update.changed:
            stream = self._streams[state.request.request_id]
            if state.has_output:
                stream.notify()
            if state.finished:
                del self._streams[state.request.request_id]
                if stream.timer is not None:
                    stream.timer.cancel()
                self._replicas.take_back(state)
        self._drain.note_running(len(self._streams))
        self._replicas.abort(update)

    # -- health and end --------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._drain.has_begun

    async def check_health(self) -> None:
        """
        Raises:
            EngineClosedError: the engine was closed.
            EngineDeadError: the engine's process is gone; of several replicas, all are gone.
        """
        self._check_open()

    async def check_ready(self) -> Mapping[int, EngineError | None]:
        """Check that the engine makes steps. If it is idle and the last step was more than 10 seconds ago, it must
        generate one token for this check.

        Returns:
            the number of each replica -> why it is not ready; None if it is ready. At least one is.

        Raises:
            EngineError: the engine makes no steps, recovers from a fault, or `check_health` raises an error.
        """
        self._check_open()
        return await self._replicas.check_ready(self._start_canary)

    def _start_canary(self, engine: EngineClient) -> str:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        canary = self._with_own_ids(self.input_processor.process("canary", [0], params, default_seed=0))
        engine.send(AddRequest(prompt_token_ids=canary.prompt_array, sequences=canary.sequences))
        engine.admission.sent(1, 1)
        return canary.sequences[0].request_id

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and wait until all running and `accepted` requests have ended. Requests that have not ended
        after `timeout` seconds are aborted."""
        try:
            await self._drain.run(timeout)
        except TimeoutError:
            logger.warning("%d requests did not end within %g s, so they are aborted", len(self._streams), timeout)
            self._end(self._outputs.request_ids(), FinishReason.ABORT)

    async def close(self) -> None:
        """End the engine's process if `from_args` started it. Unfinished requests fail. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._close_texts()
        await self._replicas.close()
        await asyncio.gather(*(keeper.close() for keeper in self._keepers))

    @property
    def fault_status(self) -> FaultStatus:
        """Whether the engine recovers from a fault, and which recoveries there were, in all replicas together."""
        return self._replicas.fault_status

    def _fail(self, request_ids: Iterable[str], error: InflightError) -> None:
        failed = list(request_ids)
        for request_id in failed:
            self._streams[request_id].fail(error)
        self._end(failed, FinishReason.ERROR)

    def _note_end(self, reason: str) -> None:
        if self._closing is None:
            self._death = reason
            logger.error("%s; %d requests were running", reason, len(self._streams))
        for engine in self._replicas.engines:
            engine.readiness.end(self._gone())
        self._fail(self._streams, self._gone())

    def _check_open(self) -> None:
        if self._death or self._closing is not None:
            raise self._gone()

    def _gone(self) -> EngineClosedError | EngineDeadError:
        if not self._death:
            return EngineClosedError("the engine was closed; make a new one")
        text = self._death
        ended = [keeper.state for keeper in self._keepers if keeper.has_ended]
        if ended and ended[-1] not in text:
            text = f"{text}: {ended[-1]}"
        return EngineDeadError(text, summary=self._replicas.summary)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
