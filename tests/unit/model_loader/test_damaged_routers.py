"""Mixtures in every file format whose configuration has an impossible number or name for routers, experts or groups of scales.

Each is refused by the field's name, with its value, before weights are read. What changes nothing is read.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.config.architecture import INFLIGHT
from inflight.config.gguf_config import read_model_config
from inflight.config.unknown_family import describe_model
from inflight.damaged_files import named_errors
from inflight.errors import ConfigError, UnsupportedModelError
from tests.conftest import FULL
from tests.support.full_context_attention import load
from tests.support.gguf_experts import CONFIGS as GGUF_CONFIGS
from tests.support.gguf_experts import make_mixture
from tests.support.gguf_files import Number, write_gguf
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.unit.model_loader.test_damaged_weights import CHECKPOINTS

_NUM_DRAWN = 25  # cases of each file; all of them with "full"


def integer(value: int) -> Number:
    return Number("i" if value < 0 else "I", value)


def number(value: float) -> Number:
    return Number("f", value)


NOT_INTEGERS = ["4", True, number(2.5), number(float("nan")), integer(-1)]
# Key -> values that are impossible in all these architectures
GGUF_KEYS: dict[str, list[Any]] = {
    "expert_count": [integer(0), integer(1), integer(99), *NOT_INTEGERS],
    "expert_used_count": [integer(0), integer(99), *NOT_INTEGERS],
    "expert_gating_func": [integer(3), integer(7), "softmax", True, integer(-1)],
    "expert_weights_scale": [number(-1.0), number(float("nan")), number(float("inf")), "1", True],
    "expert_weights_norm": ["yes", integer(2)],
    "expert_group_count": [integer(3), integer(99), *NOT_INTEGERS],
    "expert_group_used_count": [integer(9), *NOT_INTEGERS],
    "expert_shared_count": [integer(9), *NOT_INTEGERS],
    "leading_dense_block_count": [integer(2), integer(99), *NOT_INTEGERS],
}
# Fields of config.json, of the families that have them
FIELDS: dict[str, list[Any]] = {
    "num_experts_per_tok": [99, 0, -1, "2", 2.5, True],
    "moe_k": [99, 0, -1, "2", 2.5, True],
    "num_local_experts": [-1, "3", 2.5, True],
    "num_experts": [-1, "3", 2.5, True],
    "n_routed_experts": [-1, "3", 2.5, True],
    "moe_num_experts": [-1, "3", 2.5, True],
    "moe_intermediate_size": [0, -1, "32", 2.5, True],
    "scoring_func": ["relu", "softmax", 3],
    "topk_method": ["greedy", "x", 3],
    "n_group": [0, 3, 99, "2", True],
    "topk_group": [0, 99, "2", True],
    "routed_scaling_factor": [0, -1.0, "2", True],
    "norm_topk_prob": ["yes", 3],
}
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SCHEME = ("config_groups", "group_0", "weights")
_SIZES = [0, -2, "32", 2.5, True, [32]]
QUANTIZATION: dict[str, dict[tuple[str, ...], list[Any]]] = {
    "gptq with experts": {("group_size",): _SIZES, ("bits",): [3, "4", True, None]},
    "awq with experts": {("group_size",): _SIZES, ("bits",): [3, 8, "4", None]},
    "pack-quantized": {(*_SCHEME, "group_size"): _SIZES, (*_SCHEME, "num_bits"): [3, "4", None]},
    "int-quantized": {(*_SCHEME, "group_size"): _SIZES, (*_SCHEME, "strategy"): ["x", None]},
    "fp8 per channel": {(*_SCHEME, "strategy"): ["x", None], (*_SCHEME, "num_bits"): [4, "8", None]},
    "fp8 in blocks": {("weight_block_size",): [[0, 0], [128], "x", [-1, 128], [128.5, 128], [True, 128]]},
}


def start(path: Path) -> None:
    """As an engine does it."""
    gguf = path if path.is_file() else None
    with named_errors(UnsupportedModelError, path, "its configuration"):
        architecture = describe_model(read_model_config(path), "auto", gguf=gguf)
    assert architecture.implementation == INFLIGHT, f"it was left to transformers' code: {architecture.not_native}"
    load(path, architecture=architecture)


def problem_of(path: Path, words: list[str]) -> str | None:
    """What is wrong with the refusal; None if it names all `words`."""
    try:
        start(path)
    except ConfigError as error:
        return None if all(word in str(error) for word in words) else str(error)
    except BaseException as error:
        return f"{type(error).__name__} {error}"
    return "it was read"


def drawn(cases: list[tuple[Any, ...]], seed: str) -> list[tuple[Any, ...]]:
    return cases if FULL else random.Random(seed).sample(cases, min(_NUM_DRAWN, len(cases)))


@pytest.mark.parametrize("architecture", sorted(GGUF_CONFIGS))
def test_keys_of_gguf_files(architecture: str, tmp_path: Path) -> None:
    _, keys, tensors = make_mixture(tmp_path, architecture, {})
    file = tmp_path / "model.gguf"
    write_gguf(file, keys, tensors)
    start(file)
    problems = []
    for key, value in drawn([(key, value) for key, values in GGUF_KEYS.items() for value in values], architecture):
        write_gguf(file, {**keys, f"{architecture}.{key}": value}, tensors)
        plain = value.value if isinstance(value, Number) else value
        wanted = [str(file), key, repr(plain)[:3]]
        found = problem_of(file, wanted)
        if found is not None:
            problems.append(f"{key}={plain!r}: {found}")
    assert not problems, "\n".join(problems)


def _family(name: str, index: int = 0) -> Callable[[Path], Path]:
    return lambda folder: write_model(FAMILY_CONFIGS[name][index], folder, seed=1)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{kind: lambda folder, kind=kind: CHECKPOINTS[kind](folder).path for kind in (*QUANTIZATION, "mxfp4")},
    **{name: _family(name) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "ernie4_5_moe")},
    "deepseek_v3": _family("deepseek_v3", 2),
    "glm4_moe": _family("glm4_moe"),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_fields_of_folders(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    cases: list[tuple[Any, ...]] = [((name,), value) for name in FIELDS if name in config for value in FIELDS[name]]
    quantization = QUANTIZATION.get(kind, {})
    cases += [(("quantization_config", *path), value) for path, values in quantization.items() for value in values]
    problems = []
    for path, value in drawn(cases, kind):
        changed = copy.deepcopy(config)
        place = changed
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        file.write_text(json.dumps(changed))
        found = problem_of(folder, ["config.json", path[-1], repr(value)])
        if found is not None:
            problems.append(f"{path}={value!r}: {found}")
    [count] = [name for name in COUNTS if isinstance(config.get(name), int)][:1]
    num_groups = config.get("n_group") or 1
    for value in (config[count] + num_groups, config[count] + 2 * num_groups if num_groups > 1 else config[count] - 1):
        file.write_text(json.dumps({**config, count: value}))
        found = problem_of(folder, [str(folder), ".experts.", f"config.json says that a layer has {value} experts"])
        if found is not None:
            problems.append(f"{count}={value}: {found}")
    file.write_text(json.dumps(config))
    start(folder)
    assert not problems, "\n".join(problems)
