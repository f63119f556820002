from __future__ import annotations

from pathlib import Path

import pytest

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


def test_the_last_engine_sets_the_allocator_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, *tuple[int, ...]]] = []
    monkeypatch.setattr(host_memory, "call_c_library", lambda name, *arguments: calls.append((name, *arguments)))
    monkeypatch.setattr(host_memory.KeptMemory, "_num_in_use", 0)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "0x40000")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=524288")
    first, second = host_memory.KeptMemory(), host_memory.KeptMemory()
    assert calls == [("mallopt", -3, 1 << 30), ("mallopt", -1, 1 << 30)] * 2
    calls.clear()
    first.release()
    first.release()
    assert not calls, "the other engine needs the settings"
    second.release()
    assert calls == [("mallopt", -3, 0x40000), ("mallopt", -1, 524288), ("malloc_trim", 0)]


@pytest.mark.parametrize("text", ["", "many"])
def test_without_settings_of_the_user_the_defaults_of_glibc_come_back(text: str) -> None:
    assert host_memory._threshold_of({"MALLOC_TRIM_THRESHOLD_": text}, "MALLOC_TRIM_THRESHOLD_", "x") == 128 * KIB
