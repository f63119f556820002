"""Which tests `make test-quick` runs: a small repository of its own, with commits."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.changed_tests import main

Select = Callable[
    ..., tuple[list[str], str]
]  # the arguments of the script -> the tests that it prints, and what it says of them

FILES = {
    "inflight/__init__.py": "",
    "inflight/scheduler/__init__.py": "",
    "inflight/scheduler/limits.py": "def limit():\n    return 1\n",
    "inflight/scheduler/plan.py": "from inflight.scheduler.limits import limit\n",
    "inflight/engine/core.py": "from inflight.scheduler import plan\n",
    "inflight/sample/__init__.py": "from inflight.sample.draw import draw\n",
    "inflight/sample/draw.py": "def draw():\n    return 1\n",
    "inflight/kernels/cpu/library.py": "",
    "inflight/kernels/cpu/linear.cpp": "",
    "tests/__init__.py": "",
    "tests/cases.py": "import inflight.scheduler.limits\n",
    "tests/unit/scheduler/test_limits.py": "",
    "tests/unit/scheduler/test_plan.py": "import inflight.scheduler.plan\n",
    "tests/unit/scheduler/test_words.py": "from inflight.scheduler import limits\n",
    "tests/unit/scheduler/test_whole.py": "import inflight.scheduler.plan\n",
    "tests/unit/engine/test_whole.py": "import inflight.scheduler.plan\n",  # too far away
    "tests/unit/engine/test_core.py": "import inflight.engine.core\n",
    "tests/unit/engine/test_cases.py": "def test():\n    from tests.cases import something\n",
    "tests/unit/executor/conftest.py": "from inflight.engine.core import Core\n",
    "tests/unit/executor/test_start.py": "",
    "tests/unit/sample/test_numbers.py": "from inflight.sample import draw\n",
    "tests/unit/kernels/test_cpu_library.py": "",
    "benchmarks/speed/words.py": "",
    "tests/benchmarks/speed/test_words.py": "",
    "tests/e2e/test_all.py": "import inflight.scheduler.limits\n",
    "tests/architecture/test_style.py": "import inflight.scheduler.limits\n",
    "docs/page.md": "",
    "Makefile": "",
    "inflight/config/families/new.py": "",
    "tests/unit/config/test_families.py": "",
    "tests/unit/config/test_new.py": "",
    "tests/e2e/test_model_parity.py": "",
    "inflight/entrypoints/openai/protocol.py": "",
    "tests/e2e/test_openai_fields.py": "",
}


def git(folder: Path, *arguments: str) -> None:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *arguments], cwd=folder, check=True, capture_output=True)


def append(folder: Path, *paths: str) -> None:
    for path in paths:
        with (folder / path).open("a") as file:
            file.write("\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    git(tmp_path, "init", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


@pytest.fixture
def select(repository: Path, capsys: pytest.CaptureFixture[str]) -> Select:
    def call(*arguments: str) -> tuple[list[str], str]:
        assert main(list(arguments), repository) == 0
        printed = capsys.readouterr()
        return printed.out.splitlines(), printed.err

    return call


LIMITS = [
    "tests/unit/scheduler/test_limits.py",  # by its name
    "tests/unit/scheduler/test_words.py",  # imports it, in the same folder
    "tests/unit/engine/test_cases.py",  # imports it through a helper
    "tests/unit/scheduler/test_plan.py",  # is named after a file that imports it
    "tests/unit/scheduler/test_whole.py",  # imports a file that imports it, in the same folder
]


def test_the_nearest_come_first(repository: Path, select: Select) -> None:
    append(repository, "inflight/scheduler/limits.py")
    tests, said = select()
    assert tests == LIMITS
    assert "tests/unit/engine/test_cases.py: imports inflight/scheduler/limits.py" in said
    assert "left out" not in said


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("inflight/sample/draw.py", ["tests/unit/sample/test_numbers.py"]),  # through __init__.py
        ("inflight/kernels/cpu/linear.cpp", ["tests/unit/kernels/test_cpu_library.py"]),
        ("inflight/engine/core.py", ["tests/unit/engine/test_core.py", "tests/unit/executor/test_start.py"]),
        ("tests/e2e/test_all.py", ["tests/e2e/test_all.py"]),
        ("tests/architecture/test_style.py", []),  # scripts/check runs it
        ("tests/cases.py", ["tests/unit/engine/test_cases.py"]),
        ("benchmarks/speed/words.py", ["tests/benchmarks/speed/test_words.py"]),  # and no other test_words.py
        ("Makefile", []),
        ("inflight/config/families/new.py", ["tests/unit/config/test_families.py", "tests/unit/config/test_new.py"]),
        (
            "inflight/entrypoints/openai/protocol.py",
            [
                "tests/e2e/test_openai_fields.py::test_every_field_has_a_case",
                "tests/e2e/test_openai_fields.py::test_the_document_lists_every_field",
            ],
        ),
    ],
)
def test_one_change(repository: Path, select: Select, changed: str, expected: list[str]) -> None:
    append(repository, changed)
    tests, said = select()
    assert tests == expected
    untested = "no test was found" in said
    assert untested == (not expected and not changed.startswith("tests/"))


def test_tests_that_are_chosen_by_words_run_apart(repository: Path, select: Select) -> None:
    append(repository, "inflight/config/families/new.py", "docs/page.md")
    tests, said = select("--apart")
    assert tests == ["tests/e2e/test_model_parity.py -k new"], "the others do not exist here"
    assert "also: pytest tests/e2e/test_model_parity.py -k new" in said
    append(repository, "inflight/sample/draw.py")
    git(repository, "commit", "-am", "second")
    append(repository, "inflight/sample/draw.py")
    assert select("--apart")[0] == []


def test_only_a_few_runs_of_pytest_are_added(repository: Path, select: Select) -> None:
    families = [f"inflight/config/families/new{number}.py" for number in range(5)]
    for path in families:
        (repository / path).write_text("")
    tests, said = select("--apart")
    assert tests == [f"tests/e2e/test_model_parity.py -k new{number}" for number in range(3)]
    assert said.count("left out, run it yourself: pytest") == 2


def test_a_file_of_tests_that_runs_as_a_whole_is_not_run_twice(repository: Path, select: Select) -> None:
    append(repository, "inflight/entrypoints/openai/protocol.py", "tests/e2e/test_openai_fields.py")
    assert select()[0] == ["tests/e2e/test_openai_fields.py"]


def test_since(repository: Path, select: Select) -> None:
    git(repository, "checkout", "-b", "topic")
    append(repository, "inflight/scheduler/limits.py")
    git(repository, "commit", "-am", "second")
    assert select()[0] == LIMITS  # a clean tree: the last commit
    append(repository, "inflight/sample/draw.py")
    assert select()[0] == ["tests/unit/sample/test_numbers.py"]  # what is not committed
    git(repository, "commit", "-am", "third")
    git(repository, "checkout", "main")
    append(repository, "inflight/kernels/cpu/library.py")
    git(repository, "commit", "-am", "main goes on")
    git(repository, "checkout", "topic")
    both = select("main")[0]
    assert sorted(both) == sorted([*LIMITS, "tests/unit/sample/test_numbers.py"])


def test_files_that_are_new_or_gone(repository: Path, select: Select) -> None:
    (repository / "inflight/scheduler/limits.py").unlink()
    (repository / "tests/unit/scheduler/test_limits.py").unlink()
    (repository / "tests/unit/scheduler/test_new.py").write_text("")
    assert select()[0] == [
        "tests/unit/scheduler/test_new.py",
        "tests/unit/engine/test_cases.py",
        "tests/unit/scheduler/test_plan.py",
        "tests/unit/scheduler/test_whole.py",
    ]


def test_what_does_not_fit_into_the_time_is_named(repository: Path, select: Select) -> None:
    append(repository, "inflight/scheduler/limits.py")
    durations = {LIMITS[0]: 8, LIMITS[1]: 11, LIMITS[2]: 9, LIMITS[4]: 20}  # the fourth is unknown: 5
    (repository / "tests/durations.json").write_text(json.dumps(durations))
    git(repository, "add", "tests/durations.json")
    tests, said = select("--seconds", "10")  # with two processes: 20 seconds
    assert tests == [LIMITS[0], LIMITS[2]]
    left_out = said.partition("left out")[2]
    assert LIMITS[1] in left_out and LIMITS[3] in left_out
    tests, said = select("--seconds", "11")
    assert tests == [LIMITS[0], LIMITS[1]], said


def test_an_unknown_commit(select: Select) -> None:
    with pytest.raises(SystemExit, match="failed"):
        select("no-such-commit")
