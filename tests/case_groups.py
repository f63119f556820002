"""In a run with pytest-xdist, the cases of a small parametrized test are one item, which runs them one after the other.

pytest makes an item of each case. Every worker collects all items, and each item is reported by itself. That takes some
milliseconds of processor time, where most cases take less. A `CaseGroup` makes its cases only when it runs. They are what they
always are: each has fixtures of its own, all of them run, and each that fails or is skipped is reported by its name. Without
pytest-xdist, or if a test is chosen by its name, each case is an item, so that one can be run alone.

These tests keep an item for each case: those of files that take long, because the workers share such cases; those with marks
that decide whether they run, and those that are skipped (`skipped_cases.py`); and those that take a fixture of the module with
parameters, because pytest orders them by its values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.skipped_cases import reason_of_marks

MOST_SECONDS = 10.0  # that all tests of a file may take
MARKS = {"parametrize", "skipif", "filterwarnings", "usefixtures"}


class CaseGroup(pytest.Item):
    def __init__(self, *, test: Callable[..., None], **node: Any) -> None:
        super().__init__(**node)
        self._test = test
        self.own_markers += getattr(test, "pytestmark", [])

    def can_be_one_item(self) -> bool:
        marks = list(self.iter_markers())
        cases = [mark for mark in marks if mark.name == "parametrize"]
        if not cases or not {mark.name for mark in marks} <= MARKS or reason_of_marks(self):
            return False
        for mark in cases:
            values = mark.args[1] if len(mark.args) > 1 else mark.kwargs.get("argvalues")
            if not isinstance(values, Collection) or mark.kwargs.get("indirect") or mark.kwargs.get("scope"):
                return False
            if any(isinstance(value, type(pytest.param())) and value.marks for value in values):
                return False
        found = self.session._fixturemanager.getfixtureinfo(node=self, func=self._test, cls=None)
        last = [definitions[-1] for definitions in found.name2fixturedefs.values()]
        return all(fixture.scope == "function" or not fixture.params for fixture in last)

    def reportinfo(self) -> tuple[Any, int, str]:
        return self.path, self._test.__code__.co_firstlineno - 1, self.name

    def runtest(self) -> None:
        raise AssertionError("its cases run, not the group")

    def run_cases(self, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Yields a report for each case that fails or is skipped, and one for all others together."""
        assert isinstance(self.parent, pytest.Module)
        cases = list(self.parent._genfunctions(self.name, self._test))
        num_passed, seconds = 0, 0.0
        for case, following in pairwise([*cases, nextitem]):
            assert case is not None
            reports = runtestprotocol(case, log=False, nextitem=following)
            num_passed += all(report.passed for report in reports)
            seconds += sum(report.duration for report in reports if report.passed)
            for report in reports:
                if not report.passed:
                    yield self._named(report, case)
            if self.session.shouldfail or self.session.shouldstop:
                return
        if num_passed:
            yield pytest.TestReport(self.nodeid, self.location, {}, "passed", None, "call", duration=seconds)

    def _named(self, report: pytest.TestReport, case: pytest.Item) -> pytest.TestReport:
        """pytest-xdist takes reports of collected items only. The heading of a failure is the case's name, by its location."""
        report.nodeid = self.nodeid
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            crash.message = f"{case.name.removeprefix(self.name)} {crash.message}"
        return report


class CaseGroups:
    """A plugin of pytest.

    Args:
        seconds: name of a file -> how long all its tests take.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Collector, name: str, obj: object
    ) -> list[pytest.Item] | None:
        if not isinstance(collector, pytest.Module) or not inspect.isfunction(obj):
            return None
        if (
            not collector.istestfunction(obj, name)
            or not self._seconds.get(collector.nodeid, MOST_SECONDS) < MOST_SECONDS
        ):
            return None
        group = CaseGroup.from_parent(collector, name=name, test=obj)
        return [group] if group.can_be_one_item() else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, CaseGroup):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in item.run_cases(nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
