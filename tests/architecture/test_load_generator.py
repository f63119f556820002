"""`inflight_bench` is a client of any server: of `inflight` it takes little, and `inflight` takes it for one command only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import LOAD_GENERATOR, PACKAGE, ROOT, Package
from tests.architecture.test_torch_free import TORCH, loads_heavy_modules

FROM_THE_ENGINE = frozenset({"inflight.errors", "inflight.event_buffer"})
COMMAND = "entrypoints/cli/bench_serve.py"  # the file of `inflight` that may import the load generator

# dependency -> the file that may import it
DEPENDENCIES = {
    "aiohttp": "client.py",
    "matplotlib": "plot.py",
    "tqdm": "run.py",
    "typer": "options.py",
    "uvloop": "run.py",
}
ENGINE_S = frozenset(
    {*TORCH, "msgspec", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "fastapi", "uvicorn"}
)


def problems(package: Package) -> list[str]:
    return [
        f"{file.path}:{each.line}: imports {each.module}"
        for file in package.files
        for each in package.imports(file)
        if (each.top == PACKAGE and each.module not in FROM_THE_ENGINE)
        or each.top in ENGINE_S
        or DEPENDENCIES.get(each.top, file.path) != file.path
    ]


def uses(package: Package) -> list[str]:
    """Imports of the load generator elsewhere than in its command, and imports of the command with the importing module."""
    command = f"{PACKAGE}.{COMMAND.removesuffix('.py').replace('/', '.')}"
    return [
        f"{file.path}:{each.line}: imports {each.module}"
        for file in package.files
        for each in package.imports(file)
        if (each.top == LOAD_GENERATOR and file.path != COMMAND) or (each.module == command and each.at_run_time)
    ]


def test_what_the_load_generator_imports() -> None:
    package = Package(ROOT / LOAD_GENERATOR, LOAD_GENERATOR)
    assert problems(package) == []
    names = [file.module for file in package.files]
    assert loads_heavy_modules(ROOT, names, sorted(ENGINE_S)) == []


def test_what_imports_the_load_generator() -> None:
    assert uses(Package(ROOT / PACKAGE)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("run.py", "from inflight.engine.core.engine_core import EngineCore"),
        ("run.py", "def f():\n    from inflight import LLM"),
        ("client.py", "import torch"),
        ("run.py", "import aiohttp"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).write_text(text)
    assert len(problems(Package(tmp_path, LOAD_GENERATOR))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("entrypoints/cli/main.py", "from inflight.entrypoints.cli import bench_serve"),
        ("entrypoints/cli/chat.py", "def f():\n    import inflight_bench.client"),
    ],
)
def test_a_wrong_use_is_found(tmp_path: Path, path: str, text: str) -> None:
    for name in (path, COMMAND):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text if name == path else "import inflight_bench.run")
    assert len(uses(Package(tmp_path))) == 1
