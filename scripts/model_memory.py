#!/usr/bin/env python3
"""Writes the tables "which model for how much memory" of README.md and docs/models.md.

The figures are computed as the engine computes them: the bytes of the weights (`weight_bytes`), and the blocks of one sequence
in the KV cache (`blocks_per_sequence`). No weights are read; the script has the sizes of each model.

    python scripts/model_memory.py           rewrites the tables
    python scripts/model_memory.py --print   prints them
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inflight.attention.selector import get_backend  # noqa: E402
from inflight.config.engine_args import EngineArgs  # noqa: E402
from inflight.config.pipeline_stage import PipelineStage  # noqa: E402
from inflight.distributed.tensor_parallel import TensorParallelGroup  # noqa: E402
from inflight.engine.start.kv_cache_sizing import blocks_per_sequence, make_groups  # noqa: E402
from inflight.engine.start.model_files import resolve_config  # noqa: E402
from inflight.layers.context import make_context  # noqa: E402
from inflight.model_loader.weight_size import weight_bytes  # noqa: E402
from inflight.models.decoder import DecoderForCausalLM  # noqa: E402
from inflight.worker.profile_run import cache_spec  # noqa: E402

BEGIN, END = "<!-- written by scripts/model_memory.py -->\n", "<!-- end -->\n"
GIB = 2**30
PROGRAM_BYTES = 1 * GIB  # Python, torch, the tokenizer and the working memory of a step, rounded up
USABLE = 0.75  # of a machine's memory; the rest is for the system and other programs
MEMORIES = (8, 16, 32, 64)  # GB
AGENT_TOKENS = 32_000  # a coding agent's first request has 10,000 to 30,000 tokens

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}  # Any: JSON
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}


def _sizes(layers: int, hidden: int, heads: int, mlp: int, *, tied: bool, **more: Any) -> dict[str, Any]:  # Any: JSON
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        **more,
    }


# Hub id -> the fields of its config.json that decide sizes.
MODELS: dict[str, dict[str, Any]] = {  # Any: JSON
    "Qwen/Qwen3-0.6B": {**_QWEN3, **_sizes(28, 1024, 16, 3072, tied=True)},
    "Qwen/Qwen3-1.7B": {**_QWEN3, **_sizes(28, 2048, 16, 6144, tied=True)},
    "Qwen/Qwen3-4B": {**_QWEN3, **_sizes(36, 2560, 32, 9728, tied=True)},
    "Qwen/Qwen3-8B": {**_QWEN3, **_sizes(36, 4096, 32, 12288, tied=False)},
    "Qwen/Qwen3-14B": {**_QWEN3, **_sizes(40, 5120, 40, 17408, tied=False)},
    "Qwen/Qwen3-32B": {**_QWEN3, **_sizes(64, 5120, 64, 25600, tied=False)},
    "Qwen/Qwen2.5-Coder-7B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **_sizes(28, 3584, 28, 18944, tied=False),
        "vocab_size": 152064,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        **_LLAMA,
        **_sizes(28, 3072, 24, 8192, tied=True),
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **_LLAMA,
        **_sizes(32, 4096, 32, 14336, tied=False),
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
}
README_FAMILY = "Qwen/Qwen3-"  # tool calls and reasoning, in every size


@dataclass(frozen=True)
class Form:
    """A form in which the engine keeps a model: the arguments that choose it."""

    name: str
    quantization: str | None
    kv_cache_dtype: str = "auto"

    @property
    def options(self) -> str:
        given = "" if self.quantization is None else f" --quantization {self.quantization}"
        return given + ("" if self.kv_cache_dtype == "auto" else f" --kv-cache-dtype {self.kv_cache_dtype}")


BF16, INT8, INT4 = Form("bfloat16", None), Form("int8", "int8", "int8"), Form("int4", "int4", "int8")
FORMS = (BF16, INT8, INT4)  # the most exact one first


@functools.cache
def sizes(model: str, form: Form, num_tokens: int) -> tuple[int, int]:
    """Returns the bytes of the weights, and those of the KV cache for one sequence of `num_tokens` tokens, on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
        config = resolve_config(
            EngineArgs(
                model=folder,
                load_format="dummy",
                device="cpu",
                dtype="bfloat16",
                skip_tokenizer_init=True,
                quantization=form.quantization,
                kv_cache_dtype=form.kv_cache_dtype,
            )
        )
    architecture, device, dtype = config.model.architecture, torch.device("cpu"), torch.bfloat16
    kv_cache_dtype: torch.dtype = getattr(torch, config.cache.dtype)
    backend = get_backend("cpu", architecture.head_dims, config.cache.block_size, dtype, kv_cache_dtype)
    context = make_context(
        dtype=dtype, device=device, tp=TensorParallelGroup(), backend=backend, quantization=config.model.quantization
    )
    whole = PipelineStage(0, architecture.num_layers, architecture.num_layers)
    decoder = DecoderForCausalLM(architecture, replace(context, allocates_later=True), whole)
    specs = {name: cache_spec(layer, config) for name, layer in decoder.cached_layers().items()}
    [groups] = make_groups([specs])
    block_bytes = max(len(group.layer_names) * group.spec.block_bytes for group in groups)
    max_step_tokens = config.scheduler.max_num_batched_tokens
    num_blocks = 1 + blocks_per_sequence(groups, num_tokens=num_tokens, max_step_tokens=max_step_tokens)
    return weight_bytes(decoder, config.model), num_blocks * block_bytes


