"""Pulls models into the hub's cache and deletes them there, for requests (`--enable-model-management`)."""

import asyncio
import json

from inflight.entrypoints.router.catalog import KnownModel
from inflight.entrypoints.serve.asgi import Send, send_json
from inflight.errors import InflightError, ModelNotFoundError
from inflight.hub import resolve_model_folder
from inflight.hub_cache import check_files, remove_model
from inflight.model_name import read_model_name

_WAIT_SECONDS = 5.0  # between two lines that say that a download goes on


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


async def pull(name: str, send: Send, *, is_there: bool, streams: bool) -> None:
    """Answer as Ollama does: a line of JSON for each state, or only the last one.

    Raises:
        ManagementError: it could not be pulled, and no answer has begun. A later error is a line of the answer.
    """
    task = None if is_there else asyncio.create_task(asyncio.to_thread(_download, name))
    if not streams:
        if task is not None:
            await task
        await send_json(send, 200, {"status": "success"})
        return
    if task is not None:  # an error that comes at once is an answer with its status
        await asyncio.wait([task], timeout=1.0)
        if task.done():
            task.result()
    headers = [(b"content-type", b"application/x-ndjson")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": _line("pulling manifest"), "more_body": True})
    last = _line("success")
    while task is not None and not task.done():
        await asyncio.wait([task], timeout=_WAIT_SECONDS)
        await send({"type": "http.response.body", "body": _line(f"pulling {name}"), "more_body": True})
    if task is not None and (error := task.exception()) is not None:
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
