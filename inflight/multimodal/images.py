"""`Images`: fetches, processes and caches the images of prompts.

    prompt -> check the form -> read the sources -> find the images in the cache, or process them

Threads read and hash, and processes decode (processors.py), so an event loop never waits. Wherever images wait, their clients
take turns (fair_threads.py). Requests with the same image at the same time wait for one processing of it. If all of them are
cancelled before it has begun, it does not begin.
"""

import asyncio
import hashlib
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from inflight.errors import EngineClosedError, InvalidRequestError, OverloadedError
from inflight.interface.image_prompts import IMAGES
from inflight.multimodal.cache import ImageCache, ImageName, Scope
from inflight.multimodal.counts import ImageCounts
from inflight.multimodal.fair_threads import FairThreads
from inflight.multimodal.fetch import WebUrl
from inflight.multimodal.messages import Start, Task
from inflight.multimodal.processed import ProcessedImage
from inflight.multimodal.processors import Processors
from inflight.multimodal.prompt import GivenImage, read_images
from inflight.multimodal.settings import ImageSettings
from inflight.multimodal.source import ImageContent, LocalFile, Source, read_source
from inflight.processes.object_end import close_with

T = TypeVar("T")
NUM_FETCHES = 8  # at a time
NUM_READERS = 2  # threads that decode base64, read files and compute digests
MAX_WAITING = 4096  # images that wait to be fetched, and as many that wait to be read
FETCH_SECONDS = 0.2  # about what an image takes
READ_SECONDS = 0.02
_GRACE_SECONDS = 1.0  # after the deadline of a fetch, whose own error says more


@dataclass(eq=False, slots=True)
class _Running:
    """An image that is processed now, and how many requests wait for it."""

    key: bytes
    result: Future[ProcessedImage]
    num_waiting: int = 0