def needed_bytes(model: str, form: Form, num_tokens: int = AGENT_TOKENS) -> int:
    """What a server with one conversation of this length needs, the program itself included."""
    return sum(sizes(model, form, num_tokens)) + PROGRAM_BYTES


def best_for(memory: int) -> tuple[str, Form]:
    """The largest model of README's family that fits into so many GB, in the most exact form that fits."""
    models = [model for model in MODELS if model.startswith(README_FAMILY)]
    fitting = [
        (model, form) for model in models for form in reversed(FORMS) if needed_bytes(model, form) <= _usable(memory)
    ]
    return fitting[-1]


def command(model: str, form: Form) -> str:
    """The command that serves the model with a KV cache of this size."""
    _, cache = sizes(model, form, AGENT_TOKENS)
    size = f"{math.ceil(cache / GIB * 2) / 2:g}G"
    return f"inflight serve {model}{form.options} --max-model-len 32k --kv-cache-memory-bytes {size}"


def readme_table() -> str:
    lines = ["| memory | command | weights | KV cache of 32,000 tokens |", "|---|---|---|---|"]
    for memory in MEMORIES:
        model, form = best_for(memory)
        weights, cache = sizes(model, form, AGENT_TOKENS)
        lines.append(f"| {memory} GB | `{command(model, form)}` | {_gib(weights)} | {_gib(cache)} |")
    return "\n".join(lines) + "\n"


def models_table() -> str:
    lines = [
        "| model | weights: bfloat16 | int8 | int4 | KV cache, 32,000 tokens: bfloat16 | int8 | all of this fits into |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        weights = [_gib(sizes(model, form, AGENT_TOKENS)[0]) for form in FORMS]
        caches = [_gib(sizes(model, form, AGENT_TOKENS)[1]) for form in (BF16, INT8)]
        lines.append(f"| {model} | {' | '.join(weights + caches)} | {', '.join(_smallest_memories(model))} |")
    return "\n".join(lines) + "\n"


def _smallest_memories(model: str) -> Iterator[str]:
    """For each form, the smallest memory into which it fits."""
    for form in FORMS:
        fitting = [memory for memory in (*MEMORIES, 128) if needed_bytes(model, form) <= _usable(memory)]
        yield f"{fitting[0]} GB ({form.name})"


def _usable(memory: int) -> float:
    return memory * 10**9 * USABLE


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


TABLES = {ROOT / "README.md": readme_table, ROOT / "docs" / "models.md": models_table}


def with_table(page: str, table: str) -> str:
    """The page with this table between the two marks.

    Raises:
        ValueError: the page does not have the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return before + begin + table + end + after


def main() -> None:
    for path, table in TABLES.items():
        if "--print" in sys.argv:
            print(table())
        else:
            path.write_text(with_table(path.read_text(encoding="utf-8"), table()), encoding="utf-8")


if __name__ == "__main__":
    main()
