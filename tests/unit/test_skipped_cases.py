"""`tests.skipped_cases`: a test whose cases are skipped is one skipped item, and what runs is left alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support.python_process import ROOT, run_python

CONFTEST = """
import pytest
from tests.skipped_cases import keep_one_of_each, reason_of_marks

def pytest_collection_modifyitems(items):
    items[:] = keep_one_of_each(items, lambda item: "big" if item.get_closest_marker("big") else reason_of_marks(item))
"""
TESTS = """
import pytest

big = pytest.mark.big

@pytest.mark.parametrize("one", [1, pytest.param(2, marks=big), 3, pytest.param(4, marks=big), pytest.param(5, marks=big)])
def test_some_cases(one):
    pass

@pytest.mark.skipif(True, reason="no compiler")
@pytest.mark.parametrize("one", range(40))
def test_all_cases(one):
    pass

@pytest.mark.skipif(False, reason="there is one")
@pytest.mark.parametrize("one", range(4))
def test_no_case(one):
    pass

@pytest.mark.skipif(True, reason="no compiler")
def test_without_cases():
    pass
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = big: many\n")
    (folder / "test_a.py").write_text(TESTS)
    options = ["-rs", "-v", "-p", "no:cacheprovider", "-o", f"pythonpath={ROOT}", "--import-mode=importlib"]
    done = run_python(
        [sys.executable, "-m", "pytest", *options, *arguments], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_one_item_tells_how_many_cases_are_skipped(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert "6 passed, 3 skipped" in found
    cases = re.findall(r"test_some_cases\[(\d)\] (\w+)", found)
    assert cases == [("1", "PASSED"), ("2", "SKIPPED"), ("3", "PASSED")]
    reasons = re.findall(r"^SKIPPED .*: (.*)$", found, re.MULTILINE)
    assert sorted(reasons) == ["big (3 cases)", "no compiler", "no compiler"]


def test_a_case_that_is_chosen_is_one_item(tmp_path: Path) -> None:
    found = run(tmp_path, "test_a.py::test_some_cases[5]")
    assert "1 skipped" in found and ": big\n" in found
