"""`ChildProcess`: a process that the engine starts on this machine, and watches by a pidfd (Linux only) until it ends.

The new process gets the standard streams (stdin is empty), the descriptors of its byte streams, and the import path of this
process. It ends when its byte streams end. The kernel kills it when the thread that started it ends: child.py.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import ClassVar, Protocol

from inflight import envs, logs
from inflight.config.free_memory import count_memory_kills
from inflight.config.openmp import without_placement
from inflight.processes.working_folder import working_folder

logger = logging.getLogger(__name__)

SIGTERM_SECONDS = 0.5
SIGKILL_SECONDS = 5.0  # the kernel may need time to free much memory
STOPPED_LOOK_SECONDS = 0.25  # the time between two calls of `stays_stopped`
MAX_STOPPED_LOOKS = 3  # more than 2, so that Ctrl-Z and `fg`, which reach all processes, do not end any
# Seconds before the second try to start a process, the third, and so on. The last number repeats.
PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
_PR_SET_NAME = 15


def name_process(title: str, short_name: str | None = None) -> None:
    """Name this process. Call it when a program begins, and when a spare process is used. Log lines show `title`, and `top`
    shows `short_name`."""
    logs.configure(title.removeprefix("inflight: "), replaces_all=True)
    logging.getLogger("inflight").setLevel(envs.log_level())
    name = short_name or title.replace(": ", "-").replace(" ", "-")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


class ForkedProcess(Protocol):
    """A process that `ChildProcess.fork` has started. `wait` and `returncode` are as in `subprocess.Popen`.

    Attributes:
        pidfd: readable when the process has ended. `ChildProcess` closes it.
    """

    pid: int
    pidfd: int
    returncode: int | None

    def wait(self) -> int: ...


Fork = Callable[[Sequence[str], Sequence[int], Mapping[str, str]], ForkedProcess | None]


class ChildProcess:
    """
    Args:
        title: the program's first argument, shown in log lines.
        module: the module that it runs, as by `python -m`.
        stream_fds: the descriptors of the program's byte streams, passed as arguments. The caller closes its copies.
        keeps_secrets: whether the process gets the cluster's token (INFLIGHT_CLUSTER_TOKEN).
        variables: further environment variables of the process.

    Attributes:
        fork: starts a program in another way than by a new interpreter. Its arguments are the program and its arguments, the
            descriptors of its streams, and its environment. It returns None if it cannot start this program. It is None but
            in tests, where processes share their imports (tests/support/fork_server.py).
    """

    fork: ClassVar[Fork | None] = None

    def __init__(
        self,
        title: str,
        module: str,
        stream_fds: Sequence[int],
        *,
        keeps_secrets: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        arguments = [module, title, *map(str, stream_fds)]
        environment = child_environment({**os.environ, **(variables or {})}, sys.path, keeps_secrets=keeps_secrets)
        self.title = title
        self._popen: subprocess.Popen[bytes] | ForkedProcess
        self._was_killed = False  # whether this object has sent SIGKILL
        self._memory_kills = count_memory_kills()  # before the process was started
        self._num_stopped = 0  # how many calls of `stays_stopped` in a row found the process stopped
        fork = ChildProcess.fork
        forked = None if fork is None else fork(arguments, stream_fds, environment)
        if forked is not None:
            self._popen, self.pid, self.pidfd = forked, forked.pid, forked.pidfd
            return
        self._popen = subprocess.Popen(
            [sys.executable, *child_command(os.getpid(), arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=stream_fds,
            env=environment,
            cwd=working_folder(),
        )
        self.pid = self._popen.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # this process has no free descriptor
            self._popen.kill()
            self._popen.wait()
            raise

    def fileno(self) -> int:
        """Returns a descriptor that is readable when the process has ended."""
        return self.pidfd

    @property
    def is_alive(self) -> bool:
        """Whether the process runs. Uses the pidfd, because `Popen.poll` returns None while another thread polls."""
        if self._popen.returncode is not None:
            return False
        return not wait([self.pidfd], 0)

    @property
    def exit_code(self) -> int | None:
        """The exit code as in `subprocess`: negative for a signal, None while the process lives. If the process has ended, this
        also removes it from the kernel's table (it is no longer a zombie)."""
        return None if self.is_alive else self._popen.wait()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process. A debugger does not stop it in this sense."""
        return _status_letter(Path(f"/proc/{self.pid}/stat")) == "T"

    def stays_stopped(self) -> bool:
        """Look whether the process is stopped, every STOPPED_LOOK_SECONDS. Returns True when MAX_STOPPED_LOOKS looks in a row
        found it stopped. The looks are counted, and not the seconds: when this process was stopped, too, it has not looked."""
        self._num_stopped = self._num_stopped + 1 if self.is_stopped else 0
        return self._num_stopped >= MAX_STOPPED_LOOKS

    def kill_if_stopped(self) -> None:
        """Kill the process if it `stays_stopped`."""
        if self.stays_stopped():
            logger.error("%s (pid %d) is stopped by a signal, so it is killed", self.title, self.pid)
            self.send_signal(signal.SIGKILL)

    @property
    def state(self) -> str:
        """Returns text that says whether the process runs, or how it ended. Never waits."""
        code = self.exit_code
        if code is None:
            return f"process {self.pid} {'is stopped by a signal' if self.is_stopped else 'is alive'}"
        if code < 0:
            why = self._likely_cause() if -code == signal.SIGKILL and not self._was_killed else ""
            return f"process {self.pid} was killed by {_signal_name(-code)}{why}"
        return f"process {self.pid} ended with exit code {code}"

    def _likely_cause(self) -> str:
        """Why the process got a SIGKILL that this object has not sent."""
        if count_memory_kills() > self._memory_kills:
            return ", because memory ran out: the kernel has ended a process for lack of memory"
        return ", most likely by the system for lack of memory, or by an operator"

    @property
    def may_run(self) -> bool:
        """Whether a thread of the process runs, waits for a core, or waits for a disk."""
        try:
            threads = list(Path(f"/proc/{self.pid}/task").iterdir())
        except OSError:  # the process has ended
            return True
        return any(_status_letter(thread / "stat") in "RD" for thread in threads)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self.is_alive:
            self._was_killed = self._was_killed or number == signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Release a process that has ended, or that cannot be ended. Call it once, after all other methods."""
        if self.exit_code is None:
            logger.error("%s (pid %d) did not end after SIGKILL; it is left running", self.title, self.pid)
        os.close(self.pidfd)


