"""Long calls: calls of a thread during which other threads can run Python, because they release the interpreter's lock.

If the compute thread wakes another thread and then goes on in Python, both need the lock, and so does every thread that the
other one wakes. Then the compute thread waits for the lock whenever it has released it for a moment, as most operations of
torch do: 0.4 to 0.6 ms in each decode step (2 cores of a Zen 4). So it wakes others directly before a long call.
"""

import threading


class LongCalls(threading.local):
    """A thread may set the attribute `before`: to what it wants to do directly before its long calls."""

    @staticmethod
    def before() -> None:
        """Call this directly before a long call. By default it does nothing."""


LONG_CALLS = LongCalls()
