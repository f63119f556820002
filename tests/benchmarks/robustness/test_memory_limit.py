"""`MemoryGroup` with a made-up tree of files, of both versions of control groups: what is needed, the limit, and the kills."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.robustness import memory_limit
from benchmarks.robustness.memory_limit import MemoryGroup
from benchmarks.shared import control_group
from inflight.config.control_groups import ControlGroup

FILES = {
    1: {
        "memory.stat": "cache 900\ntotal_cache 900\ntotal_rss 100\ntotal_mapped_file 20\n",
        "memory.kmem.usage_in_bytes": "3\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    },
    2: {
        "memory.stat": "anon 100\nfile 900\nkernel 3\nfile_mapped 20\n",
        "memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\n",
    },
}


@pytest.mark.parametrize(("version", "limit_file"), [(1, "memory.limit_in_bytes"), (2, "memory.max")])
def test_what_a_group_needs_and_its_limit(
    version: int, limit_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_group, "groups_of", lambda _: iter([ControlGroup(tmp_path, version)]))
    monkeypatch.setattr(memory_limit, "SAMPLE_SECONDS", 0.001)
    with MemoryGroup() as group:
        for name, text in FILES[version].items():
            (group.folder / name).write_text(text)
        assert group.needed_bytes() == 123
        assert group.num_kills() == 2
        group.limit(135)
        assert (group.folder / limit_file).read_text() == "135"
        with group.peak() as peak:
            wait_until_sampled(group)
            stat = group.folder / "memory.stat"
            stat.write_text(stat.read_text().replace("100\n", "500\n"))
            wait_until_sampled(group)
            stat.write_text(stat.read_text().replace("500\n", "200\n"))
        assert peak == [523]
        assert group.prefix[-1] == "sh"
        assert str(group.folder / "cgroup.procs") in group.prefix[2]
        for file in group.folder.iterdir():
            file.unlink()
    assert not group.folder.exists()


def wait_until_sampled(group: MemoryGroup) -> None:
    """Until two more samples were taken: the first may have begun before."""
    count = 0
    needed_bytes = type(group).needed_bytes

    def counted() -> int:
        nonlocal count
        found = needed_bytes(group)
        count += 1
        return found

    group.needed_bytes = counted  # type: ignore[method-assign]
    while count < 2:
        time.sleep(0.001)
