"""A tensor has the dtype and the device that the code names, whatever the program around it has chosen for torch.

`torch.set_default_dtype` changes a whole process: a library that loads a model in another thread is enough. A tensor without a
dtype then has half the bytes that a C++ kernel reads.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, Package, SourceFile, dotted_name, write_package

# Functions of torch whose result has torch's default dtype or default device if the call names none. The last four are of
# torch.nn: their weights do.
FACTORIES = frozenset(
    """empty empty_strided empty_permuted zeros ones full arange range linspace logspace eye tensor as_tensor asarray
    scalar_tensor rand randn randint randperm tril_indices triu_indices hann_window hamming_window blackman_window
    bartlett_window kaiser_window nn.Linear nn.Embedding nn.LayerNorm nn.RMSNorm""".split()
)
LEGACY = frozenset({"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "IntTensor", "LongTensor"})  # take no dtype
NEEDED = ("dtype", "device")


def factory_problems(file: SourceFile) -> list[str]:
    found = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [
                f"{file.path}:{node.lineno}: write torch.{each.name}(...), so that this test sees the call"
                for each in node.names
                if each.name in FACTORIES
            ]
        if isinstance(node, ast.Call):
            name = _called(node)
            given = {each.arg for each in node.keywords}
            missing = [each for each in NEEDED if each not in given]
            if name in FACTORIES and missing:
                found.append(f"{file.path}:{node.lineno}: torch.{name} names no {' and no '.join(missing)}")
            if name in LEGACY:
                found.append(
                    f"{file.path}:{node.lineno}: torch.{name}(...) takes no dtype; use torch.tensor or torch.empty"
                )
    return found


def _called(node: ast.Call) -> str:
    """The function of torch that is called, or that `partial` will call: "empty", "nn.Linear"."""
    function: ast.expr = node.func
    if dotted_name(function) in ("partial", "functools.partial") and node.args:
        function = node.args[0]
    name = dotted_name(function)
    return name if name.startswith("nn.") else name.removeprefix("torch.") if name.startswith("torch.") else ""


def test_every_tensor_names_its_dtype_and_device() -> None:
    assert [problem for file in Package(ROOT / PACKAGE).files for problem in factory_problems(file)] == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch.empty(3, device='cpu')", "torch.empty names no dtype"),
        ("torch.zeros(3, dtype=torch.int8)", "torch.zeros names no device"),
        ("torch.tensor([0.5])", "torch.tensor names no dtype and no device"),
        ("def f():\n    return [torch.arange(n) for n in range(3)]", "torch.arange names no dtype and no device"),
        ("partial(torch.randn, device='cpu')", "torch.randn names no dtype"),
        ("nn.Linear(2, 3, device='meta')", "torch.nn.Linear names no dtype"),
        ("torch.nn.Embedding(2, 3, dtype=dtype)", "torch.nn.Embedding names no device"),
        ("torch.Tensor(3)", "takes no dtype"),
        ("from torch import Tensor, zeros", "write torch.zeros(...)"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, text: str, problem: str) -> None:
    [file] = write_package(tmp_path, {"layers/norm.py": text}).files
    [found] = factory_problems(file)
    assert problem in found


def test_what_names_both_passes(tmp_path: Path) -> None:
    text = "torch.empty(3, dtype=dtype, device=device)\nx.new_empty(3)\ntorch.zeros_like(x)\nfrom torch import Tensor"
    [file] = write_package(tmp_path, {"layers/norm.py": text}).files
    assert factory_problems(file) == []
