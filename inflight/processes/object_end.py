"""What happens to the threads and processes of an object when the object goes away, or when the process is forked.

`close_with`: `del llm`, a new value for the same name and a garbage collection end the engine as `close` does.
`call_in_forks`: a forked process has a copy of the engine, but none of its threads, and its sockets are those of the parent. So
a copy must refuse every call, and must not end the parent's ranks.
"""

import os
import threading
import weakref
from collections.abc import Callable

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
    if os.getpid() != pid:
        return
    thread = threading.Thread(target=close, name="inflight-end", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, or the system allows no more threads
        return
    if not threading.current_thread().name.startswith(_OWN_THREADS):
        thread.join(MAX_END_SECONDS)


def call_in_forks(method: Callable[[], object]) -> None:
    """Call a bound method in each process that is forked from this one, while its object lives. It must take no lock that
    another thread may have held."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := reference()) is not None:
            alive()

    os.register_at_fork(after_in_child=call)
