"""The peak memory of a step is measured once for each packed file and settings; what is kept of it is never trusted blindly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.entrypoints.llm import LLM
from inflight.hub import EMBEDDED_MODEL
from inflight.sampling_params import SamplingParams
from inflight.weight_cache.folder import INDEX, PEAKS, WEIGHTS, CacheFolder
from inflight.weight_cache.peak_memory import peak_bytes
from inflight.worker.runner_base import RunnerBase
from tests.support.cached_weights import use_cache
from tests.support.waits import wait_until
from tests.unit.weight_cache.test_folder import fill

KEY = "0123abcd"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    made = CacheFolder(use_cache(tmp_path, monkeypatch))
    made.check()
    return made


def never() -> int:
    raise AssertionError("measured again")


def test_it_is_measured_once_for_each_settings(folder: CacheFolder) -> None:
    assert peak_bytes(KEY, ("bf16", 64), lambda: 7) == 7
    assert peak_bytes(KEY, ("bf16", 64), never) == 7
    assert peak_bytes(KEY, ("bf16", 65), lambda: 8) == 8
    assert peak_bytes("another", ("bf16", 64), lambda: 9) == 9
    assert [peak_bytes(KEY, ("bf16", number), never) for number in (64, 65)] == [7, 8]
    assert {path.suffix for path in folder.path.iterdir()} == {PEAKS}, "no other file is left"
    assert folder.file(KEY, PEAKS).stat().st_mode & 0o777 == 0o600


def test_weights_that_are_not_mapped_are_measured_each_time(folder: CacheFolder) -> None:
    assert [peak_bytes("", (), lambda number=number: number) for number in (1, 2)] == [1, 2]  # type: ignore[misc]
    assert not list(folder.path.iterdir())


def test_the_oldest_settings_are_forgotten(folder: CacheFolder) -> None:
    for number in range(40):
        peak_bytes(KEY, number, lambda: 1)
    assert len(json.loads(folder.file(KEY, PEAKS).read_text())) == 32
    assert peak_bytes(KEY, 39, never) == 1
    assert peak_bytes(KEY, 0, lambda: 2) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: "[" * 200_000,  # nested too deeply to be read
        lambda _: "",
        lambda text: text[:-3],
        lambda _: "[1]",
        lambda text: text.replace("7", "-7"),
        lambda text: text.replace(": 7", ": true"),
        lambda text: text.replace(": 7", ': "7"'),
        lambda text: text.replace(": 7", ": 7.5"),
        lambda text: text.replace(": 7", f": {2**50}"),
        lambda text: text.replace(": 7", ": 7" + "0" * 5000),
    ],
    ids=[
        "deep",
        "empty",
        "cut off",
        "no object",
        "negative",
        "a boolean",
        "a text",
        "a fraction",
        "too large",
        "endless",
    ],
)
def test_a_damaged_file_is_measured_again(folder: CacheFolder, damage: Callable[[str], str]) -> None:
    peak_bytes(KEY, "s", lambda: 7)
    file = folder.file(KEY, PEAKS)
    digest = next(iter(json.loads(file.read_text())))
    file.write_text(damage(json.dumps({digest: 7})))
    assert peak_bytes(KEY, "s", lambda: 8) == 8
    assert peak_bytes(KEY, "s", never) == 8


def test_what_others_may_write_is_not_read(folder: CacheFolder) -> None:
    peak_bytes(KEY, "s", lambda: 7)
    folder.file(KEY, PEAKS).chmod(0o602)
    assert peak_bytes(KEY, "s", lambda: 8) == 8
    folder.path.chmod(0o777)
    folder.file(KEY, PEAKS).unlink()
    assert [peak_bytes(KEY, "s", lambda number=number: number) for number in (1, 2)] == [1, 2]  # type: ignore[misc]


def test_it_goes_with_its_entry(folder: CacheFolder) -> None:
    fill(folder, KEY, 10, 1.0)
    peak_bytes(KEY, "s", lambda: 7)
    folder.make_room(10, 15)
    assert not [path for path in folder.path.iterdir() if path.suffix in (INDEX, WEIGHTS, PEAKS)]


def test_the_third_engine_measures_nothing(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    profile_run = RunnerBase.profile_run

    def counted(runner: RunnerBase) -> None:
        runs.append(1)
        profile_run(runner)

    monkeypatch.setattr(RunnerBase, "profile_run", counted)

    def start(max_num_seqs: int) -> int:
        with LLM(str(EMBEDDED_MODEL), max_model_len=64, max_num_seqs=max_num_seqs) as llm:
            llm.generate("Once", SamplingParams(max_tokens=1))
            wait_until(lambda: bool(list(folder.path.glob(f"*{INDEX}"))))
        return len(runs)

    assert [start(4) for _ in range(3)] == [1, 2, 2]
    assert start(5) == 3, "other settings have another peak"
