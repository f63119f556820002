"""Which environment runs each engine, how a model is converted for it, and what drivers import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.compare import engines
from benchmarks.compare.engines import Engine, find_before, find_engine


def test_a_model_is_converted_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    log = tmp_path / "log"
    writes = f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x'); open({str(log)!r}, 'a').write('once')"
    fails = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('half'); sys.exit(1)"
    script = fails

    def command(self: Engine, folder: Path, target: Path) -> list[str]:
        return [sys.executable, "-c", script, str(target)]

    monkeypatch.setattr(Engine, "_convert_command", command)
    engine = Engine("llamacpp", "q4_0", Path(sys.executable))
    with pytest.raises(engines.subprocess.CalledProcessError):
        engine.convert(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]
    script = writes
    assert engine.convert(folder) == engine.convert(folder) == tmp_path / "tiny-q4_0.gguf"
    assert log.read_text() == "once"
    assert Engine("inflight", "int4", Path(sys.executable)).convert(folder) == folder
    file = tmp_path / "model.gguf"  # which both engines read
    assert Engine("llamacpp", "gguf", Path(sys.executable)).model_path(file) == file


def test_a_peer_without_an_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="vllm has no environment"):
        find_engine("vllm", "bf16", tmp_path)


def test_an_earlier_checkout_runs_its_own_driver_in_its_own_environment(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make demo"):
        find_before(tmp_path, "int8")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    before = find_before(tmp_path, "int8")
    assert (before.python, before.checkout, before.label) == (python, tmp_path, "inflight before int8")
    with pytest.raises(SystemExit, match="this checkout itself"):
        find_before(engines.REPOSITORY, "int8")


def test_drivers_import_nothing_of_ours() -> None:
    """They run where neither inflight nor torch may be."""
    code = """
import json, pathlib, sys
import benchmarks.compare.convert_gguf
for path in pathlib.Path("benchmarks/compare/drivers").glob("[a-z]*.py"):
    __import__(f"benchmarks.compare.drivers.{path.stem}")
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("inflight", "torch", "numpy")]))
"""
    found = engines.subprocess.run(
        [sys.executable, "-c", code], cwd=engines.REPOSITORY, check=True, stdout=engines.subprocess.PIPE
    )
    assert json.loads(found.stdout) == []
