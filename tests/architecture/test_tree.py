"""Every source file has its line in docs/tree.md, every line exists, and says what the file's docstring says."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import ROOT, write_package


def _load_script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("tree", str(ROOT / "scripts" / "tree"))
    spec = importlib.util.spec_from_loader("tree", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


script = _load_script()

FILES = {
    "__init__.py": '"""The engine. More."""',
    "config/__init__.py": '"""Settings."""',
    "config/engine.py": '"""`EngineConfig` of config.json\nand its parts. Every value is concrete."""',
    "kernels/cpu/gemm.cpp": "// Small matrices. And\n// more.\nint x;\n",
    "demo/model/weights.bin": "data has no line",
}
TREE = """\
inflight/                         The engine
  config/                         Settings
    engine.py                     EngineConfig of config.json and its parts
  kernels/
    cpu/
      gemm.cpp                    Small matrices"""


def test_the_tree_is_up_to_date() -> None:
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert script.problems(ROOT, page) == [], "run scripts/tree"


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_package(tmp_path, FILES)
    empty = f"# Title\n\n{script.BEGIN}\n\n```text\n```\n\n{script.END}\n\nmore\n"
    text = script.replace_tree(empty, script.tree_lines(tmp_path))
    assert isinstance(text, str)
    return text


def test_the_script_writes_what_the_check_reads(tmp_path: Path, page: str) -> None:
    assert "\n".join(script.read_tree(page)) == TREE
    assert page.startswith("# Title\n")
    assert page.endswith("\n\nmore\n")
    assert script.problems(tmp_path, page) == []
    assert script.replace_tree(page, script.tree_lines(tmp_path)) == page


def test_a_new_file_is_found(tmp_path: Path, page: str) -> None:
    write_package(tmp_path, {"config/model.py": ""})
    assert script.problems(tmp_path, page) == ["inflight/config/model.py has no line in docs/tree.md"]


def test_a_line_without_a_file_is_found(tmp_path: Path, page: str) -> None:
    (tmp_path / "inflight/config/engine.py").unlink()
    found = ["inflight/config/engine.py has a line in docs/tree.md but does not exist"]
    assert script.problems(tmp_path, page) == found


def test_a_stale_description_is_found(tmp_path: Path, page: str) -> None:
    write_package(tmp_path, {"config/engine.py": '"""Something else."""'})
    [problem] = script.problems(tmp_path, page)
    assert "differs from the docstring: engine.py" in problem


def test_a_missing_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="no ```text block"):
        script.read_tree("# Title\n")


def test_an_indentation_that_means_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="not indented below a folder"):
        script.tree_paths(["inflight/", "      engine.py"])


def test_git_hides_what_it_ignores(tmp_path: Path) -> None:
    write_package(tmp_path, {"kept.py": "", "ignored.py": ""})
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    assert [path.name for path in script.source_files(tmp_path)] == ["ignored.py", "kept.py"]  # no repository yet
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert [path.name for path in script.source_files(tmp_path)] == ["kept.py"]
