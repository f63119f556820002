"""The program of a worker process: `inflight.executor.worker_main TITLE STREAM_FD`, started by the executor.

Only the main thread uses the worker: it constructs the worker, loads the model, and runs the commands. The inbox thread reads
the stream, so it sees the end of the stream even while the main thread computes. Then it ends the process at once. The inbox
thread also answers when the executor asks what the rank is doing, and it takes the beginning of a new epoch. Any thread may
send replies.

A spare process gets `Preload` first. It imports the libraries, and waits until `StartUp` makes it a rank.
"""

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any, cast

from inflight.errors import CodecError
from inflight.executor.failures import failed_reply, failure_of
from inflight.executor.worker_loop import WorkerLoop
from inflight.interface.messages import (
    AskActivity,
    ExecuteModel,
    ProvideGrammarOutput,
    RpcCall,
    RpcReply,
    StepReply,
    WorkerReply,
)
from inflight.interface.start_up import BeginEpoch, EpochReply, JoinEpoch, Preload, Ready, StartUp, Stop
from inflight.interface.worker import Rendezvous, WorkerBase
from inflight.logs import exit_now
from inflight.processes.child_process import name_process
from inflight.processes.command_line import show_title
from inflight.processes.streams import EXIT_STREAM_ENDED, BlockingStream

logger = logging.getLogger(__name__)

COMMANDS = (ExecuteModel, ProvideGrammarOutput, RpcCall, BeginEpoch, JoinEpoch)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # the executor's process handles Ctrl-C and the end of the terminal
        signal.signal(number, signal.SIG_IGN)
    name_worker(sys.argv[1])
    stream_socket = socket.socket(fileno=int(sys.argv[2]))
    stream = BlockingStream(stream_socket)
    start_up = wait_for_start(stream)
    if start_up is None:
        os._exit(EXIT_STREAM_ENDED)
    host = start_up.host or str(stream_socket.getsockname()[0])
    config = start_up.config
    rank = start_up.place.rank
    called = config.parallel.layout.called_by(rank, has_drafts=config.speculative is not None)
    loop = WorkerLoop(rank, partial(send_reply, stream), partial(make_worker, start_up), host, called)
    loop.put(BeginEpoch(epoch=start_up.epoch))
    threading.Thread(target=read_commands, args=(stream, loop), name="inflight-inbox", daemon=True).start()
    loop.run()
    sys.exit(int(loop.has_failed))


def name_worker(title: str) -> None:
    name_process(title, title.replace(": worker ", "-").replace(" ", ""))


def wait_for_start(stream: BlockingStream) -> StartUp | None:
    """Wait for `StartUp`, and do what a spare process must do before. Returns None if the stream has ended."""
    while (message := stream.receive()) is not None:
        if isinstance(message, StartUp):
            if message.title != sys.argv[1]:  # it was a spare
                show_title(message.title)
                name_worker(message.title)
            return message
        assert isinstance(message, Preload), message
        import_worker(message.worker_class)
    return None


def import_worker(worker_class: str) -> Any:  # Any: a subclass of WorkerBase, whose constructor has arguments
    module, _, name = worker_class.partition(":")
    is_first = module not in sys.modules
    if is_first:
        gc.disable()  # imports make many objects and little garbage
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        if is_first:
            gc.freeze()  # libraries are never freed, so no collection need visit them
            gc.enable()


def make_worker(start_up: StartUp, rendezvous: Rendezvous | None) -> WorkerBase:
    return cast("WorkerBase", import_worker(start_up.worker_class)(start_up.config, start_up.place, rendezvous))


def send_reply(stream: BlockingStream, reply: WorkerReply | EpochReply) -> None:
    """Send a reply. If its result cannot be encoded, send a failure of the step or call instead."""
    if isinstance(reply, Ready):
        gc.collect()  # short, because it does not visit what is frozen
        gc.freeze()  # the model is never freed, and a collection that visits it would delay a step
    try:
        try:
            stream.send(reply)
        except CodecError as error:
            assert isinstance(reply, StepReply | RpcReply), reply
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
                assert isinstance(message, COMMANDS), message
                loop.put(message)
    except OSError as error:
        logger.debug("the stream was lost: %s", error)
    except BaseException:
        logger.exception("this worker cannot read a message of the executor")
        exit_now(EXIT_STREAM_ENDED)
    os._exit(EXIT_STREAM_ENDED)


if __name__ == "__main__":
    main()
