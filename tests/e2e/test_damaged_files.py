"""Files of strangers: hundreds of models with one damaged or odd place each. Each is read as it is, or refused by one of our
errors: no traceback of a library, no hang."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.engine_args import EngineArgs
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.engine.request.model_info import make_input_processor
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.serve.check import model_problems
from inflight.errors import ConfigError, InvalidRequestError
from inflight.hub import EMBEDDED_MODEL
from inflight.model_loader.loader import load_model
from inflight.tokenizer.source import read_chat_template, read_tokenizer
from tests.conftest import FULL
from tests.support.full_context_attention import FullContextAttention
from tests.support.gguf_models import write_pair
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

Json = Any  # what a JSON file may hold
CHAT = [{"role": "user", "content": "What is 2 + 3?"}]
ODD: list[Json] = [
    None, True, 0, -1, 1, 3, 0.0, -0.5, 1e308, -1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "x", "\ud800",
    "{{ 1 / 0 }}", "{% for", [], [[]], [0], ["x", None], {}, {"x": {}}, {"type": "x"},
]  # fmt: skip


def nested(depth: int) -> Json:
    value: Json = 0
    for _ in range(depth):
        value = [value]
    return value


def places(value: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every member and element; of long lists only some."""
    found = [path] if path else []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))[:2] + list(enumerate(value))[-1:]
    else:
        children = []
    for key, child in children:
        found += places(child, (*path, key))
    return found


def spoil(value: Json, draw: random.Random) -> Json:
    """The JSON with one member or element replaced, removed, or added."""
    value = copy.deepcopy(value)
    # the depth is drawn first: most places are deep inside, and most readers look at the beginning
    every = places(value)
    depth = draw.choice(sorted({len(path) for path in every}))
    *way, last = draw.choice([path for path in every if len(path) == depth])
    parent = value
    for key in way:
        parent = parent[key]
    kind = draw.random()
    if kind < 0.1:
        del parent[last]
    elif kind < 0.15:
        parent[last] = nested(5000)
    elif kind < 0.2:
        parent[last] = [parent[last]] * 3
    else:
        parent[last] = draw.choice(ODD)
    return value


