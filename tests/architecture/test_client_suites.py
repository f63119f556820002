"""The suites of `make test-clients` are not run with the other tests. So what they import of Inflight is looked up here."""

import ast
from importlib import import_module
from pathlib import Path

SUITES = Path(__file__).parents[1] / "clients"


def test_the_client_suites_import_what_is_there() -> None:
    imported = {
        (path.name, node.module, name.name)
        for path in SUITES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "inflight"
        for name in node.names
    }
    assert imported
    missing = {each for each in imported if not hasattr(import_module(each[1]), each[2])}
    assert not missing
