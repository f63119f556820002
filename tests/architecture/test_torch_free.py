"""The control plane never imports torch, and `import inflight` is lazy: by reading the source, then by running it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.architecture.rooms import CONTROL_PLANE_RANKS, ROOMS
from tests.architecture.source import PACKAGE, ROOT, Package, write_package
from tests.architecture.test_optional_dependencies import OPTIONAL

TORCH = frozenset({"torch", "torchvision", "transformers", "triton"})

_PROBE = """
import importlib, json, sys
names, absent, heavy = json.loads(sys.argv[1])
culprits = []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in absent:
            raise
    loaded = sorted(heavy_name for heavy_name in heavy if heavy_name in sys.modules)
    if loaded:
        culprits.append(f"import {name} loads {loaded}")
        break
print(json.dumps(culprits))
"""


def is_control_plane(room: str) -> bool:
    return room in ROOMS and ROOMS[room].rank in CONTROL_PLANE_RANKS


def torch_chains(package: Package) -> list[str]:
    """Ways from a control-plane module, or from the root, to torch: "a -> b -> torch". The shortest one a start.

    Of the root only what runs at import counts. Everywhere else a function-level import is one too many.
    """
    imported = {
        module: [each.module for each in package.imports(file) if each.at_run_time or module != PACKAGE]
        for module, file in package.by_module.items()
    }
    found = []
    for start, file in package.by_module.items():
        if start == PACKAGE or is_control_plane(file.room):
            found += _chain_to_torch(imported, start)
    return found


def _chain_to_torch(imported: dict[str, list[str]], start: str) -> list[str]:
    """
    Args:
        imported: each module of the package -> what it imports.
    """
    came_from = {start: ""}
    queue = [start]
    for module in queue:
        for target in imported[module]:
            if target.split(".")[0] in TORCH:
                chain = [target]
                while module:
                    chain.append(module)
                    module = came_from[module]
                return [" -> ".join(reversed(chain))]
            for step in _with_packages(target):
                if step in imported and step not in came_from:
                    came_from[step] = module
                    queue.append(step)
    return []


def _with_packages(module: str) -> list[str]:
    """Importing a.b.c executes a, a.b and a.b.c; the root is a start of its own and is left out."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(2, len(parts) + 1)]


def loads_heavy_modules(path: Path, names: list[str], heavy: list[str]) -> list[str]:
    """Which import first loads one of `heavy`, seen in a fresh interpreter with `path` as its working directory."""
    command = [sys.executable, "-c", _PROBE, json.dumps([names, sorted(OPTIONAL), heavy])]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    culprits = json.loads(done.stdout)
    assert isinstance(culprits, list)
    return culprits


def test_no_control_plane_module_reaches_torch() -> None:
    assert torch_chains(Package(ROOT / PACKAGE)) == []


def test_import_inflight_loads_nothing_heavy() -> None:
    assert loads_heavy_modules(ROOT, [PACKAGE], ["torch", "transformers", "msgspec", "tokenizers"]) == []


def test_importing_the_control_plane_does_not_load_torch() -> None:
    modules = [file.module for file in Package(ROOT / PACKAGE).files if is_control_plane(file.room)]
    assert modules, "the control plane has no modules: is the package where the test looks?"
    assert loads_heavy_modules(ROOT, modules, ["torch"]) == []


def test_direct_and_hidden_imports_are_found(tmp_path: Path) -> None:
    files = {
        "scheduler/a.py": "def f():\n    import torch",
        "kv_cache/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        "interface/__init__.py": "import torch.nn",
        "config/c.py": "import inflight.interface.step",
        "interface/step.py": "",
        "worker/d.py": "import torch",
    }
    assert set(torch_chains(write_package(tmp_path, files))) == {
        "inflight.scheduler.a -> torch",
        "inflight.kv_cache.b -> torch",
        "inflight.interface -> torch.nn",
        "inflight.config.c -> inflight.interface -> torch.nn",
    }


def test_the_root_may_name_torch_rooms_but_not_load_them(tmp_path: Path) -> None:
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from inflight.worker import w\n"
    lazy += "def __getattr__(name):\n    import inflight.worker.w\n"
    files = {"__init__.py": lazy, "worker/w.py": "import torch"}
    assert torch_chains(write_package(tmp_path, files)) == []
    files["__init__.py"] = "from inflight.worker import w"
    assert torch_chains(write_package(tmp_path, files)) == ["inflight -> inflight.worker.w -> torch"]


def test_the_probe_sees_what_an_import_loads(tmp_path: Path) -> None:
    files = {"__init__.py": "", "quiet.py": "import json", "sly.py": "m = 'tomllib'\n__import__(m)"}
    write_package(tmp_path, files)
    assert loads_heavy_modules(tmp_path, ["inflight.quiet"], ["tomllib"]) == []
    found = loads_heavy_modules(tmp_path, ["inflight.quiet", "inflight.sly"], ["tomllib"])
    assert found == ["import inflight.sly loads ['tomllib']"]
