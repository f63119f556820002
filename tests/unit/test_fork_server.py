"""A forked process is what a new interpreter would be: command line, environment, streams, exit code, parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from inflight.processes.child_process import ChildProcess
from tests.support.fork_server import ForkedProcess, ForkServer, current_fork_server
from tests.support.processes import exists, have_ended, parent

SECONDS = 300.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer.spawn(["json", "tempfile"])
    assert server.wait_until_ready(SECONDS)
    yield server
    server.close()


def start(
    server: ForkServer, code: str, *arguments: str, variables: Mapping[str, str] | None = None, **options: object
) -> tuple[ForkedProcess, int]:
    """Run the code. Returns the process, and a descriptor from which its standard output can be read."""
    reading, writing = os.pipe()
    command = ["-c", textwrap.dedent(code), *arguments]
    streams = {0: 0, 1: writing, 2: 2}
    process = server.start(command, streams, {**os.environ, **(variables or {})}, **options)  # type: ignore[arg-type]
    os.close(writing)
    return process, reading


def output(server: ForkServer, code: str, *arguments: str, **options: object) -> str:
    process, reading = start(server, code, *arguments, **options)  # type: ignore[arg-type]
    with open(reading, encoding="utf-8") as stream:
        text = stream.read()
    assert process.wait(SECONDS) == 0
    return text


DESCRIBE = """
import json, os, signal, sys, tempfile
print(json.dumps({
    "argv": sys.argv, "name": __name__, "folder": os.getcwd(), "variable": os.environ.get("GIVEN"), "path": sys.path[:2],
    "temporary": tempfile.gettempdir(), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "session": os.getsid(0) == os.getpid(),
    "shown": open("/proc/self/cmdline").read().split("\\0")[3:5],
}))
"""


def test_it_looks_like_a_new_interpreter(server: ForkServer, tmp_path: Path) -> None:
    variables = {"GIVEN": "é", "TMPDIR": str(tmp_path)}
    path = [str(tmp_path), *sys.path]
    text = output(
        server, DESCRIBE, "one", "two words", variables=variables, import_path=path, folder=str(tmp_path),
        has_server=False, is_new_session=True,
    )  # fmt: skip
    assert json.loads(text) == {
        "argv": ["-c", "one", "two words"],
        "name": "__main__",
        "folder": str(tmp_path),
        "variable": "é",
        "path": path[:2],
        "temporary": str(tmp_path),
        "open": [0, 1, 2],
        "interrupt": True,
        "session": True,
        "shown": ["one", "two words"],
    }


def test_descriptors_get_their_numbers_though_these_are_swapped(server: ForkServer) -> None:
    pipes = [os.pipe() for _ in range(2)]
    (first, one), (second, two) = pipes
    low, high = sorted((one, two))
    code = f"import os; os.write({low}, b'low'); os.write({high}, b'high')"
    process = server.start(["-c", code], {0: 0, 1: 1, 2: 2, low: high, high: low}, os.environ)
    assert process.wait(SECONDS) == 0
    assert os.read(first if one == high else second, 10) == b"low"
    assert os.read(second if one == high else first, 10) == b"high"
    for pipe in pipes:
        for each in pipe:
            os.close(each)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit(-1)", 255),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os._exit(5)", 5),
    ],
)
def test_exit_codes_are_those_of_an_interpreter(server: ForkServer, code: str, wanted: int) -> None:
    reading, writing = os.pipe()
    forked = server.start(["-c", code], {0: 0, 1: 1, 2: writing}, os.environ, has_server=False)
    os.close(writing)
    plain = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert forked.wait(SECONDS) == plain.returncode == wanted
    with open(reading, encoding="utf-8") as stream:
        assert stream.read().splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert forked.poll() == forked.returncode == wanted


def test_what_was_printed_is_there_and_threads_end_first(server: ForkServer) -> None:
    text = output(
        server,
        """
        import atexit, threading, time
        atexit.register(print, "at exit")
        def late(): time.sleep(0.05); print("thread")
        threading.Thread(target=late).start()
        print("main")
        """,
    )
    assert text == "main\nthread\nat exit\n"


def test_a_module_a_script_and_a_script_beside_modules(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for command in (["-m", "script", "a"], [str(tmp_path / "script.py"), "a"]):
        reading, writing = os.pipe()
        process = server.start(command, {0: 0, 1: writing, 2: 2}, os.environ, import_path=[str(tmp_path), *sys.path])
        os.close(writing)
        with open(reading, encoding="utf-8") as stream:
            assert stream.read() == "__main__ ['a']\n"
        assert process.wait(SECONDS) == 0


def test_a_process_has_a_server_of_its_own_which_ends_with_it(server: ForkServer) -> None:
    process, reading = start(
        server,
        """
        import os, time
        from tests.support.fork_server import current_fork_server
        server = current_fork_server()
        child = server.start(["-c", "raise SystemExit(3)"], {0: 0, 1: 1, 2: 2}, os.environ)
        print(server.pid, child.wait(), flush=True)
        time.sleep(60)
        """,
    )
    with open(reading, encoding="utf-8") as stream:
        pid, code = map(int, stream.readline().split())
        assert code == 3
        assert exists(pid)
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        assert have_ended([pid], SECONDS)
        assert stream.read() == "", "the server does not keep the stream open"


def test_variables_that_imports_set_need_not_be_in_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch does this. Before there was this test, all children of forked processes were new interpreters, and nobody saw
    it."""
    (tmp_path / "sets_variable.py").write_text("import os; os.environ['TORCH_SET_BY_IMPORT'] = '1'")
    monkeypatch.syspath_prepend(tmp_path)
    with contextlib.closing(ForkServer.spawn(["sets_variable"])) as server:
        assert server.wait_until_ready(SECONDS)
        assert_children_are_forked(server)


