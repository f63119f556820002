#!/usr/bin/env python3
"""Prints the unit tests of what has changed since a commit, the nearest first, as many as fit into a time.

    scripts/changed_tests.py                what is not committed; on a clean tree, the last commit
    scripts/changed_tests.py main           what has changed since the branch left main, committed or not
    scripts/changed_tests.py --seconds 20   take 20 seconds instead of 45, with two processes
    scripts/changed_tests.py --apart        prints the tests that pytest must run apart: a line of arguments for each run

Standard output has the files for pytest; standard error says why each is there, and which were left out. A test is found by its
name (tests/unit/a/test_b.py for inflight/a/b.py), by its imports, and by the rules of scripts/rule_holders.py. A test that
reaches a change in another way is missed: `make test` finds it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.rule_holders import holders  # noqa: E402
from tests.architecture.source import LOAD_GENERATOR, PACKAGE, Package  # noqa: E402

PACKAGES = (PACKAGE, LOAD_GENERATOR, "tests", "scripts", "benchmarks")
UNIT_TESTS = ("tests/unit/", f"tests/{LOAD_GENERATOR}/", "tests/benchmarks/", "tests/scripts/")
RUN_ELSEWHERE = ("tests/architecture/", "tests/clients/")  # by scripts/check and `make test-clients`
DURATIONS = "tests/durations.json"  # the seconds of each test file; may lack files, or be missing
UNKNOWN_SECONDS = 5.0
NUM_PROCESSES = 2
MAX_APART = 3  # runs of pytest for tests that are chosen by words; each may take half a minute


@dataclass(frozen=True)
class Chosen:
    path: str
    reason: str


def git(root: Path, *arguments: str) -> list[str]:
    """The names that a git command prints.

    Raises:
        SystemExit: git fails; its own message has been printed.
    """
    done = subprocess.run(["git", "-C", str(root), *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"git {' '.join(arguments)} failed")
    return [name for name in done.stdout.replace("\n", "\0").split("\0") if name]


def changed_files(root: Path, since: str) -> list[str]:
    """Files that differ from the commit at which HEAD and `since` parted, those that git does not track yet too. "" means HEAD,
    or the commit before it if nothing is uncommitted.
    """
    if not since:
        since = "HEAD" if git(root, "status", "--porcelain", "-z") else "HEAD~1"
    (base,) = git(root, "merge-base", since, "HEAD")
    changed = git(root, "diff", "-z", "--name-only", "--no-renames", base)
    return sorted({*changed, *git(root, "ls-files", "-z", "--others", "--exclude-standard")})


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test(path: str) -> bool:
    return PurePosixPath(path).name.startswith("test_") and path.endswith(".py")


def passes_on(path: str) -> bool:
    """Whether a test of what the file imports may import this file instead."""
    return path.endswith("/__init__.py") or (path.startswith("tests/") and not is_test(path))


def folder_of(path: str) -> str:
    """The folder of inflight/ that a file is in or about: "scheduler" for scheduler/a.py and tests/unit/scheduler/b.py."""
    parts = PurePosixPath(path.replace("tests/unit/", f"{PACKAGE}/")).parts
    return parts[1] if len(parts) > 2 and parts[0] == PACKAGE else ""


class ImportGraph:
    """Who imports whom, in all Python files of the repository."""

    def __init__(self, root: Path) -> None:
        packages = [Package(root / name, name) for name in PACKAGES if (root / name).is_dir()]
        modules = {module: file for package in packages for module, file in package.by_module.items()}
        self.paths = {file.module: f"{file.package}/{file.path}" for file in modules.values()}
        self.importers: dict[str, set[str]] = defaultdict(set)
        for package in packages:
            package.by_module = modules  # `from inflight import errors` in a test is the import of a module, too
            for file in package.files:
                for imported in package.imports(file):
                    self.importers[imported.module].add(file.module)
        for module, path in self.paths.items():
            if path.endswith("/conftest.py") and path != "tests/conftest.py":
                folder = path.removesuffix("conftest.py")
                self.importers[module] |= {other for other, file in self.paths.items() if file.startswith(folder)}

    def users(self, path: str) -> list[str]:
        """The files that import a file, also through the tests' helpers or through a package's `__init__.py`. Those with fewer
        files in between come first, and of these, those that are about the same folder of the package.
        """
        found: dict[str, int] = {}
        modules = [module_of(path)]
        distance = 0
        while modules:
            distance += 1
            importers = {importer for module in modules for importer in self.importers[module]}
            new = [importer for importer in importers if self.paths[importer] not in found]
            found |= dict.fromkeys((self.paths[importer] for importer in new), distance)
            modules = [importer for importer in new if passes_on(self.paths[importer])]
        return sorted(found, key=lambda user: (found[user], folder_of(user) != folder_of(path), user))

    def mirrors(self, path: str) -> list[str]:
        """The tests that are named after a file. tests/unit/kernels/cpu/test_library.py, for example, is named after
        inflight/kernels/cpu/library.py, and tests/benchmarks/speed/test_roofline.py after benchmarks/speed/roofline.py.
        """
        pure = PurePosixPath(path)
        names = {f"test_{pure.stem}.py", f"test_{pure.parent.name}_{pure.stem}.py"}
        folders = {PACKAGE: f"tests/unit/{folder_of(path)}"} | dict.fromkeys(
            (LOAD_GENERATOR, "benchmarks"), f"tests/{pure.parent}/"
        )
        folder = folders.get(pure.parts[0], "tests/")
        unit_tests = (each for each in self.paths.values() if each.startswith(folder) and each.startswith(UNIT_TESTS))
        return sorted(each for each in unit_tests if PurePosixPath(each).name in names)

    def sources(self, path: str) -> list[str]:
        """A Python file itself; for another file of the package, such as a C++ source, the Python files beside it."""
        if path.endswith(".py") or not path.startswith(f"{PACKAGE}/"):
            return [path]
        folder = PurePosixPath(path).parent
        return [each for each in self.paths.values() if PurePosixPath(each).parent == folder and not is_test(each)]


def nearest_tests(graph: ImportGraph, changed: list[str]) -> list[Chosen]:
    """The tests of the changed files, each once: those that have changed, those that hold a rule about a changed file, those
    that are named after one, those that import one, those that are named after a file that imports one, and those of the same
    folder that import such a file.
    """
    sources = [source for path in changed for source in graph.sources(path) if not is_test(path)]
    users = {source: graph.users(source) for source in sources}
    existing = set(graph.paths.values())
    found = [Chosen(path, "has changed") for path in changed if is_test(path) and path in existing]
    found += [
        Chosen(arguments, f"holds a rule about {path}: {rule.why}")
        for path in changed
        for arguments, rule in holders(path)
        if not rule.runs_apart and rule.test_file in existing
    ]
    found += [Chosen(test, f"named after {source}") for source in sources for test in graph.mirrors(source)]
    found += [
        Chosen(user, f"imports {source}")
        for source in sources
        for user in users[source]
        if is_test(user) and user.startswith(UNIT_TESTS)
    ]
    found += [
        Chosen(test, f"named after {user}, which imports {source}")
        for source in sources
        for user in users[source]
        if user.startswith(f"{PACKAGE}/")
        for test in graph.mirrors(user)
    ]
    found += [
        Chosen(test, f"imports {user}, which imports {source}")
        for source in sources
        for user in users[source]
        if user.startswith(f"{PACKAGE}/")
        for test in graph.users(user)
        if is_test(test) and test.startswith(UNIT_TESTS) and folder_of(test) == folder_of(source)
    ]
    first: dict[str, Chosen] = {}
    for chosen in found:
        first.setdefault(chosen.path, chosen)
    whole = {path for path in first if "::" not in path}
    return [
        chosen
        for chosen in first.values()
        if not chosen.path.startswith(RUN_ELSEWHERE) and (chosen.path in whole or _file_of(chosen.path) not in whole)
    ]


def _file_of(test: str) -> str:
    """The file of a test that is named as FILE::TEST."""
    return test.partition("::")[0]


def apart(root: Path, changed: list[str]) -> list[Chosen]:
    """The tests that hold a rule about a changed file, and that pytest chooses with -k. `path` has the arguments of pytest."""
    found = [
        Chosen(arguments, f"holds a rule about {path}: {rule.why}")
        for path in changed
        for arguments, rule in holders(path)
        if rule.runs_apart and (root / rule.test_file).exists() and (root / path).exists()
    ]
    return list({chosen.path: chosen for chosen in found}.values())


def report_apart(tests: list[Chosen]) -> str:
    """What to say about the tests that run apart: the first MAX_APART run, the others are only named."""
    titles = ["also:"] * min(len(tests), MAX_APART) + ["left out, run it yourself:"] * (len(tests) - MAX_APART)
    return "\n".join(
        f"{title} pytest {test.path}\n    it {test.reason}" for title, test in zip(titles, tests, strict=True)
    )


def read_durations(root: Path) -> dict[str, float]:
    path = root / DURATIONS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def cut(tests: list[Chosen], durations: dict[str, float], seconds: float) -> tuple[list[Chosen], list[Chosen]]:
    """Takes the nearest tests that fit into the time, and says which do not. A test file runs in one of the processes."""
    taken: list[Chosen] = []
    left_out: list[Chosen] = []
    free = seconds * NUM_PROCESSES
    for test in tests:
        duration = durations.get(test.path, 1.0 if "::" in test.path else UNKNOWN_SECONDS)
        if duration <= min(free, seconds):
            taken.append(test)
            free -= duration
        else:
            left_out.append(test)
    return taken, left_out


def report(changed: list[str], graph: ImportGraph, taken: list[Chosen], left_out: list[Chosen], seconds: float) -> str:
    lines = [f"{len(changed)} changed files; the tests nearest to them:"]
    lines += [f"    {test.path}: {test.reason}" for test in taken] or ["    none"]
    if left_out:
        lines.append(f"left out, for all together take more than {seconds:.0f} s:")
        lines += [f"    {test.path}: {test.reason}" for test in left_out]
    untested = [
        path for path in changed if not is_test(path) and not nearest_tests(graph, [path]) and not holders(path)
    ]
    if untested:
        lines.append("no test was found by name, import or rule for: " + ", ".join(untested))
    return "\n".join(lines)


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("since", nargs="?", default="")
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args(arguments)
    changed = changed_files(root, options.since)
    if options.apart:
        tests = apart(root, changed)
        print(report_apart(tests), file=sys.stderr)
        for test in tests[:MAX_APART]:
            print(test.path)
        return 0
    graph = ImportGraph(root)
    taken, left_out = cut(nearest_tests(graph, changed), read_durations(root), options.seconds)
    print(report(changed, graph, taken, left_out, options.seconds), file=sys.stderr)
    for test in taken:
        print(test.path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
