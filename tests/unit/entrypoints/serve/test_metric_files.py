"""Where several front ends keep their metrics: in memory, also for the one that takes the place of a dead one."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from inflight.entrypoints.serve.metric_files import KINDS, LOCK, PREFIX, UNLOCKED_SECONDS, metric_files
from inflight.errors import ConfigError
from tests.support.descriptors import num_descriptors
from tests.support.python_process import run_python

FRONT_END = """
import json, sys
from inflight.metrics import exposition
exposition.use_files_of(int(sys.argv[1]))
from inflight.metrics.serving import ServingMetrics
metrics = ServingMetrics("m", records_engine=sys.argv[1] == "0")
for _ in range(int(sys.argv[2])):
    metrics.request_refused("queue_full")
    metrics.first_token(0.5)
lines = metrics.render("")[0].decode().splitlines()
print(json.dumps({line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}))
"""
REFUSED = 'inflight:requests_refused_total{model_name="m",reason="queue_full"}'
OBSERVED = 'inflight:time_to_first_token_seconds_count{model_name="m"}'
UP = 'inflight:engine_up{model_name="m"}'


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def values_of(folder: str, index: int, count: int) -> dict[str, float]:
    """Returns what front end `index` exposes after it has counted `count` requests. Its process then ends."""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}
    ended = run_python(
        [sys.executable, "-c", FRONT_END, str(index), str(count)], env=environment, stdout=subprocess.PIPE, check=True
    )
    values: dict[str, float] = json.loads(ended.stdout)
    return values


def test_each_front_end_exposes_the_sums_and_a_new_one_goes_on_with_the_counts_of_its_predecessor() -> None:
    with metric_files(2) as folder:
        assert values_of(folder, 0, 3)[REFUSED] == 3  # the other one has not begun yet
        second = values_of(folder, 1, 4)
        assert (second[REFUSED], second[OBSERVED], second[UP]) == (7, 7, 1)
        again = values_of(folder, 1, 5)
        assert (again[REFUSED], again[OBSERVED]) == (12, 12)


def test_the_files_are_in_memory_and_nothing_is_left(temporary: Path) -> None:
    num_fds = num_descriptors()
    with metric_files(2) as folder:
        links = [path for path in Path(folder).iterdir() if path.name != LOCK]
        assert len(links) == 2 * len(KINDS)
        for link in links:
            assert os.readlink(os.readlink(link)).startswith("/memfd:")  # no disk that can be full
    assert not list(temporary.iterdir())
    assert num_descriptors() == num_fds


def test_the_folder_of_a_server_that_was_killed_is_removed_by_the_next_one(temporary: Path) -> None:
    dead, old, new, locked = (temporary / f"{PREFIX}{number}-x1" for number in range(4))
    for folder in (dead, old, new, locked):
        folder.mkdir()
        (folder / "counter_0.db").symlink_to("/nowhere")
    for folder in (dead, locked):
        (folder / LOCK).touch()
    os.utime(old, (0, time.time() - UNLOCKED_SECONDS - 1))
    with (locked / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with metric_files(1):
            assert [folder.exists() for folder in (dead, old, new, locked)] == [False, False, True, True]


def test_two_servers_with_the_same_process_id_keep_their_folders() -> None:
    """Two containers that share /tmp: in each of them the server is process 1."""
    with metric_files(1) as first, metric_files(1) as second:
        assert Path(first).exists() and Path(second).exists()


def test_a_folder_that_cannot_be_made_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ConfigError, match=r"/no/such/folder: .*TMPDIR"), metric_files(1):
        pass
