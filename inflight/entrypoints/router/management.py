"""Pulls models into the hub's cache and deletes them there, for requests (`--enable-model-management`)."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable

from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.serve.asgi import Send, send_json
from inflight.errors import InflightError, ModelNotFoundError
from inflight.hub import resolve_model_folder
from inflight.hub_cache import check_files, remove_model
from inflight.model_name import read_model_name

_WAIT_SECONDS = 5.0  # between two lines that say that a download goes on
_MOST_AT_ONCE = 4  # downloads
_MOST_CHARACTERS = 1024  # of a name

# Waits until the future is done, or for so many seconds. Raises if the server ends meanwhile.
Wait = Callable[["asyncio.Future[InflightError | None]", float | None], Awaitable[None]]


class ManagementError(InflightError):
    """A model that cannot be pulled or deleted. `status` is for HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _download(name: str) -> None:
    """
    Raises:
        ManagementError: there is no such model, or the download failed. A model that is not complete is not served.
    """
    if len(name) > _MOST_CHARACTERS:
        raise ManagementError(f"{name[:200]!r}... is not a hub id: it has {len(name)} characters", 400)
    try:
        read = read_model_name(name)
        if read.model is None or name.startswith(("/", ".", "~")) or name.count("/") != 1:
            raise ManagementError(f"{name[:200]!r} is not a hub id: give ORG/NAME, or ORG/NAME:FILE.gguf", 400)
        check_files(resolve_model_folder(read.model, read.revision))
    except ModelNotFoundError as error:
        raise ManagementError(str(error), 404) from error
    except ManagementError:
        raise
    except InflightError as error:
        raise ManagementError(str(error), 502) from error
    except OSError as error:
        raise ManagementError(f"{name}: {error.strerror or error}", 507) from error


class Downloads:
    """Used by one event loop. Each download has a thread of its own, because one that hangs would take a thread of the pool,
    which all requests use. A download goes on when its client goes away, and ends with the process; the hub's library goes on
    with it the next time.

    Args:
        download: gets the name of a model.
    """

    def __init__(self, download: Callable[[str], None] = _download) -> None:
        self._download = download
        self._running: dict[str, asyncio.Future[InflightError | None]] = {}

    def begin(self, name: str) -> asyncio.Future[InflightError | None]:
        """Download the model unless that is going on already. The result is why it failed, or None.

        Raises:
            ManagementError: too many downloads are going on.
        """
        if name in self._running:
            return self._running[name]
        if len(self._running) >= _MOST_AT_ONCE:
            running = ", ".join(self._running)
            raise ManagementError(f"{_MOST_AT_ONCE} models are being pulled: try again later ({running})", 503)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[InflightError | None] = loop.create_future()

        def finish(error: InflightError | None) -> None:
            del self._running[name]
            done.set_result(error)

        def run() -> None:
            error: InflightError | None = None
            try:
                self._download(name)
            except InflightError as found:
                error = found
            except Exception as found:  # whatever a library raises: nobody else would tell the client
                error = ManagementError(f"{name} could not be pulled: {type(found).__name__}: {found}", 500)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(finish, error)

        self._running[name] = done
        threading.Thread(target=run, name=f"pull {name}", daemon=True).start()
        return done


async def pull(
    task: asyncio.Future[InflightError | None] | None, name: str, send: Send, wait: Wait, *, streams: bool
) -> None:
    """Answer as Ollama does: a line of JSON for each state, or only the last one.

    Args:
        task: the download; None if the model is there already.

    Raises:
        InflightError: it could not be pulled, and no answer has begun. A later error is a line of the answer.
    """
    if task is not None:  # an error that comes at once is an answer with its status
        await wait(task, 1.0 if streams else None)
        if task.done() and (error := task.result()) is not None:
            raise error
    if not streams:
        await send_json(send, 200, {"status": "success"})
        return
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _line("pulling manifest"), "more_body": True})
    last = _line("success")
    try:
        while task is not None and not task.done():
            await wait(task, _WAIT_SECONDS)
            await send({"type": "http.response.body", "body": _line(f"pulling {name}"), "more_body": True})
        if task is not None and (error := task.result()) is not None:
            raise error
    except InflightError as error:
        last = json.dumps({"error": str(error)}).encode() + b"\n"
    await send({"type": "http.response.body", "body": last})


def check_deletable(known: KnownModel) -> None:
    """
    Raises:
        ManagementError: the model is not in the hub's cache.
    """
    if not known.is_cached:
        raise ManagementError(f"{known.name!r} is not in the hub's cache, so no request may remove it", 403)


async def delete(known: KnownModel) -> None:
    """Remove a model that `check_deletable` accepts.

    Raises:
        ModelNotFoundError: it has gone meanwhile.
    """
    await asyncio.to_thread(remove_model, known.model)


def _line(status: str) -> bytes:
    return json.dumps({"status": status}).encode() + b"\n"
