"""What happens to the threads and processes of an object when the object goes away, or when the process is forked.

`close_with`: `del llm`, a new value for the same name and a garbage collection end the engine as `close` does.
`weakly`: what an event loop or a thread calls must not keep the engine.
`call_in_forks`: a forked process has a copy of the engine, but none of its threads, and its sockets are those of the parent. So
a copy must refuse every call, and must not end the parent's ranks.
`run_to_end`: an interrupt, such as a second Ctrl-C, ends the wait for `close`, and not `close` itself.
"""

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import ParamSpec

P = ParamSpec("P")

WAIT_SECONDS = 1.0
MAX_END_SECONDS = 30.0  # an engine ends in less time, whatever its ranks do
_OWN_THREADS = "inflight-"  # how the names of all threads of engines begin


def close_with(owner: object, close: Callable[[], object]) -> Callable[[], object]:
    """Call `close` when nobody refers to `owner` any more. `close` must not refer to it, and must be idempotent.

    A garbage collection may run in any thread, also in one that holds a lock which `close` needs, or that `close` waits for. So
    a thread of its own calls `close`. Who drops the last reference waits for it, unless this is a thread of an engine.

    At the end of the interpreter nothing is called: the threads end, and the kernel ends the processes that they have started.

    Returns:
        a function for `close` itself to call: from then on, nothing is called.
    """
    end = weakref.finalize(owner, _close, os.getpid(), close)
    end.atexit = False
    return end.detach


def _close(pid: int, close: Callable[[], object]) -> None:
    if os.getpid() == pid:
        close_in_thread(close)


def close_in_thread(close: Callable[[], object]) -> None:
    """Call `close` in a thread of its own. Waits for it, at most MAX_END_SECONDS, unless this is a thread of an engine. For
    garbage collections."""
    thread = threading.Thread(target=close, name="inflight-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or the system allows no more threads
        return
    if not threading.current_thread().name.startswith(_OWN_THREADS):
        thread.join(MAX_END_SECONDS)


def run_to_end(close: Callable[[], object]) -> None:
    """Call `close` in a thread of its own, and wait for it. Raises what `close` raises. If the wait is interrupted, `close`
    goes on."""
    ended = Future[None]()

    def run() -> None:
        try:
            close()
        except BaseException as error:  # the caller raises it
            ended.set_exception(error)
        else:
            ended.set_result(None)

    try:
        threading.Thread(target=run, name="inflight-end", daemon=True).start()
    except RuntimeError:  # the interpreter ends, or the system allows no more threads
        run()
    # in pieces: Python does not notice a signal that comes just before it begins to wait
    while not wait([ended], WAIT_SECONDS).done:
        pass
    ended.result()


def weakly(method: Callable[P, object]) -> Callable[P, None]:
    """Returns a function that calls a bound method while its object lives, and does nothing afterwards. Who keeps the function
    does not keep the object."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return call


def call_in_forks(method: Callable[[], object]) -> None:
    """Call a bound method in each process that is forked from this one, while its object lives. It must take no lock that
    another thread may have held."""
    os.register_at_fork(after_in_child=weakly(method))
