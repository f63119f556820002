#!/usr/bin/env python3
"""Puts mistakes that are drawn by chance into copies of the source, and prints which of them the tests find.

    scripts/mistakes.py                     60 mistakes; takes an hour or two
    scripts/mistakes.py --seed 7            60 other mistakes
    scripts/mistakes.py --only 3,7          only these numbers, tried once more
    scripts/mistakes.py --harmless 12,31    a reader saw that these two change nothing: the next two numbers take their places
    scripts/mistakes.py --list              only prints the mistakes

First a line is drawn: each line in which one of the mistakes below can be made has the same chance. Then one of the mistakes of
this line is drawn. If `ruff` or `mypy --strict` refuses a mistake, no test has to find it, and the next number takes its place.
The tests run in a copy of the working tree, in stages: "mirror", the tests that are named after the file; "room", the other
unit tests of its room; "near", other tests that import the file, and those of files that import it, as far as they fit into
a minute; "whole", tests of whole engines and servers that are about its room. A test that hangs has found the mistake.
Results are kept in build/, so a run that was interrupted goes on.

The mistakes: another comparison (`<` for `<=`), `and` for `or`, a dropped `not`, `+ 1` or `- 1` on a small integer or on the
bound of a slice, a dropped bound, `+` for `-`, `min` for `max`, two arguments swapped, a condition that is always true or
always false, `True` for `False`, and a missing statement. Not touched are messages, log lines, assertions, type hints,
decorators, `__repr__`, numbers that have a name, and what needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.changed_tests import RUN_ELSEWHERE, Chosen, ImportGraph, cut, is_test, nearest_tests, read_durations  # noqa: E402
from scripts.drawn_mistakes import Mistake, apply, draw  # noqa: E402
from tests.architecture.source import PACKAGE  # noqa: E402

STYLE_ONLY = "E501,PIE790,RUF021"  # long lines, `pass` beside other statements, `and` beside `or`
SECONDS_ALONE = 15.0  # longer runs take two processes
NEAR_SECONDS = 60.0
WHOLE = {
    **dict.fromkeys(
        ("entrypoints/openai", "entrypoints/http", "entrypoints/fields"),
        ("test_openai_errors", "test_openai_fields", "test_openai_client", "test_openai_strangers"),
    ),
    "entrypoints/serve": ("test_serve_command", "test_front_ends"),
    "executor/external_launcher": ("test_external_launcher",),
    "models/transformers_fallback": ("test_transformers_fallback", "test_fallback_self_check"),
    "structured_output": ("test_structured_output",),
}
NO_TESTS = 5  # what pytest exits with
PYTEST_OPTIONS = ("-q", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=150")

Row = tuple[Mistake, dict[str, str]]  # with the stage and the test that found it


class Copy:
    """A copy of the working tree, in which mistakes are made and tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder
        listing = ["git", "-C", str(root), "ls-files", "-zco", "--exclude-standard"]
        listed = subprocess.run(listing, stdout=subprocess.PIPE, check=True)
        built = [path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.so")]
        for name in [*listed.stdout.decode().split("\0"), *built]:
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        if (root / ".mypy_cache").is_dir():
            shutil.copytree(root / ".mypy_cache", folder / ".mypy_cache")

    @contextlib.contextmanager
    def with_mistake(self, mistake: Mistake) -> Iterator[None]:
        """Each mistake gives the file another modification time, because Python compares this time to know whether the compiled
        code in its cache is still valid."""
        path = self.root / mistake.path
        source, seconds = path.read_bytes(), path.stat().st_mtime
        path.write_bytes(apply(source, mistake))
        os.utime(path, (seconds, seconds + mistake.number))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, (seconds, seconds))

    def refused_by(self, path: str) -> str:
        for tool in (["ruff", "check", "-q", "--extend-ignore", STYLE_ONLY], ["mypy", "--strict"]):
            if subprocess.run([sys.executable, "-m", *tool, path], cwd=self.root, capture_output=True).returncode:
                return tool[0]
        return ""

    def run(self, tests: list[str], durations: dict[str, float], *options: str) -> tuple[str, list[str]]:
        """How a run of tests failed ("" if it passed), and the names of the tests that failed, without their parameters."""
        seconds = sum(durations.get(test.partition("::")[0], 1.0) for test in tests)
        processes = ["-n", "2", "--dist", "worksteal"] if seconds > SECONDS_ALONE else []
        command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *processes, *options, *tests]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root)}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=self.root, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(300 + 6 * seconds)
                how = "" if code in (0, NO_TESTS) else f"pytest ended with {code}"
            except subprocess.TimeoutExpired:
                how = "hangs"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the processes that the tests have started, too
                process.wait()
            output.seek(0)
            failed = re.findall(r"^(?:FAILED|ERROR) (tests/[^\s\[]+)", output.read(), re.MULTILINE)
        return how, list(dict.fromkeys(failed))


