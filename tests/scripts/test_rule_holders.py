"""The rules of scripts/rule_holders.py name files and tests that exist."""

from __future__ import annotations

import ast
import fnmatch
from pathlib import Path

import pytest

from inflight.config import families
from scripts.rule_holders import RULES, Rule, holders
from tests.support.model_zoo import FAMILY_CONFIGS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.pattern}-{rule.arguments}")
def test_a_rule_names_what_exists(rule: Rule) -> None:
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / rule.pattern).parent.iterdir())
    assert fnmatch.filter(files, rule.pattern)
    file, _, test = rule.arguments.split()[0].partition("::")
    assert (ROOT / file).is_file()
    if test:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert test in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", families.NAMES)
def test_a_family_is_compared_with_transformers(name: str) -> None:
    found = [arguments for arguments, _ in holders(f"inflight/config/families/{name}.py")]
    assert f"tests/e2e/test_model_parity.py -k {name}" in found
    assert any(name in each for each in FAMILY_CONFIGS), "the words choose no test"


def test_most_files_have_no_such_rule() -> None:
    for path in (
        "inflight/scheduler/scheduler.py",
        "inflight/config/families/family.py",
        "tests/conftest.py",
        "Makefile",
    ):
        assert holders(path) == []
    assert [arguments for arguments, _ in holders("docs/cli.md")] == ["tests/e2e/test_documented_commands.py -k cli.md"]
