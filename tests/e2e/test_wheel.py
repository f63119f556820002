"""What is shipped: the sdist and the wheel, installed in a fresh environment outside the repository. It serves there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.kernels.cpu.library import INSTRUCTION_SETS
from tests.e2e.serve_process import ServeProcess, serving
from tests.support.documented_commands import ROOT, blocks_of, commands_of
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE

SHIPPED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
SECONDS = 600  # where no library fits the sources, the kernels are compiled


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFLIGHT_", "PYTHON"))}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def copy_libraries(target: Path) -> None:
    """The compiled kernels of this checkout. setup.py takes only those that were built from the sources beside them."""
    for library in (ROOT / "inflight" / "kernels" / "cpu").glob("*.so"):
        shutil.copy(library, target / "inflight" / "kernels" / "cpu")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of the package, copied: builds write into the folder that they are run in."""
    folder = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ("inflight", "inflight_bench"):
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    for name in SHIPPED:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist, so that a source that the sdist lacks is missed."""
    built = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", built, cwd=sources)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(built, filter="data")
    (unpacked,) = (path for path in built.iterdir() if path.is_dir())
    copy_libraries(unpacked)
    required = {"INFLIGHT_REQUIRE_KERNELS": "1"} if INSTRUCTION_SETS_HERE else {}
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", built, cwd=unpacked, **required)
    (path,) = built.glob("*.whl")
    return path


def make_environment(folder: Path) -> Path:
    """A fresh virtual environment that finds the packages of this one, but not its Inflight; its folder of commands."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    commands = folder / "bin"
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = Path(run(commands / "python", "-c", ask, cwd=folder).strip())
    (own / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    (commands / "pip").write_text(f'#!/bin/sh\nexec {commands}/python -m pip "$@"\n')
    (commands / "pip").chmod(0o755)
    return commands


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with the wheel."""
    folder = make_environment(tmp_path_factory.mktemp("fresh") / "venv")
    run(folder / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def server(commands: Path) -> Iterator[ServeProcess]:
    with serving(installed=commands / "inflight") as process:
        yield process


def test_the_wheel_has_what_it_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    needed = "inflight/py.typed inflight/demo/model/model.safetensors inflight/kernels/triton/linear.py inflight_bench/run.py"
    assert set(needed.split()) <= set(names)
    libraries = [name for name in names if name.endswith(".so")]
    if INSTRUCTION_SETS_HERE:
        assert sorted(name.rpartition("/")[2] for name in libraries) == sorted(
            f"_{name}.so" for name in INSTRUCTION_SETS if name.startswith("avx")
        )
    assert not [name for name in names if name.endswith((".cpp", ".h")) or name.startswith(("tests", "scripts"))]


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    """Its name says what it needs: no version of Python, and a glibc that is new enough for its libraries."""
    tags = wheel.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"]
    if not INSTRUCTION_SETS_HERE:
        assert tags == ["py3", "none", "any"]
        return
    found = re.fullmatch(r"manylinux_2_(\d+)_x86_64", tags[2])
    assert found is not None, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    needed = [int(minor) for library in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", library)]
    assert max(needed) <= int(found.group(1))
    for library in libraries:
        assert b"libpython" not in library and b"Py_" not in library and b"PyInit" not in library


def test_the_environment_runs_the_wheel(commands: Path) -> None:
    where = run(commands / "python", "-c", "import inflight; print(inflight.__file__)", cwd=commands).strip()
    assert Path(where).is_relative_to(commands.parent)
    listed = run(commands / "inflight", "env", cwd=commands)
    if INSTRUCTION_SETS_HERE:
        assert re.search(r"avx", listed), listed


def test_the_installed_server_answers(server: ServeProcess) -> None:
    status, answer = server.request(
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0},
    )
    assert status == 200, answer
    assert "85" in answer


def test_the_installed_load_generator_measures_the_installed_server(server: ServeProcess, commands: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    sizes = ("--num-prompts=2", "--input-len=8", "--output-len=4")
    report = run(commands / "inflight", "bench", "serve", "--base-url", url, *sizes, cwd=commands)
    assert re.search(r"Successful requests: +2\b", report), report


def test_the_health_check_of_the_image(server: ServeProcess, commands: Path) -> None:
    """The very command of the Dockerfile, against a server that is well and against a port where none listens. In the image the
    script of deploy/ has another place."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    found = re.search(r"HEALTHCHECK .*?CMD (\[.*?\])$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    _, script = ast.literal_eval(found.group(1))
    assert f"COPY deploy/health.py {script}" in text
    for port, code in ((server.port, 0), (1, 1)):
        environment = {"INFLIGHT_SERVE_PORT": str(port), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [commands / "python", ROOT / "deploy" / "health.py"], env=environment, capture_output=True, timeout=300
        )
        assert done.returncode == code, done.stderr


def test_the_readme_s_install(sources: Path, tmp_path: Path) -> None:
    """`pip install .`, as the README has it; and its twin with uv. What Inflight needs is there already."""
    (block,) = [each for each in blocks_of(ROOT / "README.md") if each.not_run.startswith("tests/e2e/test_wheel.py")]
    (command,) = commands_of(block)
    clone = shutil.copytree(sources, tmp_path / "clone")
    copy_libraries(clone)
    twin = re.search(r"or: (uv pip install \S+)", command)
    assert twin is not None
    for name, line in (("pip", command), ("uv", twin.group(1))):
        folder = make_environment(tmp_path / name)
        shutil.copy(Path(sys.executable).parent / "uv", folder / "uv")
        offline = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        offline |= {"UV_NO_INDEX": "1", "UV_NO_BUILD_ISOLATION": "1", "UV_OFFLINE": "1"}
        if name == "uv":
            line += " --no-deps"
        run(
            "bash",
            "-c",
            line,
            cwd=clone,
            PATH=f"{folder}:{os.environ['PATH']}",
            VIRTUAL_ENV=str(tmp_path / name),
            **offline,
        )
        assert "inflight" in run(folder / "inflight", "--version", cwd=tmp_path)
