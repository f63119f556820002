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
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.model_info import ModelInfo, make_input_processor
from inflight.engine.request.processed import ProcessedRequest, RequestOptions
from inflight.engine.request.prompt import Prompt
from inflight.engine.request.request_state import RequestOutputKind
from inflight.engine.serving.admission import QueueLimits
from inflight.engine.serving.client import CLIENT, short_client
from inflight.engine.serving.engine_client import EngineClient
from inflight.engine.serving.engine_sockets import EngineSockets
from inflight.engine.serving.output_stream import OutputStream
from inflight.engine.serving.own_loop import OwnLoop, end_keepers
from inflight.engine.serving.replicas import Replicas, make_engines
from inflight.engine.serving.running_requests import RunningRequests
from inflight.engine.serving.texts import Texts
from inflight.engine.start.model_files import resolve_config
from inflight.errors import EngineError
from inflight.interface.request import FinishReason
from inflight.interface.serving import AddRequest, EngineReady
from inflight.interface.statistics import FaultStatus
from inflight.metrics.observer import EngineObserver
from inflight.outputs import RequestOutput
from inflight.pooling_params import Params, PoolingParams
from inflight.sample.seeds import front_end_seed
from inflight.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncLLM(Texts):
    """Make an engine with `from_args` or `attach`. End it with `close`, or use `async with`. All calls must be made on the
    event loop on which it was made (`OwnLoop`).

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
        requests: RunningRequests,
        replicas: Replicas,
        ready: Sequence[EngineReady],
        *,
        seed: int = 0,
        keepers: Sequence[Keeper] = (),
    ) -> None:
        """
        Args:
            ready: what `Replicas.open` has returned.
            keepers: one for each engine; none if another process started the engines.
        """
        super().__init__(input_processor, seed)
        config = input_processor.config
        self.num_kv_cache_tokens = [each.num_kv_cache_tokens for each in ready]
        self.reasoning = config.reasoning
        self.model = ModelInfo.of(config, sum(self.num_kv_cache_tokens))
        self._id_prefix = f"{ready[0].front_end}."
        self._requests = requests
        self._replicas = replicas
        self._keepers = keepers
        self._own_loop = OwnLoop(self, replicas, keepers)
        self._serials = itertools.count()
        self._closing: asyncio.Task[None] | None = None
        replicas.begin()

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
            engine = await cls._connect(args, config, sockets, limits, observers, keepers)
        except BaseException:
            for each in sockets:
                each.close()
            await end_keepers(keepers)
            raise
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
        keepers: Sequence[Keeper] = (),
    ) -> AsyncLLM:
        try:
            begin = time.perf_counter()
            input_processor = await asyncio.to_thread(make_input_processor, args, config)
            logger.debug("the tokenizer was read in %.2f s", time.perf_counter() - begin)
            requests = RunningRequests(input_processor.tokenizer, observers, keepers)
            replicas = Replicas(requests, config, partial(make_engines, config, sockets, limits))
            ready = await replicas.open()
        except BaseException:
            for each in sockets:
                each.close()
            raise
        seed = front_end_seed(args.seed, ready[0].front_end)
        return cls(input_processor, requests, replicas, ready, seed=seed, keepers=keepers)

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
        self._requests.drain.check_new()
        self._replicas.router.check(num_sequences, num_tokens)

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """A context in which a request is prepared (for example tokenised) and submitted. `drain` waits until the context ends.

        Raises: the same as `check_admission`.
        """
        self.check_admission()
        with self._requests.drain.accepted():
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
        self._requests.drain.check_submit()
        engines = self._replicas.router.place(requests, data_parallel_rank)
        self._requests.outputs.check_ids([request.request_id for request in requests])
        return [self._start(request, each, kind, timeout) for request, each in zip(requests, engines, strict=True)]

    def _start(
        self, request: ProcessedRequest, engine: EngineClient, kind: RequestOutputKind, timeout: float | None
    ) -> OutputStream:
        request = self._with_own_ids(request)
        queue = self._requests.add(request, kind)
        self._replicas.give(queue.state, engine)
        engine.admission.shares.hold(request.request_id, CLIENT.get(), len(request.sequences))
        if timeout is not None:
            self._requests.limit_time(request, timeout, self._replicas.expire)
        return OutputStream(queue, partial(self._end, [request.request_id], FinishReason.ABORT))

    async def generate(
        self,
        prompt: Prompt,
        params: Params | None = None,
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
        self._own_loop.check()
        self._end([request_id], FinishReason.ABORT)

    async def reset_prefix_cache(self, *, reset_connector: bool = False) -> None:
        """Forget all cached prompts. With `reset_connector` also those outside of the KV cache, in host memory and tiers."""
        self._check_open()
        await self._replicas.reset_prefix_caches(reset_connector=reset_connector)

    def _with_own_ids(self, request: ProcessedRequest) -> ProcessedRequest:
        """Returns the request with its client, and with ids that the core has never received. So this front end cannot mistake
        late outputs of an earlier request with the same id, or outputs for other front ends, for outputs of this request."""
        prefix = f"{self._id_prefix}{next(self._serials)}."
        client = short_client()
        sequences = [
            replace(
                sequence,
                request_id=prefix + sequence.request_id,
                prompt_leader=None if sequence.prompt_leader is None else prefix + sequence.prompt_leader,
                client=client,
            )
            for sequence in request.sequences
        ]
        return replace(request, sequences=tuple(sequences))

    def _end(self, request_ids: Iterable[str], reason: FinishReason) -> None:
        self._replicas.end(request_ids, reason)

    # -- health and end --------------------------------------------------------------------------------------------

    @property
    def is_draining(self) -> bool:
        return self._requests.drain.has_begun

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
        params: Params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        if self.input_processor.config.model.architecture.pooler is not None:
            params = PoolingParams()
        canary = self._with_own_ids(self.input_processor.process("canary", [0], params, default_seed=0))
        engine.send(AddRequest(prompt_token_ids=canary.prompt_array, sequences=canary.sequences))
        engine.admission.sent(1, 1)
        return canary.sequences[0].request_id

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and wait until all running and `accepted` requests have ended. Requests that have not ended
        after `timeout` seconds are aborted."""
        self._own_loop.check()
        try:
            await self._requests.drain.run(timeout)
        except TimeoutError:
            logger.warning("%d requests did not end within %g s, so they are aborted", len(self._requests), timeout)
            self._end(self._requests.outputs.request_ids(), FinishReason.ABORT)

    async def close(self) -> None:
        """End the engine's process if `from_args` started it. Unfinished requests fail. Idempotent. Another event loop may call
        it, too. In a forked process it does nothing."""
        if not self._own_loop.is_running_here:
            if await self._own_loop.end_from_elsewhere(self.close):
                self._close_texts()
            return
        if self._closing is None:
            self._close_texts()
            self._requests.close()
            self._closing = asyncio.create_task(self._own_loop.end())
        await asyncio.shield(self._closing)

    def _check_loop(self) -> None:
        self._own_loop.check()

    @property
    def engines(self) -> Sequence[EngineClient]:
        """The replicas, in the order of their numbers."""
        return self._replicas.engines

    @property
    def fault_status(self) -> FaultStatus:
        """Whether the engine recovers from a fault, and which recoveries there were, in all replicas together."""
        return self._replicas.fault_status

    def _check_open(self) -> None:
        self._own_loop.check()
        self._requests.check_open()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
