"""The public names of the package, and what its import sets for libgomp."""

from __future__ import annotations

import importlib
import os

import pytest

import inflight


def test_every_public_name_is_there() -> None:
    found = {name: getattr(inflight, name) for name in inflight.__all__}
    assert {name: each.__name__ for name, each in found.items()} == {name: name for name in inflight.__all__}
    assert all(each.__module__.startswith("inflight.") for each in found.values())
    assert set(inflight.__all__) | {"__version__"} <= set(dir(inflight)) and dir(inflight) == sorted(dir(inflight))
    with pytest.raises(AttributeError, match=r"module 'inflight' .*'Engine'"):
        inflight.Engine  # noqa: B018


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "20000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, None),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "5"}, "5"),
    ],
)
def test_idle_threads_spin_for_a_short_time_unless_the_user_says_how_long(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "x")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    importlib.reload(inflight)
    assert os.environ.get("GOMP_SPINCOUNT") == expected
