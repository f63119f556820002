"""What a process sees of a process that it has started."""

from __future__ import annotations

import signal
import socket
import time

from inflight.executor.process import MAX_STOPPED_LOOKS, ChildProcess, wait_for_end


def test_a_process_is_killed_when_it_was_found_stopped_often_enough_in_a_row() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = ChildProcess("inflight: waits", "inflight.executor.worker_main", [theirs.fileno()])
        try:
            for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP):
                process.send_signal(number)
                end = time.monotonic() + 10
                while process.is_stopped is not (number == signal.SIGSTOP):
                    assert time.monotonic() < end
                for _ in range(MAX_STOPPED_LOOKS - 1):
                    process.kill_if_stopped()
                    assert process.is_alive
            process.kill_if_stopped()
            assert not wait_for_end([process], 10)
            assert process.exit_code == -signal.SIGKILL
        finally:
            process.send_signal(signal.SIGKILL)
            wait_for_end([process], 10)
            process.close()
