from __future__ import annotations

from pathlib import Path

from inflight.device import host_memory

KIB = 1024


def test_the_memory_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    status = "Name: x\nVmPeak: 9 kB\nVmHWM: 70 kB\nVmRSS: 50 kB\nVmHWM\nRssAnon:\t 30 kB\nRssFile: 20 kB\n"
    (tmp_path / "proc/self/status").write_text(status)
    assert (host_memory.resident_bytes(tmp_path), host_memory.peak_resident_bytes(tmp_path)) == (50 * KIB, 70 * KIB)
    assert host_memory.own_bytes(tmp_path) == 30 * KIB
    host_memory.reset_peak(tmp_path)
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_without_proc_nothing_is_told(tmp_path: Path) -> None:
    assert host_memory.resident_bytes(tmp_path) == host_memory.own_bytes(tmp_path) == 0
    assert host_memory.peak_resident_bytes(tmp_path) == 0
    host_memory.reset_peak(tmp_path)


def test_a_missing_function_of_the_c_library_is_ignored() -> None:
    host_memory.call_c_library("inflight_no_such_function", 1)