def child_command(parent: int, arguments: Sequence[str]) -> list[str]:
    """Returns the interpreter's arguments for a child of the process `parent`. 0: see child.py."""
    return ["-P", "-m", "inflight.processes.child", str(parent), *arguments]


def pause_seconds(num_failed: int) -> float:
    """Returns how long to wait after `num_failed` tries, at least one, before a process is started again. What is missing, such
    as memory, may come back."""
    return PAUSES[min(num_failed, len(PAUSES)) - 1]


def wait_for_end(processes: Iterable[ChildProcess], seconds: float) -> list[ChildProcess]:
    """Wait until all processes have ended, but at most `seconds`. Returns those that still live."""
    end = time.monotonic() + seconds
    alive = [process for process in processes if process.is_alive]
    while alive and (left := end - time.monotonic()) > 0:
        wait([process.pidfd for process in alive], left)
        alive = [process for process in alive if process.is_alive]
    return alive


def wait_for_first_end(processes: Iterable[ChildProcess], seconds: float) -> None:
    """Wait until at least one process has ended, but at most `seconds`."""
    wait([process.pidfd for process in processes], seconds)


def stop_processes(processes: Iterable[ChildProcess], grace_seconds: float) -> None:
    """Wait until the processes end by themselves. Then send SIGTERM, then SIGKILL. A process that stays stopped by a signal
    cannot end by itself, so it is killed at once."""
    end = time.monotonic() + grace_seconds
    alive = wait_for_end(processes, 0.0)
    while alive and (left := end - time.monotonic()) > 0:
        for process in alive:
            process.kill_if_stopped()
        alive = wait_for_end(alive, min(left, STOPPED_LOOK_SECONDS))
    for number, seconds in ((signal.SIGTERM, SIGTERM_SECONDS), (signal.SIGKILL, SIGKILL_SECONDS)):
        for process in alive:
            logger.warning("%s (pid %d) did not end in time; sending %s", process.title, process.pid, number.name)
            process.send_signal(number)
        alive = wait_for_end(alive, seconds)


def child_environment(
    environment: Mapping[str, str], import_path: Iterable[str], *, keeps_secrets: bool = False
) -> dict[str, str]:
    """Returns the environment of the child: with the import path, and the level and format of the log, of this process. Without
    API keys, and without the variables with which OpenMP places threads. `keeps_secrets`: as in `ChildProcess`."""
    path = os.pathsep.join(entry or working_folder() for entry in import_path)
    result = {**without_placement(environment), "PYTHONPATH": path}
    for name in (
        *envs.API_KEY_VARIABLES,
        envs.ADMIN_KEY_VARIABLE,
        *(() if keeps_secrets else ("INFLIGHT_CLUSTER_TOKEN",)),
    ):
        result.pop(name, None)
    level = logging.getLogger("inflight").level
    if level != logging.NOTSET:  # `-v`, or the program that uses Inflight, has set it
        known = [name for name in ("DEBUG", "INFO", "WARNING", "ERROR") if getattr(logging, name) <= max(level, 10)]
        result["INFLIGHT_LOG_LEVEL"] = known[-1]
    if logs.is_json():
        result["INFLIGHT_LOG_FORMAT"] = "json"
    elif logs.is_configured():  # --log-format goes before the variable
        result.pop("INFLIGHT_LOG_FORMAT", None)
    return result


def _status_letter(stat: Path) -> str:
    """Returns the state letter of a process or thread, as `ps` shows it; "?" if the file cannot be read."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
