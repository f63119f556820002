"""A Ray cluster on this machine, in a process of its own: `python -m tests.support.ray_cluster PARENT_PID FILE CPUS ...`

It writes the address of its head into FILE, and ends when the process PARENT_PID ends. `shared_cluster` starts one for all
processes of a test run, because a cluster takes seconds to start and much memory.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from inflight.processes.child_process import child_command
from tests.support.processes import exists
from tests.support.waits import wait_until

OBJECT_STORE_BYTES = 80_000_000
MOST_STARTS = 3  # on a busy machine Ray now and then gives up its own start


def shared_cluster(folder: Path) -> str:
    """Returns the address of the cluster of this test run. `folder`: the same for all its processes."""
    file = folder / "ray_address"
    with (folder / "ray_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_worker = "PYTEST_XDIST_WORKER" in os.environ
        for _ in range(MOST_STARTS):
            if not file.exists():
                start_cluster(file, os.getppid() if is_worker else os.getpid(), 16)
    assert file.exists(), f"Ray has not started: {file.with_suffix('.log').read_text()}"
    return file.read_text()


def start_cluster(file: Path, parent: int, *cpus: int) -> int:
    """Returns the process id of the cluster's keeper. SIGTERM ends the cluster."""
    arguments = [str(parent), str(file), *map(str, cpus)]
    with file.with_suffix(".log").open("a") as log:
        started = subprocess.run(
            [sys.executable, *child_command(0, ["tests.support.ray_cluster"]), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    pid = int(started.stdout)
    wait_until(lambda: file.exists() or not exists(pid))
    return pid


def main() -> None:
    _, parent, file, *cpus = sys.argv
    ends = os.pidfd_open(int(parent))
    told_to_end, told = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(told, b"x"))
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_TMPDIR"] = folder
        from ray.cluster_utils import Cluster  # it reads the variable

        cluster = Cluster()
        for count in cpus:
            cluster.add_node(num_cpus=int(count), object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
        unfinished = Path(file).with_suffix(".unfinished")
        unfinished.write_text(cluster.address)
        unfinished.rename(file)
        select.select([ends, told_to_end], [], [])
        cluster.shutdown()


if __name__ == "__main__":
    main()
