"""`ForkServer`: a process that has imported the libraries already, and forks a copy of itself for each process that is wanted.

The import of torch takes longer than all else at the start of a process, and each process that imports it has its own copy of
the objects in memory. A fork takes some milliseconds, and shares the memory.

    this process  -- request: command, environment, descriptors -->  fork server  -- fork -->  process
                  <-- pidfd, pipe on which the exit code will come --

The server has one thread and opens no device, so a fork is safe. A forked process starts as a new interpreter would: with its
own command line, environment, import path, descriptors and signal handlers. Only its imports are done already. Its parent is
the server. Side effects:

1. If the process that started the server ends, the kernel kills the server. The processes that it has forked keep running,
   but for those that end with their parent (child.py).
2. If `has_server` is set, a forked process forks itself once more before it runs its command. This copy is its own fork server.
3. `use_fork_server` sets the server of this process, which `ChildProcess` then uses. It is global state, like `os.environ`: a
   process has at most one fork server.

Only the tests use it: users start few processes.

Some variables of the environment are read while libraries are imported (`READ_BY_IMPORTS`). If a command needs other values
of these variables, the server cannot start it (`ForkServer.can_start`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn

from inflight.config.openmp import without_placement
from inflight.processes.child_process import ChildProcess, child_command
from inflight.processes.command_line import address_range, overwrite
from inflight.processes.parent import PR_SET_PDEATHSIG, die_with_parent
from inflight.processes.working_folder import working_folder

logger = logging.getLogger(__name__)

MODULE = "tests.support.fork_server"
STARTS_NO_PROCESSES = ("inflight.executor.worker_main", "inflight.executor.ray_placement")
MAX_REQUEST_BYTES = 128 << 10  # a packet of a Unix socket has at least this room
MAX_DESCRIPTORS = 32
MAX_ANSWER_SECONDS = 60.0
READY = b"ready"
TITLE_ROOM = 4096  # bytes that pad the server's command line; a forked process writes its own over it, for `ps`
READ_BY_IMPORTS = (
    *("PYTHON", "ATEN_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_"),
    *("PROMETHEUS_", "TOKENIZERS_", "TORCH_", "TORCHINDUCTOR_", "TRANSFORMERS_", "TRITON_"),
)
# These may differ. A request has the import path. `_become` opens the streams, and lets prometheus_client read its variable
# again. `torch._dynamo` sets TORCHINDUCTOR_CACHE_DIR itself when it is imported, and no test needs another folder.
NOT_COMPARED = frozenset({"PYTHONPATH", "PYTHONUNBUFFERED", "PROMETHEUS_MULTIPROC_DIR", "TORCHINDUCTOR_CACHE_DIR"})


@dataclass(frozen=True)
class ForkRequest:
    """
    Attributes:
        arguments: what follows the interpreter in the command: `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`.
        environment: all variables of the process.
        import_path: `sys.path` of the process.
        folder: its working directory.
        numbers: the descriptors of the process, in the order in which they are sent. 0, 1 and 2 are among them.
        has_server: whether the process gets a fork server of its own.
        is_new_session: whether it leads a new session.
    """

    arguments: list[str]
    environment: dict[str, str]
    import_path: list[str]
    folder: str
    numbers: list[int]
    has_server: bool
    is_new_session: bool


class ForkedProcess:
    """A process that a fork server has started. It is a child of the server, not of this process. It has `poll`, `wait`,
    `send_signal`, `terminate` and `kill`, as `subprocess.Popen` has them.

    Attributes:
        pidfd: readable when the process has ended. The caller owns it, and closes it.
        returncode: as in `subprocess.Popen`. -SIGKILL if the server ended before it could report the exit code.
    """

    def __init__(self, pid: int, pidfd: int, result: int) -> None:
        self.pid, self.pidfd, self._result = pid, pidfd, result
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._read_code() if wait([self.pidfd], 0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not wait([self.pidfd], timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._read_code()

    def _read_code(self) -> int:
        with self._lock:
            if self.returncode is None:
                code = os.read(self._result, 64)  # the server writes it soon after the end; b"" if it has died
                os.close(self._result)
                self.returncode = int(code) if code else -signal.SIGKILL
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A fork server, seen by the process that uses it. Any thread may call `start`.

    Attributes:
        pid: of the server's process.
    """

    def __init__(
        self, control: socket.socket, pid: int, environment: Mapping[str, str], *, is_ready: bool = False
    ) -> None:
        self._control, self.pid, self._is_ready = control, pid, is_ready
        control.settimeout(MAX_ANSWER_SECONDS)
        self._imported = _read_by_imports(environment)
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[bytes] | None = None

    @classmethod
    def spawn(cls, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> ForkServer:
        """Start a server that imports `modules`, in this order.

        Call it in the main thread: the kernel kills the server when the thread that started it ends.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = without_placement(os.environ if environment is None else environment)
        command = [
            sys.executable,
            "-P",
            "-m",
            MODULE,
            str(theirs.fileno()),
            str(os.getpid()),
            *modules,
            "." * TITLE_ROOM,
        ]
        with theirs:
            path = {"PYTHONPATH": os.pathsep.join(entry or working_folder() for entry in sys.path)}
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment, **path},
                cwd=working_folder(),
            )
        server = cls(ours, popen.pid, environment)
        server._popen = popen
        return server

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Whether this server has done its imports, and a process with this environment may come from it. Never waits."""
        return self.is_ready and _read_by_imports(environment) == self._imported

    @property
    def is_ready(self) -> bool:
        """Whether the server has done its imports."""
        return self._is_ready or self.wait_until_ready(0.0)

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for the server's imports, but at most `seconds`. Returns whether they are done."""
        with self._lock:
            if not self._is_ready and self._control.fileno() >= 0 and wait([self._control], seconds):
                self._is_ready = self._control.recv(len(READY)) == READY
                if not self._is_ready:  # an import has failed
                    self._control.close()
            return self._is_ready

    def start(
        self,
        arguments: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        *,
        import_path: Sequence[str] | None = None,
        folder: str | None = None,
        has_server: bool = True,
        is_new_session: bool = False,
    ) -> ForkedProcess:
        """Fork a process. The server must be ready. The arguments are the attributes of `ForkRequest`.

        Args:
            descriptors: number of a descriptor in the process -> descriptor of this process.

        Raises:
            OSError: the request is too large; or the server is gone, does not answer within MAX_ANSWER_SECONDS, or its answer
                cannot be received. After all but the first, later calls raise it, too.
        """
        request = ForkRequest(
            arguments=list(arguments),
            environment=dict(environment),
            import_path=[entry or working_folder() for entry in (sys.path if import_path is None else import_path)],
            folder=folder or working_folder(),
            numbers=list(descriptors),
            has_server=has_server,
            is_new_session=is_new_session,
        )
        packet = json.dumps(asdict(request)).encode()
        if len(packet) > MAX_REQUEST_BYTES or len(descriptors) > MAX_DESCRIPTORS:
            raise OSError(f"a request of {len(packet)} bytes and {len(descriptors)} descriptors is too large")
        with self._lock:
            received: list[int] = []
            try:
                socket.send_fds(self._control, [packet], list(descriptors.values()))
                answer, received, _, _ = socket.recv_fds(self._control, 64, 2)
                if len(received) != 2:
                    raise OSError("the fork server has ended")
            except BaseException:
                self._control.close()  # a late answer would be taken for that of the next request
                for each in received:
                    os.close(each)
                raise
        return ForkedProcess(int(answer), *received)

    def move_above(self, number: int) -> int:
        """Give the control socket a descriptor of at least `number`. Returns it."""
        moved = socket.socket(fileno=fcntl.fcntl(self._control.fileno(), fcntl.F_DUPFD_CLOEXEC, number))
        moved.settimeout(MAX_ANSWER_SECONDS)
        self._control.close()
        self._control = moved
        return moved.fileno()

    def close(self) -> None:
        """End the server. Its processes go on."""
        self._control.close()
        if self._popen is not None:
            self._popen.kill()  # it may still import
            self._popen.wait()


class _Current:
    """The fork server of this process."""

    server: ForkServer | None = None


def current_fork_server() -> ForkServer | None:
    return _Current.server


def use_fork_server(server: ForkServer | None) -> None:
    """Let this process start its `ChildProcess`es by `server`; None: by new interpreters."""
    _Current.server = server
    ChildProcess.fork = None if server is None else fork


def fork(arguments: Sequence[str], stream_fds: Sequence[int], environment: Mapping[str, str]) -> ForkedProcess | None:
    """Start the program by the fork server of this process. Returns None if this process has no fork server, or if it
    cannot start the program. The first of `arguments` is its module."""
    server = current_fork_server()
    if server is None or not server.can_start(environment):
        return None
    try:
        with open(os.devnull, "rb") as nothing:
            descriptors = {0: nothing.fileno(), 1: 1, 2: 2, **{fd: fd for fd in stream_fds}}
            command = child_command(server.pid, arguments)
            return server.start(command, descriptors, environment, has_server=arguments[0] not in STARTS_NO_PROCESSES)
    except OSError as error:
        logger.warning("the fork server failed, so a new interpreter is started: %s", error)
        return None


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in without_placement(environment).items()
        if name.startswith(READ_BY_IMPORTS) and name not in NOT_COMPARED
    }


