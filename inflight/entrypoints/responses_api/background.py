"""`BackgroundResponses`: responses with `background: true`, which go on when their client has left."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from inflight.engine.serving.output_stream import OutputStream
from inflight.entrypoints.http.errors import ApiError
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.generation import check_output
from inflight.entrypoints.http.respond import Begun
from inflight.entrypoints.response_store.responses import StoredResponses, StoreFailedError
from inflight.entrypoints.response_store.store import Item, ResponseStore
from inflight.entrypoints.responses_api.kept import Kept, stored_output
from inflight.entrypoints.responses_api.presenter import ResponsesPresenter
from inflight.outputs import RequestOutput

LOOK_SECONDS = 0.2  # between two looks whether a response was cancelled or deleted, perhaps through another process
RETRY_SECONDS = 1.0  # between two attempts to store how a response has ended


@dataclass(eq=False)
class _Job:
    """
    Attributes:
        is_added: the result of `Kept.add`, once it is known.
        num_stored: how many events of its stream are stored; `events`: those behind them.
    """

    id: str
    kept: Kept
    stream: OutputStream
    presenter: ResponsesPresenter
    names: FieldNames
    is_added: asyncio.Future[bool | None]
    num_stored: int = 0
    events: list[bytes] = field(default_factory=list)
    task: asyncio.Task[None] | None = field(default=None)


class BackgroundResponses:
    """
    Args:
        tasks: gets the task of each response, until it has ended.
    """

    def __init__(self, responses: StoredResponses, tasks: set[asyncio.Task[None]]) -> None:
        self._responses = responses
        self._tasks = tasks
        self._jobs: dict[tuple[str, str], _Job] = {}
        self._looking: asyncio.Task[None] | None = None

    async def start(self, begun: Begun, kept: Kept, names: FieldNames) -> None:
        """Store a response as queued, and let it go on. From now on its streams are aborted here.

        Raises:
            ApiError: it cannot be stored, so it does not go on.
        """
        assert isinstance(begun.presenter, ResponsesPresenter)
        begun.goes_on = True
        (stream,) = begun.streams
        is_added = asyncio.get_running_loop().create_future()
        job = _Job(begun.presenter.id, kept, stream, begun.presenter, names, is_added)
        job.task = asyncio.create_task(self._run(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(self._tasks.discard)
        match await asyncio.shield(is_added):
            case None:
                message = "a response in the background must be stored, and the server cannot store it now"
                raise ApiError(503, message, type="server_error", code="response_store_failed")
            case False:
                message = f"a response with the id {job.id!r} is computed now: send another X-Request-Id"
                raise ApiError(409, message, code="response_exists")

    async def _run(self, job: _Job) -> None:
        presenter = job.presenter
        key = job.kept.owner, job.id
        try:
            queued = presenter.response("queued")
            try:
                is_added = await job.kept.add(job.id, presenter.model, "queued", queued, ())
            except ApiError as error:
                job.is_added.set_exception(error)
                return
            job.is_added.set_result(is_added)
            if not is_added:
                return
            self._jobs[key] = job
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            if await self._begin(job):
                await self._write(job)
                await self._finish(job)
        finally:
            if (
                self._jobs.get(key) is job
            ):  # and not another one with the same id, because of which this one was refused
                del self._jobs[key]
            job.stream.abort()

    async def _begin(self, job: _Job) -> bool:
        """Returns False if a client has already ended or removed the response."""
        try:
            return await self._advance(job, "in_progress", job.presenter.response("in_progress"))
        except StoreFailedError:  # a shortage: it stays queued until it has ended
            return True

    async def _write(self, job: _Job) -> None:
        """Compute the response. While the file cannot be written, its events are kept here."""
        presenter = job.presenter
        last: RequestOutput | None = None
        try:
            await self._add_events(job, presenter.opening_events())
            async for output in job.stream:
                check_output(output)
                last = output
                if job.kept.has_events:
                    await self._add_events(job, presenter.chunks(0, output))
            if job.kept.has_events or last is None:
                presenter.end()
            else:
                presenter.body([last])
        except Exception as error:  # whatever it is, clients learn it from the response
            presenter.failure(job.names.api_error(error))

    async def _finish(self, job: _Job) -> None:
        """Store how the response has ended. If the file cannot be written, try again until it can: clients wait for the end."""
        presenter = job.presenter
        while True:
            try:
                await self._store_events(job)
                await self._advance(job, presenter.status, presenter.final, stored_output(presenter.output))
                return
            except StoreFailedError:
                await asyncio.sleep(RETRY_SECONDS)

    async def _advance(self, job: _Job, status: str, body: bytes, output: Sequence[Item] = ()) -> bool:
        owner = job.kept.owner
        return bool(await self._responses.call(lambda store: store.advance(owner, job.id, status, body, output)))

    async def _add_events(self, job: _Job, events: Sequence[bytes]) -> None:
        if job.kept.has_events:
            job.events += events
            with contextlib.suppress(StoreFailedError):
                await self._store_events(job)

    async def _store_events(self, job: _Job) -> None:
        events = job.events
        if not events:
            return
        owner = job.kept.owner
        await self._responses.call(lambda store: store.add_events(owner, job.id, job.num_stored, events))
        job.num_stored += len(events)
        job.events = []

    async def _look(self) -> None:
        """End what clients have cancelled or deleted."""
        while self._jobs:
            await asyncio.sleep(LOOK_SECONDS)
            running = list(self._jobs)
            with contextlib.suppress(StoreFailedError):
                for key in await self._responses.call(partial(ResponseStore.ended, ids=running)) or ():
                    job = self._jobs.get(key)
                    if job is not None and job.task is not None:
                        job.task.cancel()
