from __future__ import annotations

from pathlib import Path

import pytest

from inflight.device import host_memory

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
    assert host_memory.available_bytes(write(tmp_path, MEMINFO | files)) == expected


def test_without_proc_the_c_library_is_asked(tmp_path: Path) -> None:
    assert host_memory.available_bytes(tmp_path) > 0
    assert host_memory.resident_bytes(tmp_path) == 0
    assert host_memory.peak_resident_bytes(tmp_path) == 0
    host_memory.reset_peak(tmp_path)


def test_the_memory_of_this_process(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/status": "Name: x\nVmPeak: 9 kB\nVmHWM: 70 kB\nVmRSS: 50 kB\nVmHWM\n"})
    assert (host_memory.resident_bytes(root), host_memory.peak_resident_bytes(root)) == (50 * KIB, 70 * KIB)
    host_memory.reset_peak(root)
    assert (root / "proc/self/clear_refs").read_text() == "5"


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
    assert host_memory.available_bytes(root) == expected


def test_a_missing_function_of_the_c_library_is_ignored() -> None:
    host_memory.call_c_library("inflight_no_such_function", 1)