# -- in the server and in the processes that it forks --------------------------------------------------------------


def main() -> NoReturn:
    """Serve requests. In a forked process, run its command."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal or a supervisor sends these to the whole process group
    gc.disable()
    # as the kernel has it: some libraries set variables while they are imported, and requests do not have these
    before = dict(line.partition("=")[::2] for line in Path("/proc/self/environ").read_text().split("\0") if line)
    for module in sys.argv[3:-1]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection visits what is shared, so it stays shared
    gc.enable()
    control.send(READY)
    request, descriptors = _serve(control)
    while request.has_server and (copy := _fork_own_server(before)) is not None:
        request, descriptors = _serve(copy)  # returns only in a process that the copy has forked
    _become(request, descriptors)
    _end(_run(request))


def _serve(control: socket.socket) -> tuple[ForkRequest, list[int]]:
    """Answer requests until the other end is closed, and then end this process. Returns only in a forked process: its request
    and its descriptors."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and the pipe for its exit code
    while True:
        ready, _, _ = select.select([control.fileno(), *children], [], [])
        for pidfd in children.keys() & ready:
            pid, result = children.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # nobody asks for the exit code any more
                os.write(result, str(code).encode())
            os.close(result)
            os.close(pidfd)
        if control.fileno() not in ready:
            continue
        try:
            packet, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        except OSError:
            packet = b""
        if not packet:
            os._exit(0)
        request = ForkRequest(**json.loads(packet))
        reader, result = os.pipe()
        pid = os.fork()
        if pid == 0:
            for each in (control.detach(), reader, result, *children, *(pipe for _, pipe in children.values())):
                os.close(each)
            return request, descriptors
        pidfd = os.pidfd_open(pid)
        children[pidfd] = pid, result
        socket.send_fds(control, [str(pid).encode()], [pidfd, reader])
        for each in (reader, *descriptors):
            os.close(each)