def test_processes_of_all_generations_are_forked() -> None:
    """The server of this test run forks them. It has imported all that an engine imports."""
    server = current_fork_server()
    assert server is not None
    assert server.wait_until_ready(SECONDS)
    assert_children_are_forked(server)


def assert_children_are_forked(server: ForkServer) -> None:
    """A process that `server` forks can fork another one, and this one can, too."""
    code = """
        import os
        from tests.support.fork_server import current_fork_server as current
        print(current().can_start(os.environ), flush=True)
        """
    in_a_child = f"""
        import os
        from tests.support.fork_server import current_fork_server as current
        assert current().start(["-c", {textwrap.dedent(code)!r}], {{0: 0, 1: 1, 2: 2}}, os.environ).wait() == 0
        """
    assert output(server, code) == output(server, in_a_child) == "True\n"


def test_signals_reach_it_until_it_has_ended(server: ForkServer) -> None:
    process, reading = start(server, "import time; print('runs', flush=True); time.sleep(60)")
    with open(reading, encoding="utf-8") as stream:
        assert stream.readline() == "runs\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.0)
        process.terminate()
        assert process.wait(SECONDS) == -signal.SIGTERM
    process.kill()  # it does nothing now


def test_without_its_server_a_process_goes_on_and_no_other_starts() -> None:
    server = ForkServer.spawn([])
    assert server.wait_until_ready(SECONDS)
    process, reading = start(server, "import time; print('runs', flush=True); time.sleep(60)", has_server=False)
    with open(reading, encoding="utf-8") as stream:
        assert stream.readline() == "runs\n"
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(OSError, match=r"ended|Broken pipe|reset"):
            start(server, "")
        with pytest.raises(OSError, match="Bad file descriptor"):
            start(server, "")
        assert process.poll() is None
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL, "the code is unknown"
    server.close()


def test_a_server_that_is_not_ready_starts_nothing_and_does_not_let_others_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "long_import.py").write_text("import time; time.sleep(300)")
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer.spawn(["long_import"])
    assert not server.can_start(os.environ)
    server.close()
    server = ForkServer.spawn(["no_such_module"])
    assert not server.wait_until_ready(SECONDS)
    assert not server.can_start(os.environ)
    server.close()


def test_a_request_that_is_too_large_is_refused_and_harms_nothing(server: ForkServer) -> None:
    with pytest.raises(OSError, match="is too large"):
        start(server, "", variables={"LONG": "x" * 200_000})
    assert output(server, "print(1)") == "1\n"


def test_variables_that_imports_read_must_be_equal(server: ForkServer) -> None:
    free = ("INFLIGHT_LOG_LEVEL", "OMP_PROC_BIND", "PROMETHEUS_MULTIPROC_DIR", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR")
    assert server.can_start({**os.environ, **dict.fromkeys(free, "/elsewhere")})
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED", "PROMETHEUS_DISABLE_CREATED_SERIES", "TRITON_INTERPRET"):
        assert not server.can_start({**os.environ, name: "17"}), name


def test_prometheus_client_reads_its_variable_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        monkeypatch.delenv(name, raising=False)
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    code = "import prometheus_client as p; print(p.Counter('c', 'a count')._value._multiprocess)"
    with contextlib.closing(ForkServer.spawn(["prometheus_client"])) as server:
        assert server.wait_until_ready(SECONDS)
        assert [output(server, code), output(server, code, variables=variables)] == ["False\n", "True\n"]
    assert list(tmp_path.glob("counter_*.db"))


def test_child_processes_come_from_the_server_of_this_process() -> None:
    server = current_fork_server()
    assert server is not None, "tests/conftest.py has started it"
    assert server.wait_until_ready(SECONDS)
    reading, writing = os.pipe()
    process = ChildProcess("inflight: test", "inflight.executor.worker_main", [reading])
    assert server.pid == parent(process.pid)
    os.close(writing)
    os.close(reading)
    process.send_signal(signal.SIGKILL)
    assert process.exit_code is None or process.exit_code == -signal.SIGKILL
    assert have_ended([process.pid], SECONDS)
    assert process.exit_code == -signal.SIGKILL
    process.close()


@pytest.mark.usefixtures("new_interpreters")
def test_without_a_server_child_processes_are_new_interpreters() -> None:
    reading, writing = os.pipe()
    process = ChildProcess("inflight: test", "inflight.executor.worker_main", [reading])
    assert os.getpid() == parent(process.pid)
    process.send_signal(signal.SIGKILL)
    assert have_ended([process.pid], SECONDS)
    process.close()
    os.close(writing)
    os.close(reading)
