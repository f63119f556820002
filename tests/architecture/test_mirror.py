"""`tests/unit/` mirrors `inflight/`, both ways: each folder there is a folder here, and each file here has a test there.
`tests/inflight_bench/` mirrors the load generator in the same way.

A file has a test if a file of tests has its name, or if a test of its room imports it. The files that such a file imports count
as tested with it. All other files are in `ELSEWHERE`, with the test that runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.source import LOAD_GENERATOR, PACKAGE, ROOT, Package, write_package

# a pattern of files -> the test that runs them, below tests/
ELSEWHERE = {
    # programs, which tests start by their names
    "__main__.py": "unit/entrypoints/cli/test_standard_streams.py",
    "entrypoints/router/model_main.py": "e2e/test_several_models.py",
    "executor/worker_main.py": "unit/executor/test_multiproc_start.py",
    "multimodal/processor_main.py": "unit/multimodal/test_processors.py",
    "executor/ray_*.py": "e2e/test_ray.py",
    # found by the name of a model's type, or of a format
    "config/families/*.py": "unit/config/test_families.py",
    "parsers/argument*.py": "unit/parsers/test_output_parser.py",
    # called by other rooms' code
    "kernels/triton/attention_tile.py": "unit/attention/test_triton_paged.py",
}


# the same of the load generator
ELSEWHERE_OF_LOAD = {"plot.py": "inflight_bench/test_run.py"}


def mirror_problems(package: Package, unit: Path, elsewhere: Iterable[str] = ELSEWHERE) -> list[str]:
    tests = Package(unit, "tests.unit")
    tests.by_module |= package.by_module  # so that `from inflight.engine.core import step_loop` names a module
    folders = {Path(file.path).parent.as_posix() for file in package.files} | package.rooms
    found = [
        f"tests/unit/{folder} is about no folder of {PACKAGE}/"
        for folder in sorted({Path(test.path).parent.as_posix() for test in tests.files})
        if folder not in {".", *folders}
    ]
    names = {Path(test.path).name for test in tests.files}
    imported = {(test.path.partition("/")[0], each.module) for test in tests.files for each in tests.imports(test)}
    tested = {
        file.module
        for file in package.files
        if f"test_{Path(file.path).name}" in names or (file.room, file.module) in imported
    }
    parts = {each.module for file in package.files if file.module in tested for each in package.imports(file)}
    return found + [
        f"{file.path} has no test in tests/unit/"
        for file in package.files
        if not file.is_package
        and file.module not in tested | parts
        and not any(fnmatch(file.path, e) for e in elsewhere)
    ]


def test_folders_and_files_have_their_tests() -> None:
    for name, folder, elsewhere in ((PACKAGE, "unit", ELSEWHERE), (LOAD_GENERATOR, LOAD_GENERATOR, ELSEWHERE_OF_LOAD)):
        assert mirror_problems(Package(ROOT / name, name), ROOT / "tests" / folder, elsewhere) == []
        for pattern, test in elsewhere.items():
            assert list((ROOT / name).glob(pattern)) and (ROOT / "tests" / test).is_file(), pattern


FILES = {
    "hub.py": "",
    "engine/__init__.py": "",
    "engine/core/loop.py": "import inflight.engine.core.clock",
    "engine/core/clock.py": "",
}


@pytest.mark.parametrize(
    ("tests", "problems"),
    [
        ({"test_hub.py": "", "engine/core/test_loop.py": ""}, []),
        ({"test_hub.py": "", "engine/core/test_all.py": "from inflight.engine.core import loop"}, []),
        ({"test_hub.py": "", "engine/core/test_clock.py": ""}, ["engine/core/loop.py has no test in tests/unit/"]),
        (
            {"test_hub.py": "", "test_engine.py": "import inflight.engine.core.loop"},
            ["engine/core/clock.py has no test in tests/unit/", "engine/core/loop.py has no test in tests/unit/"],
        ),
        (
            {"test_hub.py": "", "engine/start/test_loop.py": ""},
            ["tests/unit/engine/start is about no folder of inflight/"],
        ),
    ],
)
def test_what_is_found(tmp_path: Path, tests: dict[str, str], problems: list[str]) -> None:
    package = write_package(tmp_path, FILES)
    for name, text in tests.items():
        path = tmp_path / "unit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert mirror_problems(package, tmp_path / "unit") == problems
