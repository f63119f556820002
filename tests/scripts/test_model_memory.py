"""The tables "which model for how much memory": they are those of today, and their figures are right."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.kernels.cpu.library import load_kernels
from scripts import model_memory
from scripts.model_memory import BF16, FORMS, GIB, INT4, INT8, MODELS, TABLES, best_for, needed_bytes, sizes
from tests.unit.entrypoints.runner import COMMAND

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="a KV cache in int8 needs the C++ kernels")
SERVE: Any = COMMAND.commands["serve"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_the_table_of_a_page_is_up_to_date(path: Any) -> None:
    page = path.read_text(encoding="utf-8")
    assert model_memory.with_table(page, TABLES[path]()) == page, "run scripts/model_memory.py, or scripts/check --fix"
    with pytest.raises(ValueError, match="the page lacks"):
        model_memory.with_table("# Title\n", "")


def parameters(model: str) -> tuple[int, int]:
    """The number of weights in linear layers, and in the embedding and the head, counted from the sizes."""
    fields = MODELS[model]
    hidden, heads, kv_heads = (fields[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = fields.get("head_dim", hidden // heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    linear = fields["num_hidden_layers"] * (attention + 3 * hidden * fields["intermediate_size"])
    return linear, fields["vocab_size"] * hidden * (1 if fields["tie_word_embeddings"] else 2)


@pytest.mark.parametrize("model", MODELS)
def test_the_figures_are_those_that_the_sizes_give(model: str) -> None:
    linear, table = parameters(model)
    fields = MODELS[model]
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    per_token = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head_dim  # keys and values
    for form, linear_bytes, cell_bytes in ((BF16, 2.0, 2.0), (INT8, 1.0, 1.0), (INT4, 0.5625, 1.0)):
        weights, cache = sizes(model, form, 32_000)
        # norms, scales and a head in int8 are the rest
        assert linear * linear_bytes + table <= weights <= linear * linear_bytes * 1.01 + table * 3.1
        assert 1.0 <= cache / (per_token * cell_bytes * 32_000) <= 1.07
    assert sizes(model, BF16, 8_000)[1] * 3.9 < sizes(model, BF16, 32_000)[1]


def test_names_of_models_say_their_size() -> None:
    for model in MODELS:
        [billions] = [float(part[:-1]) for part in model.split("-") if part[-1] == "B" and part[0].isdigit()]
        assert abs(sum(parameters(model)) / 1e9 - billions) < 0.12 * billions + 0.1, model


@pytest.mark.parametrize("memory", model_memory.MEMORIES)
def test_a_model_fits_and_its_command_starts_it(memory: int) -> None:
    model, form = best_for(memory)
    assert needed_bytes(model, form) <= 0.75e9 * memory
    larger = [other for other in MODELS if needed_bytes(other, INT4) > needed_bytes(model, INT4)]
    assert all(
        needed_bytes(other, INT4) > 0.75e9 * memory for other in larger if other.startswith(model_memory.README_FAMILY)
    )
    program, serve, served, *options = shlex.split(model_memory.command(model, form))
    assert (program, serve, served) == ("inflight", "serve", model)
    given = SERVE.make_context("serve", options).params
    names = EngineArgs.__dataclass_fields__.keys()
    args = EngineArgs(**{name: value for name, value in given.items() if name in names and value is not None})
    _, cache = sizes(model, form, 32_000)
    assert args.max_model_len == 32_000
    assert args.kv_cache_memory_bytes is not None and cache <= args.kv_cache_memory_bytes < cache + GIB
    assert (args.quantization, args.kv_cache_dtype) == (form.quantization, form.kv_cache_dtype)
    assert form in FORMS
