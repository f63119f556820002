"""`tests.case_groups`: the cases of a test run as one item, and what fails or is skipped is reported as its own."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.support.python_process import ROOT, run_python

FILES = ("test_light.py", "test_heavy.py")

CONFTEST = """
from tests.case_groups import CaseGroups

def pytest_configure(config):
    config.pluginmanager.register(CaseGroups({"test_light.py": 0.1, "test_heavy.py": 100.0}))
"""
TESTS = """
import pytest

ran = []

@pytest.fixture
def own():
    ran.append("begin")
    yield
    ran.append("end")

@pytest.fixture(scope="module", params=[1, 2])
def shared(request):
    return request.param

@pytest.mark.parametrize("one", [1, 2, 3])
@pytest.mark.parametrize("two", ["x", "y"])
def test_pairs(own, one, two):
    if (one, two) == (2, "y"):
        raise ValueError("bad luck")
    if one == 3:
        pytest.skip("odd")

def test_each_case_had_a_fixture_of_its_own():
    assert ran == ["begin", "end"] * 6

@pytest.mark.parametrize("one", [1, pytest.param(2, marks=pytest.mark.skip(reason="marked"))])
def test_marked(one):
    pass

@pytest.mark.parametrize("one", [1, 2])
def test_shared(shared, one):
    pass
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    for name in FILES:
        (folder / name).write_text(TESTS)
    options = ["-p", "no:cacheprovider", "-o", f"pythonpath={ROOT}", "--import-mode=importlib"]
    done = run_python(
        [sys.executable, "-m", "pytest", *options, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return str(done.stdout)


def test_what_fails_and_what_is_skipped_has_its_name(tmp_path: Path) -> None:
    found = run(tmp_path, "test_light.py")
    assert "1 failed, 7 passed, 3 skipped" in found
    assert "test_pairs[y-2] _" in found and "ValueError: bad luck" in found
    assert "FAILED test_light.py::test_pairs - [y-2] ValueError: bad luck" in found


def test_what_is_one_item(tmp_path: Path) -> None:
    """Not a test with marked cases, or with a fixture of the module that has parameters, or of a file that takes long."""
    found = run(tmp_path, "--collect-only", "-q").splitlines()
    assert Counter(line.partition("[")[0] for line in found if "::" in line) == {
        "test_light.py::test_pairs": 1,
        "test_heavy.py::test_pairs": 6,
        **{f"{file}::test_each_case_had_a_fixture_of_its_own": 1 for file in FILES},
        **{f"{file}::test_marked": 2 for file in FILES},
        **{f"{file}::test_shared": 4 for file in FILES},
    }