class Search:
    """Tries one mistake after the other."""

    def __init__(self, root: Path, copy: Copy) -> None:
        self._copy, self._graph, self._durations = copy, ImportGraph(root), read_durations(root)

    def stages(self, path: str) -> dict[str, list[str]]:
        """The tests of a file, the nearest first: no test is in two stages."""
        mirror = self._graph.mirrors(path)
        users = [user for user in self._graph.users(path) if is_test(user)]
        folder = f"tests/unit/{path.split('/')[1]}/"
        room = [user for user in users if user.startswith(folder)]
        room += sorted(test for test in self._graph.paths.values() if test.startswith(folder) and is_test(test))
        room = [test for test in dict.fromkeys(room) if test not in mirror]
        seen = {*mirror, *room, *(user for user in users if user.startswith(RUN_ELSEWHERE))}
        nearest = dict.fromkeys(users + [test.path for test in nearest_tests(self._graph, [path])])
        near, _ = cut([Chosen(test, "") for test in nearest if test not in seen], self._durations, NEAR_SECONDS)
        whole = [f"tests/e2e/{test}.py" for part, tests in WHOLE.items() if part in path for test in tests]
        return {"mirror": mirror, "room": room, "near": [test.path for test in near], "whole": whole}

    def result(self, mistake: Mistake) -> dict[str, str]:
        with self._copy.with_mistake(mistake):
            if tool := self._copy.refused_by(mistake.path):
                return {"stage": "refused", "by": tool}
            for stage, tests in self.stages(mistake.path).items():
                if by := self._found_by(tests):
                    return {"stage": stage, "by": by}
        return {"stage": "not found", "by": ""}

    def _found_by(self, tests: list[str]) -> str:
        """The first test that fails twice, or how pytest ended; "" if all tests pass."""
        left_out: list[str] = []
        while tests:
            how, failed = self._copy.run(tests, self._durations, "-x", *left_out)
            if not how or not failed:
                return how
            if self._copy.run(failed, self._durations)[0]:
                return failed[0]
            left_out += [f"--deselect={test}" for test in failed]
        return ""

    def fail_without_mistakes(self, rows: list[Row]) -> list[str]:
        """Returns the tests that have found a mistake, but also fail without one. Their mistakes have to be tried once more."""
        tests = sorted({result["by"] for _, result in rows if result["by"].startswith("tests/")})
        return self._copy.run(tests, self._durations)[1] if tests else []


def line_of(mistake: Mistake, result: dict[str, str]) -> str:
    by = ": ".join(filter(None, (result["stage"], result["by"])))
    change = f"`{mistake.before}` -> `{mistake.after}`"
    cells = (f"{mistake.number}", f"{mistake.path}:{mistake.line}", f"`{mistake.code}`", change, by)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "¦") for cell in cells) + " |"


def sums(rows: list[Row]) -> str:
    tried = [(mistake.room, result["stage"]) for mistake, result in rows if result["stage"] != "refused"]
    rooms, found = Counter(room for room, _ in tried), Counter(room for room, stage in tried if stage != "not found")
    stages = Counter(stage for _, stage in tried)
    lines = [f"{room}: {found[room]} of {rooms[room]} found" for room in sorted(rooms)]
    lines += [f"by {stage}: {count}" for stage, count in stages.items()]
    lines.append(f"all: {found.total()} of {len(tried)} found; ruff or mypy refused {len(rows) - len(tried)} more")
    return "\n".join(lines)


def numbers(text: str) -> set[int]:
    return {int(number) for number in text.split(",") if number}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=44)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--only", type=numbers, default=set(), metavar="NUMBERS")
    parser.add_argument("--harmless", type=numbers, default=set(), metavar="NUMBERS")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    drawn: Iterator[Mistake] = (each for each in draw(root, options.seed) if each.number not in options.harmless)
    if options.only:
        drawn = itertools.takewhile(lambda each: each.number <= max(options.only), drawn)
    if options.list:
        print(*(line_of(each, {"stage": "", "by": ""}) for each in itertools.islice(drawn, options.count)), sep="\n")
        return 0
    kept = root / "build" / f"mistakes-{options.seed}.jsonl"
    kept.parent.mkdir(exist_ok=True)
    texts = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    known: dict[Mistake, dict[str, str]] = {Mistake(**mistake): result for mistake, result in map(json.loads, texts)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mistakes-") as folder:
        search = Search(root, Copy(root, Path(folder)))
        for mistake in drawn:
            if options.only and mistake.number not in options.only:
                continue
            if mistake not in known or options.only:
                known[mistake] = search.result(mistake)
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([asdict(mistake), known[mistake]]) + "\n")
            rows.append((mistake, known[mistake]))
            print(line_of(*rows[-1]), flush=True)
            if sum(result["stage"] != "refused" for _, result in rows) == options.count:
                break
        for test in search.fail_without_mistakes(rows):
            print(f"{test} also fails without a mistake: try the mistakes that it found once more")
    print(sums(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
