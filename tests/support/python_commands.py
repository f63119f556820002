"""`inflight` and `python` as commands of a shell that a test starts. The fork server runs them, so none imports torch anew.

    shell -> small program of this name in a folder of PATH -> socket -> this process -> `PythonProcess`

The small program sends its arguments, environment, folder and streams, passes signals on, and ends with the same exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import IO

from tests.support.python_process import PythonProcess

MAX_REQUEST_BYTES = 128 << 10
PROGRAM = """#!{interpreter} -IS
import json, os, signal, socket, sys
request = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd()])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect({address!r})
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    pid = int(connection.recv(64))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(connection.recv(64) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    signal.raise_signal(-code)
sys.exit(code)
"""


@contextlib.contextmanager
def python_commands() -> Iterator[Path]:
    """Yields a folder for the front of PATH, with the commands `inflight`, `python` and `python3`."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        address, programs = f"{folder}/socket", Path(folder, "bin")
        listener.bind(address)
        listener.listen(16)
        programs.mkdir()
        for name in ("inflight", "python", "python3"):
            program = programs / name
            program.write_text(PROGRAM.format(interpreter=sys.executable, address=address))
            program.chmod(0o755)
        accepting = Thread(target=_accept, args=(listener,))
        accepting.start()
        try:
            yield programs
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(listener: socket.socket) -> None:
    running = []
    with contextlib.suppress(OSError):  # the listener was shut down
        while True:
            connection, _ = listener.accept()
            running.append(Thread(target=_run, args=(connection,)))
            running[-1].start()
    for each in running:
        each.join()


def _run(connection: socket.socket) -> None:
    """Run one command. It is killed if the program that asked for it is killed."""
    with connection, contextlib.ExitStack() as streams:
        packet, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        opened: list[IO[bytes]] = [
            streams.enter_context(os.fdopen(each, mode))
            for each, mode in zip(descriptors, ("rb", "wb", "wb"), strict=True)
        ]
        name, arguments, environment, folder = json.loads(packet)
        script = [str(Path(sysconfig.get_path("scripts")) / "inflight")] if name == "inflight" else []
        process = PythonProcess(
            [sys.executable, *script, *arguments],
            env=environment,
            cwd=folder,
            stdin=opened[0],
            stdout=opened[1],
            stderr=opened[2],
        )
        streams.close()  # the reader of a pipe waits for the end of all its writers
        watching = Thread(target=_kill_with, args=(process, connection))
        try:
            connection.send(str(process.pid).encode())
            watching.start()
            connection.send(str(process.wait()).encode())
        except OSError:  # the program was killed
            process.kill()
            process.wait()
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        watching.join()


def _kill_with(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)  # nothing comes: it returns when the program has ended
    process.kill()
