"""Which class `distributed_executor_backend` names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inflight.errors import ConfigError
from inflight.executor.executor import Executor
from inflight.executor.external_launcher import ExternalLauncherExecutor
from inflight.executor.multiproc import MultiprocExecutor
from inflight.executor.uniproc import UniProcExecutor
from tests.conformance.configs import engine_config


def named(backend: str) -> type[Executor]:
    config = engine_config()
    parallel = dataclasses.replace(config.parallel, distributed_executor_backend=backend)
    return Executor.get_class(dataclasses.replace(config, parallel=parallel))


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ("uni", UniProcExecutor),
        ("mp", MultiprocExecutor),
        ("external_launcher", ExternalLauncherExecutor),
        ("inflight.executor.uniproc:UniProcExecutor", UniProcExecutor),
    ],
)
def test_a_backend_is_found_by_its_name_or_its_path(backend: str, found: type[Executor]) -> None:
    assert named(backend) is found


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (
            "unni",
            r"'unni' cannot be imported: ModuleNotFoundError: .*; allowed are uni, mp, ray, external_launcher, or",
        ),
        ("inflight.executor.uniproc:Nobody", "AttributeError"),
        ("raises_at_import:Backend", "ZeroDivisionError"),
        ("pathlib:Path", r"must be a subclass of inflight\.executor\.executor\.Executor"),
        ("inflight.executor.selector:executor_class", "must be a subclass"),
    ],
)
def test_a_wrong_backend_is_a_wrong_setting(
    backend: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        named(backend)