def as_text(value: Json) -> bytes:
    """Also what is nested more deeply than `json` writes."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        marked = json.loads(json.dumps(_without_depth(value)))
        return json.dumps(marked).replace('"DEEP"', "[" * 5000 + "]" * 5000).encode()


def _without_depth(value: Json, depth: int = 0) -> Json:
    if depth > 40:
        return "DEEP"
    if isinstance(value, dict):
        return {key: _without_depth(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list):
        found = [_without_depth(child, depth + 1) for child in value]
        return "DEEP" if len(found) == 1 and found[0] == "DEEP" else found
    return value


def spoil_bytes(data: bytes, draw: random.Random, first: int, last: int) -> bytes:
    """Some bytes of [first, last) changed, or the file cut there."""
    at = draw.randrange(first, last)
    if draw.random() < 0.2:
        return data[:at]
    changed = bytearray(data)
    for position in range(at, min(at + draw.choice((1, 1, 4, 8)), last)):
        changed[position] = draw.choice((0, 255, draw.randrange(256), changed[position] ^ 1 << draw.randrange(8)))
    return bytes(changed)


def spoil_json(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(
        spoil_bytes(data, draw, 0, len(data)) if draw.random() < 0.1 else as_text(spoil(json.loads(data), draw))
    )


def spoil_safetensors(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if draw.random() < 0.3:
        file.write_bytes(spoil_bytes(data, draw, 0, size + 8))
        return
    header = as_text(spoil(json.loads(data[8 : 8 + size]), draw))
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


def spoil_extents(file: Path, draw: random.Random) -> None:
    """Offsets outside of the file, negative, overlapping, with gaps, no numbers; shapes and dtypes that do not fit; files that
    are cut, longer, empty."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    rest = data[8 + size :]
    entry = header[draw.choice([name for name in header if name != "__metadata__"])]
    first, last = entry["data_offsets"]
    kind = draw.randrange(6)
    if kind == 0:
        entry["data_offsets"][draw.randrange(2)] = draw.choice(
            [-1, 2**63, 10**30, 1.5, None, "4", True, [], len(rest) + 1]
        )
    elif kind == 1:
        shift = draw.choice([-4, 4, -last, len(rest)])
        entry["data_offsets"] = [first + shift, last + shift]
    elif kind == 2:
        entry["shape"] = draw.choice([[], [-1], [2**40], [1, 1], [True], "x", None, [*entry["shape"], 2], [0]])
    elif kind == 3:
        entry["dtype"] = draw.choice(["F64", "BOOL", "F99", 3, None, ""])
    elif kind == 4:
        rest = draw.choice([rest[:-1], b"", rest[: len(rest) // 2], rest + b"x"])
    else:
        del entry[draw.choice(sorted(entry))]
    text = as_text(header)
    file.write_bytes(len(text).to_bytes(8, "little") + text + rest)


def spoil_gguf(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(spoil_bytes(data, draw, 0, min(len(data), 4000)))


def read_all(model: Path) -> None:
    """What a server reads of a model, without an engine."""
    args = EngineArgs(model=str(model), device="cpu", max_model_len=64, dtype="float32")
    config = resolve_config(args)
    backend: Any = FullContextAttention()  # Any: a stand-in
    load_model(config.model, device=torch.device("cpu"), backend=backend, tp=TensorParallelGroup())
    make_input_processor(args, config)
    tokenizer = read_tokenizer(config.model.folder, None)
    tokenizer.decode(tokenizer.encode("What is 2 + 3?"))
    read_chat_template(config.model.folder, None, None).render(CHAT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    plain = write_model(FAMILY_CONFIGS["qwen3"][1], folder / "plain", seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, plain / name)
    gguf = folder / "gguf"
    gguf.mkdir()
    _, file = write_pair(gguf, "llama")
    shutil.copy(EMBEDDED_MODEL / "tokenizer.json", gguf / "tokenizer.json")
    shutil.copy(EMBEDDED_MODEL / "tokenizer_config.json", gguf / "tokenizer_config.json")
    return {"plain": plain, "gguf": file}


CASES: dict[str, tuple[str, str, Callable[[Path, random.Random], None], int]] = {
    # model, file, how it is spoilt, how many times; without "full" a third of them
    "config.json": ("plain", "config.json", spoil_json, 100),
    "generation_config.json": ("plain", "generation_config.json", spoil_json, 30),
    "tokenizer.json": ("plain", "tokenizer.json", spoil_json, 50),
    "tokenizer_config.json": ("plain", "tokenizer_config.json", spoil_json, 50),
    "model.safetensors": ("plain", "model.safetensors", spoil_safetensors, 100),
    "extents": ("plain", "model.safetensors", spoil_extents, 120),
    "model.gguf": ("gguf", "model.gguf", spoil_gguf, 60),
}


TOLD = ("extents",)  # `inflight serve --check` refuses what the start refuses, and nothing else


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_file_is_read_or_refused_by_name(case: str, models: dict[str, Path]) -> None:
    name, file_name, change, count = CASES[case]
    model = models[name]
    file = (model if model.is_dir() else model.parent) / file_name
    whole = file.read_bytes()
    num_refused, count = 0, count if FULL else count // 3
    for seed in range(count):
        file.write_bytes(whole)
        change(file, random.Random(f"{case} {seed}"))
        try:
            problems = model_problems(EngineArgs(model=str(model), device="cpu", max_model_len=64, dtype="float32"))
            is_refused = False
            try:
                read_all(model)
            except (ConfigError, InvalidRequestError):
                is_refused = True
            num_refused += is_refused
            assert case not in TOLD or bool(problems) == is_refused, (problems, is_refused)
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {case}: {type(error).__name__}: {error}") from error
    file.write_bytes(whole)
    read_all(model)
    assert num_refused > count / 10, "some changes matter"
