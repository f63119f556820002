"""`LoadedModels`: starts and ends the processes of models, so that at most `models_max` are loaded at the same time.

    UNLOADED --a request--> LOADING --ready--> LOADED --idle, or another needs the room--> UNLOADING --> UNLOADED

Requests wait while their model is loading. A model is unloaded only when its last request has ended. When it has been chosen to
go, new requests for it wait until it is loaded again. If its process dies, its requests are lost with it, other models go on,
and the next request loads it again. If only its engine dies, its process restarts the engine (`EngineKeeper`).
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.router.hidden_socket import NOWHERE, HiddenSocket
from inflight.entrypoints.router.model_settings import settings_of_model
from inflight.entrypoints.router.spare import MODEL, ModelSpare
from inflight.entrypoints.serve.front_end_main import CUT, DRAIN, FrontEndStart
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.serve.shutdown import CUT_SECONDS, END_SECONDS
from inflight.entrypoints.serve.supervisor import CUT_GRACE_SECONDS, LAST_SECONDS, FrontEndProcess
from inflight.errors import EngineError, InflightError, ModelNotFoundError, OutOfMemoryError, put_place_before
from inflight.processes.child_process import STOPPED_LOOK_SECONDS, stop_processes

logger = logging.getLogger(__name__)


class ModelState(StrEnum):
    """As llama.cpp's router names them."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class ShuttingDownError(EngineError):
    """The server ends, so no model is loaded any more."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(eq=False)
class Slot:
    """A model that was asked for.

    Attributes:
        is_removed: whether its files are about to be deleted, so nothing loads it.
        num_active: how many requests it is answering.
        num_waiting: how many requests wait until it is loaded.
        last_used: when its last request ended, by the event loop's clock.
        idle_seconds: how long it stays loaded without requests.
        failure: why it could not be loaded the last time.
        described: what its server has said about it since it was loaded, by path of the endpoint.
    """

    known: KnownModel
    state: ModelState = ModelState.UNLOADED
    is_removed: bool = False
    num_active: int = 0
    num_waiting: int = 0
    last_used: float = 0.0
    idle_seconds: float = math.inf
    failure: InflightError | None = None
    described: dict[str, dict[str, Any]] = field(default_factory=dict)  # Any: JSON
    process: FrontEndProcess | None = None
    hidden_socket: HiddenSocket | None = None
    transition: asyncio.Task[None] | None = None

    @property
    def socket(self) -> str:
        """Where its process listens. Connect at once, and do not keep it."""
        return NOWHERE if self.hidden_socket is None else self.hidden_socket.path

    @property
    def may_leave(self) -> bool:
        """Whether another model may have its room. Requests that have waited for it come first: if they had to wait again, two
        models could push each other out forever."""
        return self.state is ModelState.LOADED and not self.known.preset.is_pinned and not self.num_waiting

    @property
    def is_idle(self) -> bool:
        return self.num_active == 0 and self.num_waiting == 0


class LoadedModels:
    """Used by one event loop. `start_looking` comes first, `close` last.

    Args:
        settings, args: for all models. A model's preset overrides them, except for options of the command line.
        is_fixed: whether the user gave the option of this field on the command line.
    """

    def __init__(self, settings: ServerSettings, args: EngineArgs, is_fixed: Callable[[str], bool]) -> None:
        self._settings = settings
        self._args = args
        self._is_fixed = is_fixed
        self._slots: dict[str, Slot] = {}
        self._occupied: set[Slot] = set()  # has a process, or is about to get one
        self._room = asyncio.Lock()  # held by the load that waits for a place next
        self._changed = asyncio.Event()  # set when a request has begun or ended, a model is loaded, or a slot is free
        self._ending = asyncio.Event()
        self._num_started = 0
        self._looking: asyncio.Task[None] | None = None
        self._spare = ModelSpare(is_wanted=settings.models_spare)

    def start_looking(self) -> None:
        self._looking = asyncio.create_task(self._look_after())

    def slot(self, known: KnownModel) -> Slot:
        """The slot of a model, with what the catalog knows of it now."""
        slot = self._slots.setdefault(known.name, Slot(known))
        if slot.state is ModelState.UNLOADED:
            slot.known = known
        return slot

    def slots(self) -> dict[str, Slot]:
        return dict(self._slots)

    def newest(self) -> Slot | None:
        """The loaded model that was used last."""
        loaded = [slot for slot in self._slots.values() if slot.state is ModelState.LOADED]
        return max(loaded, key=lambda slot: (slot.num_active > 0, slot.last_used), default=None)

    @asynccontextmanager
    async def use(self, known: KnownModel, keep_alive: float | None = None) -> AsyncIterator[Slot]:
        """Load the model if necessary, and keep it loaded while the context lasts.

        Args:
            keep_alive: seconds that it stays loaded afterwards. None changes nothing.

        Raises:
            ConfigError, EngineError: it cannot be loaded.
        """
        slot = self.slot(known)
        slot.num_waiting += 1
        try:
            while slot.state is not ModelState.LOADED:
                await self.wait(self.begin_loading(slot))
                if slot.failure is not None and slot.state is ModelState.UNLOADED:
                    raise slot.failure
            slot.num_active += 1
        finally:
            slot.num_waiting -= 1
            self._changed.set()
        try:
            yield slot
        finally:
            slot.num_active -= 1
            slot.last_used = asyncio.get_running_loop().time()
            if keep_alive is not None:
                slot.idle_seconds = keep_alive
            self._changed.set()

    async def wait(self, change: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait until `change` is done, at most for so long.

        Raises:
            ShuttingDownError: the server ends.
        """
        ending: asyncio.Future[Any] = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([change, ending], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
        if self._ending.is_set() and not change.done():
            raise ShuttingDownError

    def begin_loading(self, slot: Slot) -> asyncio.Task[None]:
        """Load the model unless it is loading or unloading already. Returns the task that does so.

        Raises:
            ModelNotFoundError: the model is being deleted.
            ShuttingDownError: the server ends.
        """
        if slot.transition is None or slot.transition.done():
            if slot.is_removed:
                raise ModelNotFoundError(f"model {slot.known.name!r} is being deleted")
            if self._ending.is_set():
                raise ShuttingDownError
            slot.state = ModelState.LOADING
            slot.failure = None
            slot.transition = asyncio.create_task(self._load(slot))
        return slot.transition

    def load(self, slot: Slot) -> None:
        """Begin to load the model unless it is loaded or loading. A model that is being unloaded is loaded again afterwards.

        Raises:
            ModelNotFoundError, ShuttingDownError: as `begin_loading`.
        """

        def load_again(_: asyncio.Task[None]) -> None:
            if slot.state is ModelState.UNLOADED and not slot.is_removed and not self._ending.is_set():
                self.begin_loading(slot)

        if slot.state is ModelState.UNLOADED:
            self.begin_loading(slot)
        elif slot.state is ModelState.UNLOADING and slot.transition is not None:
            slot.transition.add_done_callback(load_again)

    @asynccontextmanager
    async def unloaded(self, slot: Slot) -> AsyncIterator[None]:
        """Unload the model when its last request has ended, and keep it unloaded while the context lasts. Requests that wait
        for it get a ModelNotFoundError."""
        slot.is_removed = True
        try:
            while slot.state is not ModelState.UNLOADED:
                if slot.state is ModelState.LOADED:
                    self.begin_unloading(slot)
                assert slot.transition is not None  # it is loading or unloading
                await self.wait(slot.transition)
            yield
        finally:
            slot.is_removed = False

    def begin_unloading(self, slot: Slot) -> asyncio.Task[None]:
        """Unload a loaded model when its last request has ended. Returns the task that does so."""
        slot.state = ModelState.UNLOADING
        slot.transition = asyncio.create_task(self._unload(slot))
        return slot.transition

    async def _load(self, slot: Slot) -> None:
        begun = time.monotonic()
        try:
            await self._make_room(slot)
            while True:
                try:
                    await self._start(slot)
                    break
                except OutOfMemoryError:
                    idle = [each for each in self._by_age() if each.is_idle]
                    if not idle:
                        raise
                    logger.info("%s needs more memory: %s is unloaded", slot.known.name, idle[0].known.name)
                    await self.begin_unloading(idle[0])
        except (InflightError, OSError, ValueError) as error:
            # the last two: the system has no process, file or memory left, or cannot take the name of the process
            failure = error if isinstance(error, InflightError) else EngineError(f"{type(error).__name__}: {error}")
            if self._ending.is_set():  # so the process was told to end
                slot.failure = ShuttingDownError()
            else:
                put_place_before(failure, f"model {slot.known.name} could not be loaded")
                logger.error("%s", failure)
                slot.failure = failure
            slot.state = ModelState.UNLOADED
            self._free(slot)
            return
        except BaseException:
            slot.state = ModelState.UNLOADED
            self._free(slot)
            raise
        preset = slot.known.preset
        idle_seconds = preset.idle_seconds if preset.idle_seconds is not None else self._settings.models_idle_timeout
        slot.idle_seconds = math.inf if idle_seconds is None else idle_seconds
        slot.last_used = asyncio.get_running_loop().time()
        slot.state = ModelState.LOADED
        self._changed.set()
        logger.info("model %s is loaded, after %.2f s", slot.known.name, time.monotonic() - begun)

    async def _make_room(self, slot: Slot) -> None:
        async with self._room:
            while len(self._occupied) >= self._settings.models_max:
                candidates = self._by_age()
                leaving = any(each.state is ModelState.UNLOADING for each in self._occupied)
                if candidates and not leaving:
                    idle = [each for each in candidates if each.is_idle]
                    self.begin_unloading((idle or candidates)[0])
                elif all(each.known.preset.is_pinned for each in self._occupied):
                    raise EngineError(
                        f"all {self._settings.models_max} places of --models-max have pinned models: raise it, or pin fewer "
                        "models"
                    )
                self._changed.clear()
                await self._changed.wait()
            self._occupied.add(slot)

    def _by_age(self) -> list[Slot]:
        """The models that may be unloaded, the one that was used least recently first."""
        return sorted((each for each in self._occupied if each.may_leave), key=lambda each: each.last_used)

    async def _start(self, slot: Slot) -> None:
        """Start the process, and wait until it is ready.

        Raises:
            ConfigError, EngineError: it could not start. Nothing is left running.
        """
        self._num_started += 1
        hidden = HiddenSocket(lambda path: self.settings_of(slot.known, path)[0])
        try:
            settings, args = self.settings_of(slot.known, hidden.path)
            start = FrontEndStart(settings=settings, args=args, index=0, is_replacement=False)
            title = f"inflight: model {slot.known.name}"
            process = FrontEndProcess(
                index=self._num_started,
                listener=hidden.listener,
                start=start,
                # it is alone, so it shares no files of metrics
                variables={},
                title=title,
                module=MODEL.module,
                make_process=self._spare.start,
            )
        except BaseException:
            hidden.close()
            raise
        finally:
            hidden.listener.close()  # the process has a copy
        slot.process, slot.hidden_socket = process, hidden
        try:
            ready: asyncio.Future[Any] = process.ready
            await asyncio.wait([ready, process.ended], return_when=asyncio.FIRST_COMPLETED)
            if process.ended.done():
                raise process.failure or EngineError(f"the process of the model has ended: {process.process.state}")
            slot.described = {}
        except BaseException:
            await self._end_process(slot, CUT)
            raise
        process.ended.add_done_callback(lambda _: self._record_end(slot, process))

    def settings_of(self, known: KnownModel, path: str) -> tuple[ServerSettings, EngineArgs]:
        """See `settings_of_model`."""
        return settings_of_model(self._settings, self._args, self._is_fixed, known, path)

    def _record_end(self, slot: Slot, process: FrontEndProcess) -> None:
        """The process has ended. If it was not told to end, the model counts as unloaded from now on."""
        if slot.process is process and slot.state is ModelState.LOADED and process.failure is not None:
            logger.error("the process of model %s has ended: %s", slot.known.name, process.failure)
            slot.state = ModelState.UNLOADING
            slot.transition = asyncio.create_task(self._remove(slot))

    async def _unload(self, slot: Slot) -> None:
        while slot.num_active and slot.process is not None and not slot.process.ended.done():
            self._changed.clear()
            changed: asyncio.Future[Any] = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, slot.process.ended], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        await self._remove(slot)
        logger.info("model %s is unloaded", slot.known.name)

    async def _remove(self, slot: Slot) -> None:
        await self._end_process(slot, DRAIN)
        slot.state = ModelState.UNLOADED
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        self._occupied.discard(slot)
        self._changed.set()

    async def _end_process(self, slot: Slot, order: str) -> None:
        """Tell the process to end, wait until it has, and kill it if it does not."""
        process = slot.process
        if process is None:
            return
        process.send(order)
        await asyncio.wait([process.ended], timeout=CUT_SECONDS if order == CUT else END_SECONDS)
        await asyncio.to_thread(stop_processes, [process.process], LAST_SECONDS)
        process.close()
        if slot.hidden_socket is not None:
            slot.hidden_socket.close()
        slot.process = slot.hidden_socket = None

    async def _look_after(self) -> None:
        """Unload models that nobody has used for long. Kill processes that are stopped by a signal."""
        loop = asyncio.get_running_loop()
        while True:
            self._spare.look(is_loading=any(slot.state is ModelState.LOADING for slot in self._slots.values()))
            await asyncio.sleep(STOPPED_LOOK_SECONDS)
            for slot in list(self._slots.values()):
                if slot.process is not None and not slot.process.ended.done():
                    slot.process.process.kill_if_stopped()
                if slot.may_leave and slot.is_idle and loop.time() - slot.last_used >= slot.idle_seconds:
                    self.begin_unloading(slot)

    async def check_health(self) -> None:
        """Always healthy: a model that has failed is loaded again by the next request."""

    async def drain(self, timeout: float) -> None:
        """Let the requests that run end. After `timeout` seconds the models' servers end them. Requests that wait for a model
        get a ShuttingDownError at once."""
        self._ending.set()
        processes = [slot.process for slot in self._slots.values() if slot.process is not None]
        for process in processes:
            process.send(DRAIN)
        if processes:
            seconds = timeout + CUT_SECONDS + CUT_GRACE_SECONDS
            await asyncio.wait([process.ended for process in processes], timeout=seconds)

    async def close(self) -> None:
        """End all processes."""
        self._ending.set()
        if self._looking is not None:
            self._looking.cancel()
        self._spare.close()
        await asyncio.gather(*(self._close_slot(slot) for slot in self._slots.values()))

    async def _close_slot(self, slot: Slot) -> None:
        if slot.transition is not None:
            if slot.process is not None:
                slot.process.send(CUT)
            if slot.state is ModelState.LOADING:  # it ends the process that it has started
                slot.transition.cancel()
            await asyncio.gather(slot.transition, return_exceptions=True)
        await self._end_process(slot, CUT)
