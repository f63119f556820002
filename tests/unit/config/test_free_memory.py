from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.config import free_memory

KIB = 1024


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 1000 * KIB, id="no control groups"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5000\n",
                "sys/fs/cgroup/a/memory.max": "9000\n",
                "sys/fs/cgroup/a/memory.current": "8500\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 200\n",
            },
            700,
            id="version 2, the parent limits",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/of/the/host\n",
                "sys/fs/cgroup/memory.max": "3000\n",
                "sys/fs/cgroup/memory.current": "1000\n",
            },
            2000,
            id="version 2, in a container without a namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "1500\n",
                "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 7\ntotal_inactive_file 100\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            },
            2600,
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "3000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
            },
            0,
            id="over the limit",
        ),
    ],
)
def test_available_bytes(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory.available_bytes(write(tmp_path, MEMINFO | files)) == expected


def test_without_proc_the_c_library_is_asked(tmp_path: Path) -> None:
    assert free_memory.available_bytes(tmp_path) > 0
    assert free_memory.count_memory_kills(tmp_path) == 0
    assert not free_memory.is_limited(tmp_path)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"memory.max": "3000\n"}, 1000 * KIB),  # without its use
        ({"memory.current": "3000\n"}, 1000 * KIB),
        ({"memory.max": "x\n", "memory.current": "1\n"}, 1000 * KIB),
        ({"memory.max": "3000\n", "memory.current": "1000\n", "memory.stat": "inactive_file\n"}, 2000),
        ({"memory.max": f"{2**40}\n", "memory.current": "1\n"}, 1000 * KIB),
    ],
)
def test_groups_that_tell_a_part(tmp_path: Path, group: dict[str, str], expected: int) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in group.items()}
    root = write(tmp_path, {**MEMINFO, "proc/self/cgroup": "0::/\n", **files})
    assert free_memory.available_bytes(root) == expected


# What a group of 2.2 GB had after the first start of a server, and after the second (the weights are 0.5 GB): the file is
# "active" when it has been read twice. The kernel takes either back.
USED_BY_PROCESSES = 100 * KIB * KIB
CACHE = 500 * KIB * KIB


@pytest.mark.parametrize("inactive", [CACHE, 0, CACHE // 3])
@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_is_free_memory(tmp_path: Path, version: int, inactive: int) -> None:
    prefix, folder = ("total_", "sys/fs/cgroup/memory/x") if version == 1 else ("", "sys/fs/cgroup/x")
    limit, usage = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    stat = f"anon 5\n{prefix}inactive_file {inactive}\n{prefix}active_file {CACHE - inactive}\n"
    files = {
        "proc/meminfo": "MemAvailable: 9000000 kB\n",
        "proc/self/cgroup": "4:memory:/x\n" if version == 1 else "0::/x\n",
        f"{folder}/memory.{limit}": "2200000000\n",
        f"{folder}/memory.{usage}": f"{USED_BY_PROCESSES + CACHE}\n",
        f"{folder}/memory.stat": stat,
    }
    root = write(tmp_path, files)
    assert free_memory.available_bytes(root) == 2200000000 - USED_BY_PROCESSES
    assert free_memory.is_limited(root)


def test_memory_of_the_kernel_that_it_takes_back_is_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "3000\n",
        "sys/fs/cgroup/memory.current": "2000\n",
        "sys/fs/cgroup/memory.stat": "shmem 500\nslab_reclaimable 300\nslab_unreclaimable 50\nunevictable 100\n",
    }
    assert free_memory.available_bytes(write(tmp_path, MEMINFO | files)) == 1300


def test_more_page_cache_than_use_is_no_room_above_the_limit(tmp_path: Path) -> None:
    """The kernel updates memory.stat and the usage at different times."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "3000\n",
        "sys/fs/cgroup/memory.current": "200\n",
        "sys/fs/cgroup/memory.stat": "inactive_file 900\n",
    }
    assert free_memory.available_bytes(write(tmp_path, MEMINFO | files)) == 3000


def test_kills_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/vmstat": "nr_free_pages 7\noom_kill 2\n", "proc/self/cgroup": "0::/a\n3:memory:/b\n"})
    assert free_memory.count_memory_kills(root) == 2
    write(root, {"sys/fs/cgroup/a/memory.events": "low 9\noom 1\noom_kill 3\noom_group_kill 8\n"})
    write(root, {"sys/fs/cgroup/memory/b/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"})
    assert free_memory.count_memory_kills(root) == 10


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
IN_A_GROUP = """
import sys
from pathlib import Path
from inflight.config.free_memory import available_bytes, is_limited
assert is_limited()
before = available_bytes()
Path(sys.argv[1]).write_bytes(bytes(64 << 20))
for _ in range(3):
    Path(sys.argv[1]).read_bytes()
print(before - available_bytes())
"""


def test_a_file_that_is_read_again_and_again_takes_no_memory_of_a_real_group(tmp_path: Path) -> None:
    """Of the first version. `groups_of` finds either version by the files that are written above."""
    group = MEMORY_GROUPS / f"inflight-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(400 << 20))
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", join, "sh", sys.executable, "-c", IN_A_GROUP, str(tmp_path / "weights")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) < 32 << 20
    finally:
        (group / "memory.force_empty").write_text("0")
        group.rmdir()