class Images:
    """
    Any thread, and any event loop, may call the methods.

    Args:
        start: the processor of the model.
    """

    def __init__(self, settings: ImageSettings, start: Start) -> None:
        self.settings = settings
        self.cache = ImageCache(settings.cache_bytes)
        self.counts = ImageCounts()
        self._processors = processors = Processors(start, settings.num_processes, self.counts)
        self._fetching = fetching = FairThreads("image-fetch", NUM_FETCHES, MAX_WAITING, "images wait to be fetched")
        self._reading = reading = FairThreads("image-read", NUM_READERS, MAX_WAITING, "images wait to be read")
        # For `_running`. Reentrant, because a new image may take the place of another one, whose request is told at once
        self._lock = threading.RLock()
        self._running: dict[bytes, _Running] = {}

        def end() -> None:
            processors.close()
            fetching.close()
            reading.close()

        self._is_closed = False
        self._end = end
        self._keep_open = close_with(self, end)

    async def prepare(self, prompt: Mapping[str, object], scope: Scope, client: str = "") -> tuple[ProcessedImage, ...]:
        """Process the images of a prompt, all of them at the same time.

        Args:
            scope: of the uuids of its images.
            client: whose images they are; "" for a program that uses the engine itself.

        Raises:
            InvalidRequestError: an image is wrong. `param` names it (places.py).
            EngineError: the processor of the model cannot be loaded.
            OverloadedError: too many images wait, and the most of them are this client's.
        """
        try:
            given, options = read_images(prompt, self.settings)
        except InvalidRequestError:
            self.counts.refused()
            raise
        _check_packages()
        if self._is_closed:
            raise EngineClosedError("the engine was closed; make a new one")
        digest = _digest_of(options)
        tasks = [asyncio.ensure_future(self._process(each, scope, client, options, digest)) for each in given]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:  # if one is wrong, nobody waits for the others
            for task in tasks:
                task.cancel()

    def prepare_now(self, prompt: Mapping[str, object], scope: Scope) -> tuple[ProcessedImage, ...]:
        """As `prepare`, for a caller without an event loop. The caller's thread waits."""
        with ThreadPoolExecutor(1, thread_name_prefix="inflight-image-wait") as thread:  # the caller's may have a loop
            return thread.submit(asyncio.run, self.prepare(prompt, scope)).result()

    def warm_up(self) -> None:
        """Start the processes in the background, unless images cannot be processed here or are not allowed."""
        if self.settings.max_images and not _missing_packages():
            self._processors.warm_up()

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._is_closed = True
        self._keep_open()
        self._end()

    async def _process(
        self, given: GivenImage, scope: Scope, client: str, options: Mapping[str, Any], digest: bytes
    ) -> ProcessedImage:
        name = None if given.uuid is None else ImageName(given.uuid, scope, digest)
        try:
            if given.source is None:
                assert name is not None  # `read_images` has checked it
                return replace(self._named(name), place=given.place)
            content = await self._read(given.source, client)
            find = partial(self._find, content, options, digest, name, client)
            running = await self._in_turn(self._reading, find, client, READ_SECONDS)
            image = running if isinstance(running, ProcessedImage) else await self._result(running)
            return replace(image, place=given.place)
        except OverloadedError:
            self.counts.overloaded()
            raise
        except InvalidRequestError as error:  # a new one, because several requests may wait for the same image
            self.counts.refused()
            if error.param:
                raise InvalidRequestError(str(error), error.param) from error
            raise InvalidRequestError(f"{given.place}: {error}", given.place) from error

    def _named(self, name: ImageName) -> ProcessedImage:
        image = self.cache.get_named(name)
        self.counts.looked_up(is_hit=image is not None)
        if image is not None:
            return image
        raise InvalidRequestError(
            f"no image with the uuid {name.uuid!r} is cached; send the image again (with the same uuid)"
        )

    async def _read(self, source: Source, client: str) -> ImageContent:
        read = partial(read_source, source, self.settings)
        if not isinstance(source, WebUrl | LocalFile):  # a file may be on another machine, which does not answer
            return await self._in_turn(self._reading, read, client, READ_SECONDS)
        begun: Future[None] = Future()

        def fetch() -> ImageContent:
            begun.set_result(None)
            return read()

        reading = self._in_turn(self._fetching, fetch, client, FETCH_SECONDS)
        first: list[asyncio.Future[Any]] = [asyncio.wrap_future(begun), reading]
        try:  # the time until a thread is free is not counted
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            async with asyncio.timeout(self.settings.fetch_seconds + _GRACE_SECONDS):
                return await reading
        except TimeoutError:  # the resolver of names has no deadline of its own
            seconds = f"{self.settings.fetch_seconds:g}"
            raise InvalidRequestError(f"the image could not be fetched within {seconds} seconds") from None
        finally:
            reading.cancel()

    def _in_turn(
        self, threads: FairThreads, function: Callable[[], T], client: str, seconds: float
    ) -> asyncio.Future[T]:
        return asyncio.wrap_future(threads.submit(lambda _: function(), client, seconds))

    def _find(
        self, content: ImageContent, options: Mapping[str, Any], digest: bytes, name: ImageName | None, client: str
    ) -> ProcessedImage | _Running:
        """In a thread: look for the image in the cache, and among those that are processed now; else begin to process it."""
        key = _key_of(content, digest)
        with self._lock:
            running = self._running.get(key)
            if running is None:
                if (image := self.cache.get(key, name)) is not None:
                    self.counts.looked_up(is_hit=True)
                    return image
                task = Task(content=content.content, shape=content.shape, options=options)
                running = self._running[key] = _Running(key, self._processors.submit(task, client))
                is_new = True
            else:
                self._processors.share(running.result, client)
                is_new = False
            running.num_waiting += 1
            self.counts.looked_up(is_hit=not is_new)
        # not with the lock, because a callback is called at once if the image is done
        if is_new:
            running.result.add_done_callback(partial(self._store, running))
        if name is not None:
            running.result.add_done_callback(lambda _: self.cache.get(key, name))
        return running

    def _store(self, running: _Running, result: Future[ProcessedImage]) -> None:
        if not result.cancelled() and result.exception() is None:
            self.cache.put(running.key, result.result())
        with self._lock:  # after the image is in the cache: a request finds it in one of the two
            if self._running.get(running.key) is running:
                del self._running[running.key]

    async def _result(self, running: _Running) -> ProcessedImage:
        try:
            return await asyncio.shield(asyncio.wrap_future(running.result))
        finally:
            with self._lock:
                running.num_waiting -= 1
                is_unwanted = running.num_waiting == 0 and not running.result.done()
                if is_unwanted and not running.result.running():
                    del self._running[running.key]
            if is_unwanted:
                running.result.cancel()  # does nothing if it has begun


def _missing_packages() -> list[str]:
    return [name for name in ("PIL", "transformers") if importlib.util.find_spec(name) is None]


def _check_packages() -> None:
    if missing := _missing_packages():
        raise InvalidRequestError(
            f"images need the package {missing[0]}, which is not installed here: pip install 'inflight-llm[images]'",
            IMAGES,
        )


def _digest_of(options: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).digest()


def _key_of(content: ImageContent, options_digest: bytes) -> bytes:
    """The key of an image in the cache."""
    digest = hashlib.sha256(f"{content.shape}\n".encode())
    digest.update(options_digest)
    digest.update(content.content.data)
    return digest.digest()
