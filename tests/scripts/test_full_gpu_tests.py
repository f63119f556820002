"""`scripts/full_gpu_tests` in a repository of its own: which changes ask for the full counts, and after how many merges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "full_gpu_tests"
KERNEL, SCHEDULER = "inflight/kernels/triton/linear.py", "inflight/scheduler/scheduler.py"


class Answer(NamedTuple):
    code: int
    sentence: str


class Repository:
    """Git sees neither the user's settings nor the repository that the tests are in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")
        for path in (KERNEL, SCHEDULER):
            self.write(path, "1")
        self.commit()

    def git(self, *arguments: str) -> str:
        settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        author = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        others = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        command = ["git", "-C", str(self.root), *arguments]
        environment = {**others, **settings, **author}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    def merge(self, num_commits: int) -> None:
        """A branch of so many commits."""
        self.git("checkout", "-q", "-b", "branch")
        for _ in range(num_commits):
            self.commit()
        self.git("checkout", "-q", "main")
        self.git("merge", "-q", "--no-ff", "-m", "merge", "branch")
        self.git("branch", "-q", "-D", "branch")

    def ask(self, *arguments: str) -> Answer:
        command = [sys.executable, str(SCRIPT), "--root", str(self.root), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stderr == ""
        return Answer(done.returncode, done.stdout.strip())


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """The last full run was at the first commit; the second commit records it."""
    made = Repository(tmp_path)
    made.write("tests/.keep", "")
    made.ask("--record")
    made.commit()
    return made


def test_the_short_set_is_enough_right_after_a_full_run(repository: Repository) -> None:
    repository.write(SCHEDULER, "2")
    repository.commit()
    code, sentence = repository.ask()
    assert code == 1 and "\n" not in sentence
    assert "no code for GPUs changed in 2 commits since their last full run" in sentence


@pytest.mark.parametrize("is_committed", [False, True])
def test_changed_code_for_gpus_is_named(repository: Repository, is_committed: bool) -> None:
    repository.write(KERNEL, "2")
    if is_committed:
        repository.commit()
        repository.commit()
    assert repository.ask() == (0, f"The full GPU tests must run: {KERNEL} changed {since(repository)}.")


def test_new_renamed_and_deleted_files_count(repository: Repository) -> None:
    repository.write("inflight/layers/gpu_linear.py", "1")
    repository.git("mv", KERNEL, SCHEDULER.replace("scheduler.py", "linear.py"))
    repository.commit()
    code, sentence = repository.ask()
    assert code == 0 and f"{KERNEL} and 1 more changed" in sentence


def test_a_change_in_a_merged_branch_counts(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "side")
    repository.write("inflight/sample/device_sampler.py", "1")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    assert repository.ask().code == 0


def test_every_tenth_merge_runs_all(repository: Repository) -> None:
    for _ in range(9):
        repository.merge(num_commits=2)
    assert repository.ask().code == 1
    repository.merge(num_commits=1)
    assert repository.ask() == (0, f"The full GPU tests must run: 10 merges and 11 commits {since(repository)}.")
    repository.ask("--record")
    assert repository.ask().code == 1


def test_many_commits_without_a_merge_run_all(repository: Repository) -> None:
    for _ in range(38):
        repository.commit()
    assert repository.ask().code == 1
    repository.commit()
    assert repository.ask() == (0, f"The full GPU tests must run: 0 merges and 40 commits {since(repository)}.")


def test_without_a_usable_record_all_run(repository: Repository) -> None:
    record = repository.root / "tests" / "gpu_full_run.txt"
    repository.git("checkout", "-q", "--orphan", "elsewhere")
    elsewhere = repository.commit()
    repository.git("checkout", "-q", "-f", "main")
    for text in ("", "0" * 40, elsewhere):
        record.write_text(text)
        code, sentence = repository.ask()
        assert code == 0 and "cannot be compared with HEAD" in sentence and "\n" not in sentence
    record.unlink()
    assert repository.ask() == (0, "The full GPU tests must run: tests/gpu_full_run.txt cannot be read.")


def test_everything_that_is_watched_is_there() -> None:
    """A file that was renamed would no longer be watched."""
    names: dict[str, object] = {"__file__": str(SCRIPT), "__name__": "full_gpu_tests"}
    exec(compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec"), names)
    watched = names["WATCHED"]
    assert isinstance(watched, tuple)
    for pattern in watched:
        assert list(ROOT.glob(pattern)), f"scripts/full_gpu_tests watches {pattern}, where there is no file"


def since(repository: Repository) -> str:
    record = (repository.root / "tests" / "gpu_full_run.txt").read_text()
    return f"since their last full run at {record[:10]}"
