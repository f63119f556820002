"""Python programs as processes beside a test. Each pytest worker has a fork server, which has imported torch already.

A test run starts more than a thousand processes, and the import of torch takes a second or two of processor time in each.
`PythonProcess` is `subprocess.Popen` for Python programs. With `shared_imports` the engine's own processes come from the
server, too. A new interpreter is started if the server is not ready, if a variable that imports read differs
(`ForkServer.can_start`), or if PYTHONPATH has folders that this process does not import from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.entrypoints.apis import APIS
from tests.support.fork_server import ForkedProcess, ForkServer, current_fork_server, use_fork_server

ROOT = Path(__file__).resolve().parents[2]
# What the processes of the tests import. The programs themselves (`python -m`) are not here: they run as __main__.
IMPORTED = (
    "torch",
    "inflight.worker.worker",
    "inflight.engine.process.control_socket",
    "inflight.engine.process.head_links",
    "inflight.engine.core.engine_core",
    "inflight.engine.start.model_files",
    "inflight.engine.serving.async_llm",
    "inflight.executor.worker_loop",
    "inflight.executor.multiproc",
    "inflight.executor.uniproc",
    "inflight.entrypoints.llm",
    "inflight.entrypoints.cli.main",
    "inflight.entrypoints.http.app",
    "inflight.entrypoints.serve.command",
    "inflight.entrypoints.serve.engine_start",
    "inflight.entrypoints.serve.headless",
    "inflight.entrypoints.serve.server",
    "inflight.entrypoints.serve.supervisor",
    "inflight.metrics.serving",
    "inflight.models.transformers_fallback.model",
    "inflight.structured_output.llguidance_backend",
    "llguidance",
    "transformers.modeling_utils",
    "uvloop",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl",
    "tests.conformance.scripted_worker",
    *(api.routes for api in APIS.values()),
)


@contextlib.contextmanager
def shared_imports(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let this process and those below it start Python programs by a new fork server, which has imported libraries with this
    environment (None: that of this process). The imports run beside the first tests.

    On a machine for GPU tests the packages of the HTTP server may be missing. There each program gets a new interpreter."""
    if importlib.util.find_spec("fastapi") is None:
        yield
        return
    before, server = current_fork_server(), ForkServer.spawn(IMPORTED, environment)
    use_fork_server(server)
    try:
        yield
    finally:
        use_fork_server(before)
        server.close()


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Let this process start Python programs as users do."""
    server = current_fork_server()
    use_fork_server(None)
    try:
        yield
    finally:
        use_fork_server(server)


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which the new interpreter `pid` began, by the kernel. Of a forked process the kernel shows the
    environment of its server, so this needs `new_interpreters`."""
    assert current_fork_server() is None
    while not (text := Path(f"/proc/{pid}/environ").read_text()):
        time.sleep(0.001)  # the kernel shows nothing for a moment in which the program begins
    return dict(line.partition("=")[::2] for line in text.split("\0"))


class PythonProcess(subprocess.Popen[Any]):
    """`subprocess.Popen` of `[sys.executable, ...]`. After this may stand -P, -u, -c, -m or a script. Of `Popen`'s options
    it takes the streams, `env`, `cwd`, `pass_fds`, `text` and `start_new_session`."""

    _forked: ForkedProcess | None = None

    def _execute_child(  # the signature of `subprocess.Popen._execute_child` in Python 3.11 to 3.13
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, *others: Any,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        command = [str(each) for each in args]
        server = current_fork_server()
        assert command[0] == sys.executable and preexec_fn is None and not shell, command
        path = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
        has_other_sources = not {str(ROOT), *sys.path}.issuperset(path)
        if server is None or has_other_sources or not server.can_start(environment):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
            )  # fmt: skip
            return
        streams = {number: number if each == -1 else each for number, each in enumerate((p2cread, c2pwrite, errwrite))}
        folder = str(Path.cwd() if cwd is None else cwd)
        options = {"-c", "-m", "-P"} & set(command[1:4])
        first = [] if "-P" in options else [folder] if options else [str(Path(command[1]).parent)]
        is_new_session = bool(others[5])
        try:
            self._forked = server.start(
                command[1:],
                {**streams, **{each: each for each in pass_fds}},
                environment,
                import_path=[*first, *path, *sys.path],
                folder=folder,
                is_new_session=is_new_session,
            )
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self.pid, self._child_created = self._forked.pid, True

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(_deadstate, **more)  # type: ignore[misc,no-any-return]
        if self.returncode is None and (code := self._forked.poll()) is not None:
            self._record_end(code)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            self._record_end(self._forked.wait(timeout))
        return self.returncode

    def _record_end(self, code: int) -> None:
        assert self._forked is not None
        if self.returncode is None:
            self.returncode = code
            os.close(self._forked.pidfd)


def run_python(
    command: Sequence[Any],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with a `PythonProcess`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with PythonProcess(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.wait(), stdout, stderr)
    if check:
        done.check_returncode()
    return done
