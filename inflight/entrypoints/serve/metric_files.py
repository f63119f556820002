"""`metric_files`: where several front ends keep their metrics, so that each of them can expose the sums.

prometheus_client keeps the values of each process in files, and maps these files into memory. If the disk is full, so that a
page of such a file cannot be written, the kernel kills the process. So the files are files in memory (memfd), which belong to
`inflight serve`. They stay as long as it runs. A front end that takes the place of a dead one goes on with its counts.

A folder has links to them under the names that prometheus_client expects. A server that was killed leaves its folder, and the
next server removes it. Whether a server lives is known by the lock that it holds on a file of its folder, and not by its
process id: containers that share /tmp may each have a process 1.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from inflight.errors import ConfigError

KINDS = ("counter", "gauge_mostrecent", "histogram")  # the files of one process, as prometheus_client names them
PREFIX = "inflight-metrics-"
LOCK = "lock"
UNLOCKED_SECONDS = 3600.0  # a folder without a lock belongs to a server that begins, or to an old version
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
            lock = os.open(f"{folder}/{LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            until_end.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(f"{folder}/{LOCK}.new", f"{folder}/{LOCK}")  # nobody sees it without its lock
            for index in range(num_front_ends):
                for kind in KINDS:
                    fd = os.memfd_create(f"{PREFIX}{kind}-{index}")
                    until_end.callback(os.close, fd)
                    os.truncate(fd, FIRST_BYTES)
                    open_file = f"/proc/{os.getpid()}/fd/{fd}"
                    os.symlink(open_file, f"{folder}/{kind}_{index}.db")
        except OSError as error:
            raise ConfigError(
                f"the folder for the metrics of several front ends cannot be made in {tempfile.gettempdir()}: {error}; "
                "free space there, or set TMPDIR to another folder"
            ) from error
        yield folder


def _remove_folders_of_dead_servers() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        if not _is_used(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_used(folder: Path) -> bool:
    """Whether a server holds the lock of the folder, or may be about to take it. True for a folder of another user."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime < UNLOCKED_SECONDS
        return True
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
