"""Each field of each family's config.json, changed in turn: the logits are those of transformers, or the field is refused by
name.

A field that Inflight does not read, or reads in another way than transformers, would give a wrong text without an error. A
change for which transformers itself cannot build or run a model says nothing and is passed over. `make test-full` makes all
changes, `make test` a few of each family.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from inflight.config.engine import ModelConfig
from inflight.config.parse_architecture import parse_architecture
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigError
from inflight.model_loader.loader import load_model
from tests.support.full_context_attention import FullContextAttention, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, draw_weights

NUM_TOKENS = 40
TOLERANCE = 1e-4  # largest difference over largest logit
MAX_WEIGHTS = 20_000_000  # without a size, transformers takes that of a real model
NUM_SAMPLED = 6  # changes of each family in `make test`
ABSENT = "absent"
NAMES_OF_THE_MODEL = ("architectures", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype")
# Sizes of vectors that are normed. With one number, rounding weights by 1e-7 changes logits by more than TOLERANCE.
NORMED = ("hidden_size", "linear_key_head_dim")
ACTIVATIONS = ["silu", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu"]

Change = tuple[tuple[str, ...], object]  # the path of a field, and its new value


def changes_of(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Change]:
    for name, value in config.items():
        if name in NAMES_OF_THE_MODEL:
            continue
        if isinstance(value, dict):
            yield from changes_of(value, (*path, name))
        for new in [*_others(name, value), None, ABSENT]:
            if new != value or type(new) is not type(value):
                yield (*path, name), new


def _others(name: str, value: object) -> list[object]:
    """Other values of a field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, *([] if name in NORMED else [1])]
    if isinstance(value, float):
        return [2 * value, value / 2, 1.0]
    if isinstance(value, str):
        return list(ACTIVATIONS) if "act" in name else ["default", "linear", "yarn", "llama3"]
    if isinstance(value, list):
        return [value[::-1], value[:1] * len(value), value[-1:] * len(value), value[:-1]]
    return [7, 0.5, True, False] if value is None else []


def changed(config: dict[str, Any], change: Change) -> dict[str, Any]:
    path, value = change
    result = copy.deepcopy(config)
    inner = result
    for name in path[:-1]:
        inner = inner[name]
    if value == ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


def of_transformers(folder: Path) -> PreTrainedModel | None:
    """The model of the folder's config.json, with random weights that are saved there. None: transformers cannot build it."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            shape = AutoModelForCausalLM.from_config(config)
        if sum(weight.numel() for weight in shape.parameters()) > MAX_WEIGHTS:
            return None
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32).eval()
        draw_weights(model, seed=0)
        model.save_pretrained(folder)
    except Exception:
        return None
    assert isinstance(model, PreTrainedModel)
    return model


def problem_of(config: dict[str, Any], change: Change, folder: Path) -> str | None:
    """Why a change is wrong. "": the logits are the same, or the field is refused by name. None: transformers has no model."""
    given, folder = changed(config, change), folder / "model"
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(given))
    model = of_transformers(folder)
    if model is None:
        return None
    file.write_text(json.dumps(given))  # transformers has written its own
    tokens = torch.tensor([random.Random(1).randrange(3, 190) for _ in range(NUM_TOKENS)]) % model.config.vocab_size
    try:
        with torch.inference_mode():
            truth = model(tokens[None], use_cache=False).logits[0]
    except Exception:
        return None
    if not truth.isfinite().all():
        return None
    try:
        ours = logits_of(folder, given, tokens)
    except ConfigError as error:
        is_named = any(name in str(error) for name in change[0])
        return "" if is_named else f"refused without the field's name: {error}"
    except Exception as error:
        return f"failed with {type(error).__name__}: {error}"
    if ours.shape != truth.shape:
        return f"the shape of the logits is {list(ours.shape)}, not {list(truth.shape)}"
    difference = float((ours - truth).abs().max() / truth.abs().max().clamp(min=1e-6))
    return "" if difference < TOLERANCE else f"logits differ by {difference:.1e} of the largest"


def logits_of(folder: Path, config: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    architecture = parse_architecture(config).for_length(NUM_TOKENS)
    model_config = ModelConfig(
        folder=folder,
        name="changed",
        architecture=architecture,
        dtype="float32",
        max_model_len=NUM_TOKENS,
        load_format="safetensors",
        seed=0,
        fingerprint="",
    )
    backend: Any = FullContextAttention()
    with torch.inference_mode():
        model = load_model(model_config, device=torch.device("cpu"), backend=backend, tp=TensorParallelGroup())
        return run_prompt(model, tokens)


def check(family: str, index: int, folder: Path, num_changes: int | None = None) -> None:
    """Makes all changes, or `num_changes` of them, spread over all fields."""
    config = config_of(family, index)
    changes = list(changes_of(config))
    if num_changes is not None:
        first = sum(map(ord, family)) % len(changes)  # so that families differ in what is tried
        changes = [changes[(first + i * len(changes) // num_changes) % len(changes)] for i in range(num_changes)]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # those of transformers about odd values
        found = {f"{'.'.join(path)} = {value!r}": problem_of(config, (path, value), folder) for path, value in changes}
    assert not {change: problem for change, problem in found.items() if problem}
    assert sum(problem is not None for problem in found.values()) > len(changes) / 3, "few of the models could be built"


def config_of(family: str, index: int) -> dict[str, Any]:
    """As transformers writes it."""
    config: dict[str, Any] = json.loads(FAMILY_CONFIGS[family][index].to_json_string(use_diff=False))
    return config


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_some_changes(family: str, tmp_path: Path) -> None:
    check(family, 0, tmp_path, NUM_SAMPLED)


# what a run of all changes has found
FOUND: list[tuple[str, int, Change]] = [
    ("gemma4", 0, (("per_layer_config",), None)),
    ("deepseek_v2", 0, (("mlp_bias",), True)),
    ("smollm3", 1, (("use_sliding_window",), False)),
    ("qwen3_5", 0, (("hidden_act",), "gelu_pytorch_tanh")),
    ("deepseek_v3", 0, (("rms_norm_eps",), 0.1)),
    ("minicpm3", 0, (("rms_norm_eps",), 0.1)),
]


@pytest.mark.parametrize(("family", "index", "change"), FOUND)
def test_what_was_wrong_once(family: str, index: int, change: Change, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert problem_of(config_of(family, index), change, tmp_path) == ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "index"), [(family, index) for family, each in FAMILY_CONFIGS.items() for index in range(len(each))]
)
@pytest.mark.timeout(900)
def test_all_changes(family: str, index: int, tmp_path: Path) -> None:
    check(family, index, tmp_path)
