"""The program of a worker process: `python -m inflight.executor.worker_main TITLE STREAM_FD`, started by the executor.

Only the main thread uses the worker: it constructs the worker, loads the model, and runs the commands. The inbox thread reads
the stream, so it sees the end of the stream even while the main thread computes. Then it ends the process at once. The inbox
thread also answers when the executor asks what the rank is doing. Any thread may send replies.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from typing import cast

from inflight.errors import CodecError
from inflight.executor.failures import failed_reply, failure_of
from inflight.executor.process import name_process
from inflight.executor.transport import EXIT_STREAM_ENDED, BlockingStream
from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    WorkerActivity,
    WorkerReply,
)
from inflight.interface.start_up import Ready, StartUp, StartUpFailed, Stop
from inflight.interface.worker import WorkerBase

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is handled by the executor's process
    title, stream_fd = sys.argv[1], int(sys.argv[2])
    name_process(title, title.replace(": worker ", "-").replace(" ", ""))
    # the kernel kills this process when the executor's thread that started it ends
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    stream = BlockingStream(socket.socket(fileno=stream_fd))
    start_up = stream.receive()
    if start_up is None:
        os._exit(EXIT_STREAM_ENDED)
    assert isinstance(start_up, StartUp), start_up
    loop = WorkerLoop(start_up.rank, lambda reply: send_reply(stream, reply))
    threading.Thread(target=read_commands, args=(stream, loop), name="inflight-inbox", daemon=True).start()
    worker = start_worker(start_up, stream)
    if worker is None:
        sys.exit(1)
    try:
        stream.send(Ready(rank=start_up.rank))
        loop.run(worker)
    finally:
        worker.shutdown()


def start_worker(start_up: StartUp, stream: BlockingStream) -> WorkerBase | None:
    """Import and construct the worker and load its model. If this fails, sends the reason to the executor and returns None."""
    try:
        module, _, name = start_up.worker_class.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
        worker = cast("WorkerBase", worker_class(start_up.config, start_up.rank, start_up.rendezvous))
        worker.load_model()
        gc.collect()
        gc.freeze()  # libraries and the model are never freed, and a collection that visits them would delay a step
    except BaseException as error:  # also SystemExit, because the executor must get the reason
        stream.send(StartUpFailed(rank=start_up.rank, failure=failure_of(error)))
        return None
    return worker


def send_reply(stream: BlockingStream, reply: WorkerReply) -> None:
    """Send a reply. If its result cannot be encoded, send a failure of the step or call instead."""
    try:
        try:
            stream.send(reply)
        except CodecError as error:
            assert not isinstance(reply, WorkerActivity), reply
            stream.send(failed_reply(reply, reply.rank, failure_of(error)))
    except OSError:  # the executor is gone
        os._exit(EXIT_STREAM_ENDED)


def read_commands(stream: BlockingStream, loop: WorkerLoop) -> None:
    """Runs in the inbox thread. When the stream has ended, it ends the process."""
    try:
        while (message := stream.receive()) is not None:
            if isinstance(message, Stop):
                loop.stop()
            elif isinstance(message, AskActivity):
                send_reply(stream, loop.report())
            else:
                assert isinstance(message, ExecuteModel | ProvideGrammarOutput | RpcCall), message
                loop.put(message)
    except OSError as error:
        logger.debug("the stream was lost: %s", error)
    except BaseException:
        logger.exception("this worker cannot read a message of the executor")
    os._exit(EXIT_STREAM_ENDED)


if __name__ == "__main__":
    main()
