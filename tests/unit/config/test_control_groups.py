"""Quotas of processor time, as containers, service managers and Kubernetes write them, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config import machine as machine_module
from inflight.config.control_groups import cpu_quota
from inflight.config.cpu_binding import cores_of_rank
from inflight.config.device_options import resolve_device
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import detect_machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="no control groups"),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"},
            None,
            id="version 2, no limit",
        ),
        pytest.param({"proc/self/cgroup": "0::/\n"}, None, id="version 2, at the root, which has no file"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "125000 50000\n",
            },
            2.5,
            id="version 2, the parent limits",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"},
            4.0,
            id="version 2, in a container without a namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x/y\n2:memory:/x\n0::/\n",
                "sys/fs/cgroup/cpu/x/y/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/x/y/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000\n",
            },
            1.5,
            id="version 1, the parent limits",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:cpuset:/x\n2:memory:/x\n",
                "sys/fs/cgroup/cpuset/x/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpuset/x/cpu.cfs_period_us": "100000\n",
            },
            None,
            id="version 1, another controller's folder",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage\n"},
            None,
            id="what is no number is no limit",
        ),
    ],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert cpu_quota(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("quota", "omp", "expected"),
    [
        (None, "", 64),
        (4.0, "", 4),
        (2.4, "", 2),
        (2.5, "", 3),
        (0.2, "", 1),
        (128.0, "", 64),
        (4.0, "3", 3),
        (4.0, "8", 4),
    ],
)
def test_threads_follow_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, omp: str, expected: int
) -> None:
    monkeypatch.setattr(machine_module.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine_module, "cpu_quota", lambda: quota)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    machine = detect_machine("cpu")
    assert (machine.num_cores, machine.usable_cores) == (expected, tuple(range(64)))


@pytest.mark.parametrize(("quota", "num_ranks", "threads"), [(4.0, 2, 2), (3.0, 2, 1), (1.0, 4, 1)])
def test_ranks_share_the_quota_and_are_bound_to_no_core(
    monkeypatch: pytest.MonkeyPatch, quota: float, num_ranks: int, threads: int
) -> None:
    """The quota says how much of the cores may be used, not which of them."""
    monkeypatch.setattr(machine_module.os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine_module, "cpu_quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine = detect_machine("cpu")
    args = EngineArgs(device="cpu")
    device = resolve_device(args, num_ranks, machine, max_num_batched_tokens=64)
    assert device.num_threads == threads
    cores = cores_of_rank(
        "auto", usable=machine.usable_cores, num_threads=threads, local_rank=0, num_local_ranks=num_ranks
    )
    assert cores is None
