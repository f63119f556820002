"""The mistakes that `scripts/mistakes.py` makes, and which tests it runs: in a small repository of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.drawn_mistakes import Places, apply, draw
from scripts.mistakes import Copy, main

LIMITS = """
def may_start(running: int, limit: int) -> bool:
    return running < limit


def is_idle(running: int) -> bool:
    return running == 0
"""
LIMITS_TEST = """
from inflight.room.limits import may_start


def test_the_limit():
    assert may_start(1, 2)
    assert not may_start(2, 2)
"""


def with_mistakes(source: str) -> list[str]:
    """For each mistake that can be made in the source, the source with this mistake. All of them compile."""
    places = Places(source.encode())
    changed = [apply(places.source, edit).decode() for edit in places.all()]
    for text in changed:
        compile(text, "changed", "exec")
    return changed


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    files = {
        ".gitignore": "build/\n__pycache__/\n",
        "pytest.ini": "[pytest]\n",  # otherwise pytest would look for one in the folders above
        "inflight/__init__.py": "",
        "inflight/room/__init__.py": "",
        "inflight/room/limits.py": LIMITS,
        "tests/unit/room/test_limits.py": LIMITS_TEST,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a <= b < c", ["x = a < b < c", "x = a <= b <= c"]),
        ("x = a > b", ["x = a >= b"]),
        ("x = (a) >= (b)", ["x = (a) > (b)"]),
        ("x = a == b", ["x = a != b"]),
        ("x = a != b", ["x = a == b"]),
        ("x = a in b", ["x = a not in b"]),
        ("x = a not in b", ["x = a in b"]),
        ("x = a is b", ["x = a is not b"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = a and b and c", ["x = a or b and c", "x = a and b or c"]),
        ("x = a or (b)", ["x = a and (b)"]),
        ("x = not (a)", ["x = (a)"]),
        ("x = a + (b - c)", ["x = a - (b - c)", "x = a + (b + c)"]),
        ("x = f(3, k=True)", ["x = f(4, k=True)", "x = f(2, k=True)", "x = f(3, k=False)"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = f(é, b, c)", ["x = f(b, é, c)", "x = f(é, c, b)"]),
        ("x = a[b:]", ["x = a[:]", "x = a[b + 1:]", "x = a[b - 1:]"]),
        ("x = a[:2]", ["x = a[:]", "x = a[:3]", "x = a[:1]"]),
        ("x = a if b else c", ["x = a if True else c", "x = a if False else c"]),
        ("x = [a for a in b if c]", ["x = [a for a in b if True]", "x = [a for a in b if False]"]),
        ("if a:\n    b()", ["if True:\n    b()", "if False:\n    b()", "if a:\n    pass"]),
        ("if a:\n    raise B", ["if True:\n    raise B", "if False:\n    raise B", "pass"]),
        ("while a:\n    break", ["while a:\n    pass"]),
        ("a.b = c", ["pass"]),
        ("a[b] = c", ["pass"]),
        ("a += b", ["pass", "a -= b"]),
        ("async def f():\n    await a", ["async def f():\n    pass"]),
        ("def f():\n    if a:\n        return\n    return b", None),
        ("class A:\n    x: int = 1", ["class A:\n    x: int = 2", "class A:\n    x: int = 0"]),
    ],
)
def test_each_mistake(source: str, changed: list[str] | None) -> None:
    if changed is None:  # the return at the end stays
        assert "def f():\n    if a:\n        pass\n    return b" in with_mistakes(source)
        assert not any(text.endswith("pass") for text in with_mistakes(source))
    else:
        assert with_mistakes(source) == changed


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring: 1 < 2."""',
        "MAX_BYTES = 4 * 1024 + 1",
        "x = 200",
        "while True:\n    x = a",
        "if TYPE_CHECKING:\n    a(b, 1)",
        'if device.type == "cuda":\n    a(b, 1)',
        "torch.cuda.set_device(1)",
        "def f(x: Literal[1, 2]) -> Literal[True]: ...",
        "@dataclass(frozen=True)\nclass A(Struct, gc=False): ...",
        "def __repr__(self):\n    return 1",
        'logger.info("%s", a + 1)',
        'raise A(a + 1, f"{b - 1}")',
        'x = f"{a + 1}"',
        'x = "a" + b',
        "assert a < 1",
        "x = zip(a, strict=True)",
    ],
)
def test_what_is_not_touched(source: str) -> None:
    assert with_mistakes(source) == []


def test_a_seed_always_draws_the_same_mistakes(repository: Path) -> None:
    drawn = list(draw(repository, seed=1))
    assert drawn == list(draw(repository, seed=1))
    assert {(each.number, each.line) for each in drawn} in ({(1, 3), (2, 7)}, {(1, 7), (2, 3)})  # each line once
    assert {each.room for each in drawn} == {"room"}
    assert len({tuple(each.line for each in draw(repository, seed)) for seed in range(10)}) == 2


def test_a_run_says_which_mistakes_are_found_and_keeps_the_results(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to start
    monkeypatch.setattr(Copy, "refused_by", lambda self, path: "")
    before = {path: path.read_bytes() for path in repository.rglob("*.py")}
    assert main([], repository) == 0
    printed = capsys.readouterr().out
    assert "mirror: tests/unit/room/test_limits.py::test_the_limit |" in printed
    assert "| `==` -> `!=` | not found |" in printed or "`0` -> `" in printed
    assert "room: 1 of 2 found" in printed and "fails without" not in printed
    assert {path: path.read_bytes() for path in repository.rglob("*.py")} == before

    kept = repository / "build" / "mistakes-44.jsonl"
    assert len(kept.read_text().splitlines()) == 2
    monkeypatch.setattr(Copy, "run", None)  # known mistakes are not tried once more
    not_found = next(row[0]["number"] for row in map(json.loads, kept.read_text().splitlines()) if not row[1]["by"])
    assert main(["--harmless", f"{3 - not_found}"], repository) == 0
    assert "all: 0 of 1 found" in capsys.readouterr().out


def test_ruff_refuses_an_unused_name_and_a_mistake_is_undone_afterwards(repository: Path, tmp_path: Path) -> None:
    path = "inflight/room/limits.py"
    (repository / path).write_text("def f() -> None:\n    unused = 1\n")
    copy = Copy(repository, tmp_path / "copy")
    assert copy.refused_by(path) == "ruff"
    mistake, source = next(draw(repository, 1)), copy.root / path
    before = source.read_text(), source.stat().st_mtime
    with copy.with_mistake(mistake):
        assert source.read_text() != before[0] and source.stat().st_mtime != before[1]
    assert (source.read_text(), source.stat().st_mtime) == before