def _fork_own_server(environment: Mapping[str, str]) -> socket.socket | None:
    """Fork a copy of this process as its fork server. Returns None in this process, and the control socket in the copy.
    `environment`: the variables of the server before its imports."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        use_fork_server(ForkServer(ours, pid, environment, is_ready=True))
        return None
    die_with_parent(parent)
    kept = theirs.detach()
    _close_all_but({0, 1, 2, kept})
    return socket.socket(fileno=kept)


def _close_all_but(kept: Container[int]) -> None:
    for each in map(int, os.listdir("/proc/self/fd")):
        if each not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(each)


def _become(request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Take over descriptors, environment, folder and signal handlers, as after `execve`."""
    server = current_fork_server()
    first_free = max(*request.numbers, *descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, first_free) for each in descriptors]
    kept = set(request.numbers)
    if server is not None:
        kept.add(server.move_above(first_free))
    for number, each in zip(request.numbers, moved, strict=True):
        os.dup2(each, number, inheritable=True)
    _close_all_but(kept)
    if request.is_new_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    # possible because the imports make no metric
    if (values := sys.modules.get("prometheus_client.values")) is not None:
        values.ValueClass = values.get_value_class()  # type: ignore[attr-defined]
    sys.path[:] = request.import_path
    importlib.invalidate_caches()
    tempfile.tempdir = None  # found anew, from this environment
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    is_unbuffered = bool(request.environment.get("PYTHONUNBUFFERED")) or "-u" in request.arguments
    binary = io.FileIO(1, "wb", closefd=False)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(
        binary if is_unbuffered else io.BufferedWriter(binary), "utf-8", write_through=is_unbuffered
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "wb", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
    )
    overwrite("\0".join([sys.executable, *request.arguments]).encode(), *address_range())


def _run(request: ForkRequest) -> int:
    """Run the command in this process, as the interpreter would. Returns the exit code; if it is negative, a signal."""
    options = list(request.arguments)
    while options[0] in ("-P", "-u"):  # `_become` has done what they say
        options.pop(0)
    sys.orig_argv = [sys.executable, *request.arguments]
    # runpy warns if a module has been imported before. A new interpreter has imported none, so it writes nothing to stderr.
    warnings.filterwarnings("ignore", message=".* found in sys.modules", category=RuntimeWarning)
    try:
        match options:
            case ["-m", module, *arguments]:
                sys.argv = ["-m", *arguments]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *arguments]:
                sys.argv = ["-c", *arguments]
                sys.modules["__main__"] = main = types.ModuleType("__main__")
                exec(compile(code, "<string>", "exec"), vars(main))
            case [script, *arguments]:
                sys.argv = [script, *arguments]
                runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> NoReturn:
    """End this process as the interpreter would, but without the destruction of all modules (with torch it takes 0.1 s)."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    os._exit(code)


if __name__ == "__main__":
    # this file runs as `__main__`; other modules see the `_Current` of this name
    from tests.support import fork_server

    fork_server.main()
