"""OpenMP's variables: which limits count, and which variables are hidden and named in the log."""

from __future__ import annotations

import os
import sys

import pytest

from inflight.config.openmp import PLACEMENT, max_threads, placement_hidden, tell_ignored, without_placement


@pytest.mark.parametrize(
    ("num_threads", "limit", "expected"),
    [("", "", None), ("3", "", 3), ("4,2", "", 4), ("8", "2", 2), ("", "5", 5), ("0", "x", None), (" 6 ", "", 6)],
)
def test_the_smallest_limit_counts(
    monkeypatch: pytest.MonkeyPatch, num_threads: str, limit: str, expected: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", num_threads)
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    assert max_threads() == expected


def test_placements_are_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")
    before = dict(os.environ)
    with placement_hidden():
        assert not os.environ.keys() & set(PLACEMENT)
    assert dict(os.environ) == before
    given = {**dict.fromkeys(PLACEMENT, "x"), "OMP_NUM_THREADS": "2", "PATH": "/bin"}
    assert without_placement(given) == {"OMP_NUM_THREADS": "2", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, []),
        ({"OMP_PROC_BIND": "False", "KMP_AFFINITY": "disabled"}, []),
        ({"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}, ["OMP_PROC_BIND, OMP_PLACES: torch was imported before"]),
    ],
)
def test_ignored_variables_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], told: list[str]
) -> None:
    for name in PLACEMENT:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch", object())
    tell_ignored()
    assert [line[: len(start)] for line, start in zip(caplog.messages, told, strict=True)] == told


def test_ignored_variables_are_named_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in PLACEMENT:
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("OMP_DYNAMIC", "true")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    tell_ignored()
    assert caplog.messages == ["OMP_DYNAMIC: ignored, because cpu_threads_bind places the compute threads"]


def test_placements_are_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")
    with pytest.raises(KeyError), placement_hidden():
        raise KeyError
    assert os.environ["OMP_PLACES"] == "cores"
