"""`metric_files`: where several front ends keep their metrics, so that each of them can expose the sums.

prometheus_client keeps the values of each process in files, and maps these files into memory. If the disk is full, so that a
page of such a file cannot be written, the kernel kills the process. So the files are files in memory (memfd), which belong to
`inflight serve`. They stay as long as it runs. A front end that takes the place of a dead one goes on with its counts.

A folder has links to them under the names that prometheus_client expects. A server that was killed leaves its folder, and the
next server removes it.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from inflight.errors import ConfigError

KINDS = ("counter", "gauge_mostrecent", "histogram")  # the files of one process, as prometheus_client names them
PREFIX = "inflight-metrics-"
FIRST_BYTES = 1 << 16  # prometheus_client makes a file larger when it is full; its reader needs one that is not empty


@contextlib.contextmanager
def metric_files(num_front_ends: int) -> Iterator[str]:
    """Returns a folder for PROMETHEUS_MULTIPROC_DIR, with the files of each front end.

    Raises:
        ConfigError: the folder cannot be made.
    """
    _remove_folders_of_dead_servers()
    with contextlib.ExitStack() as until_end:
        try:
            folder = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
            until_end.callback(shutil.rmtree, folder, ignore_errors=True)
            for index in range(num_front_ends):
                for kind in KINDS:
                    fd = os.memfd_create(f"{PREFIX}{kind}-{index}")
                    until_end.callback(os.close, fd)
                    os.truncate(fd, FIRST_BYTES)
                    os.symlink(f"/proc/{os.getpid()}/fd/{fd}", f"{folder}/{kind}_{index}.db")
        except OSError as error:
            raise ConfigError(
                f"the folder for the metrics of several front ends cannot be made in {tempfile.gettempdir()}: {error}; "
                "free space there, or set TMPDIR to another folder"
            ) from error
        yield folder


def _remove_folders_of_dead_servers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():  # an earlier process with this id, for example in a container
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return True
