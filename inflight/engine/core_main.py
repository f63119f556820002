"""The program of the engine's process: `python -m inflight.engine.core_main TITLE FD ...`, with a stream for each front end.

A terminal or a supervisor sends SIGINT and SIGTERM to the whole process group. This process and its workers ignore them: the
front ends let their requests end first, and this process ends when their streams have ended.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from functools import partial

from inflight.engine.core import EngineCore
from inflight.engine.core_process import CoreServer, FrontEndLink, first_line
from inflight.engine.front_end import make_grammars, read_tokenizer
from inflight.engine.outbox import EXIT_FAILED
from inflight.errors import InflightError
from inflight.executor.executor import Executor
from inflight.executor.process import name_process
from inflight.executor.transport import EXIT_STREAM_ENDED, BlockingStream
from inflight.executor.worker_loop import failure_of
from inflight.interface.serving import EngineReady, EngineStartFailed, StartEngine

logger = logging.getLogger("inflight.engine.core_main")  # as a program its name is __main__


def main() -> int:
    start = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name_process(sys.argv[1])
    streams = [BlockingStream(socket.socket(fileno=int(fd))) for fd in sys.argv[2:]]
    start_engine = streams[0].receive((StartEngine,))
    if start_engine is None:
        return EXIT_STREAM_ENDED
    assert isinstance(start_engine, StartEngine)
    links = [FrontEndLink(index, stream) for index, stream in enumerate(streams)]
    server = CoreServer(links)
    server.start_reading()
    try:
        executor, core = _start(start_engine)
    except Exception as error:  # the front ends raise it
        if not isinstance(error, InflightError):
            logger.exception("the engine could not start")
        server.tell_all(EngineStartFailed(failure=failure_of(error)))
        server.say_goodbye()
        return EXIT_FAILED
    gc.collect()
    gc.freeze()  # libraries and model: a collection that looks through them again would delay a step
    gc.disable()  # `CoreServer` collects between steps
    logger.info("the engine is ready %.2f s after its process began", time.perf_counter() - start)
    for link in links:
        link.outbox.send(EngineReady(front_end=link.index, num_kv_cache_tokens=core.num_kv_cache_tokens))
    try:
        server.run(core, executor)
    except Exception as error:
        logger.error("the engine cannot go on: %s", first_line(error), exc_info=not isinstance(error, InflightError))
        server.say_goodbye()
        return EXIT_FAILED
    finally:
        core.close()
    return 0


def _start(start_engine: StartEngine) -> tuple[Executor, EngineCore]:
    config = start_engine.config
    begin = time.perf_counter()
    executor = Executor.get_class(config)(config)
    logger.info("imports, and the model's weights: %.2f s", time.perf_counter() - begin)
    try:
        grammars = None
        if not start_engine.skip_tokenizer_init:
            grammars = make_grammars(config, partial(read_tokenizer, config.model.folder, start_engine.tokenizer))
        return executor, EngineCore(config, executor, grammars)
    except BaseException:
        executor.shutdown()
        raise


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # does not wait for threads that still read a stream
