"""Where no kernels could be built: the install succeeds, plain torch serves the same tokens, and one line says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inflight import LLM, SamplingParams
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.python_process import run_python

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 6, 7] * 40, [9], list(range(3, 60))]
ARGUMENTS = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 24}
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from inflight import LLM, SamplingParams
folder, prompts, arguments, params = map(json.loads, sys.argv[1:])
with LLM(folder, **arguments) as llm:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def copied_package(folder: Path) -> Path:
    """The sources, without what has been built of them; a folder to import from, or to install."""
    shutil.copytree(ROOT / "inflight", folder / "inflight", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_")}
    return {**kept, **changes}


def install(source: Path, target: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Without a compiler."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    none = {"CC": "/nonexistent", "CXX": "/nonexistent"}
    return subprocess.run(
        [*command, str(source)], env=environment(**none, **changes), capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("hidden", ["missing", "off"])
def test_plain_torch_serves_the_same_tokens(tmp_path: Path, hidden: str) -> None:
    folder = write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path / "model", seed=0)
    path = copied_package(tmp_path) if hidden == "missing" else ROOT
    changes = {"INFLIGHT_CPU_KERNELS": "off"} if hidden == "off" else {}
    done = run_python(
        [sys.executable, "-c", PROGRAM, *map(json.dumps, (str(folder), PROMPTS, ARGUMENTS, GREEDY))],
        env=environment(PYTHONPATH=str(path), **changes),
        cwd=path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "kernels" in line]
    assert len(lines) == (hidden == "missing"), "who switches them off is not told so"
    assert all("plain torch serves" in line for line in lines)
    with LLM(str(folder), **ARGUMENTS) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
    assert json.loads(done.stdout) == [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.full
@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="another processor: no compiler is asked for")
def test_an_install_without_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = copied_package(tmp_path / "source")
    required = install(source, tmp_path / "required", INFLIGHT_REQUIRE_KERNELS="1")
    assert required.returncode != 0 and "/nonexistent" in required.stdout + required.stderr
    optional = install(source, tmp_path / "optional")
    assert optional.returncode == 0, optional.stderr
    assert (tmp_path / "optional/inflight/kernels/cpu/library.py").is_file()
    assert not list((tmp_path / "optional").rglob("*.so"))


@pytest.mark.full
@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="another processor: nothing is built")
def test_what_an_older_build_has_left_is_not_shipped(tmp_path: Path) -> None:
    """setuptools takes a library in build/ for that of the sources if it is newer than they are."""
    (tmp_path / "source").mkdir()
    source = copied_package(tmp_path / "source")
    built = ROOT / f"inflight/kernels/cpu/_{INSTRUCTION_SETS_HERE[0]}.so"
    left = [source / f"build/lib.linux-x86_64-cpython-{sys.version_info.major}{sys.version_info.minor}"]
    for folder in (*left, source):
        (folder / "inflight/kernels/cpu").mkdir(parents=True, exist_ok=True)
        shutil.copy(built, folder / "inflight/kernels/cpu")
    with (source / "inflight/kernels/cpu/token_masks.cpp").open("a") as file:
        file.write("// changed\n")
    newer = (source / "inflight/kernels/cpu/token_masks.cpp").stat().st_mtime + 3600
    for stale in source.rglob("*.so"):
        os.utime(stale, (newer, newer))
    done = install(source, tmp_path / "installed")
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "installed").rglob("*.so"))
