"""Which causal LMs of transformers run: a small random model of every type, compared with transformers' own results.

    python -m benchmarks.coverage [--types gemma2 phi3] [--columns float32 tp2 bfloat16 int8] [--write]

The prompts run together, in chunks. A column is a way to run the model: in float32, in float32 on two ranks (tp2), in bfloat16,
or in float32 with weights quantized to int8.

In float32 a type is *exact* if all greedy tokens are those of transformers, or its logits differ by less than 1e-4 there, and
if the log-probabilities differ by less than 1e-4. In the other columns no more can be asked than what roundings leave: it is
*close* if its log-probabilities differ from transformers' own in float32 by no more than a few times what transformers' own
differ in this format. It is *refused* if the engine does not start, with the reason. It is *wrong* otherwise: this must not
happen. `--write` puts the table of all columns into docs/models.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.shared.report import emit

DOCUMENT, BEGIN, END = Path("docs/models.md"), "<!-- made by benchmarks.coverage -->", "<!-- end -->"
VOCAB_SIZE, MAX_MODEL_LEN, MARGIN = 203, 96, 1e-4
# Column -> arguments of the engine. Where they are not those of float32: how much more than transformers' own in bfloat16 the
# log-probabilities may differ from those in float32, on average.
COLUMNS: dict[str, dict[str, Any]] = {  # Any: `EngineArgs`
    "float32": {},
    "tp2": {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
_FACTOR = {"bfloat16": 3.0, "int8": 6.0}
_LEAST_NOISE = 0.01
PROMPT_LENGTHS = (1, 9, 40, 70)
NUM_OUTPUT_TOKENS = 8
STANDARD_DEVIATION = 0.15
TIMEOUT_SECONDS, PER_PROCESS = 600, 12  # a process checks this many types, one after the other

# Fields of configurations -> small values. A configuration gets those that it has.
_SMALL: dict[str, Any] = {  # Any: values of config.json
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "encoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(
        ("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input", "kv_lora_rank", "index_head_dim"), 8
    ),
    "q_lora_rank": 24,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_shared_experts"), 1),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window"), 11),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("pad_token_id",), 0),
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
}
_Found = dict[str, dict[str, dict[str, str]]]  # type -> column -> result and reason
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_dt_rank": 8, "attention_head_dim": 32}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]}
# What the small models of some types need besides.
_BY_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bailing_hybrid": {"linear_head_dim": 16, "linear_num_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {**_MAMBA, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    "zamba": {**_MAMBA, **_HYBRID, "n_mamba_heads": 2},
    "zamba2": {**_MAMBA, **_HYBRID, "n_mamba_heads": 8, "mamba_headdim": 16},
}
# If no model can be made, further values are tried.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 4},
    {"num_experts_per_tok": 1, "hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 6},
)


def small_config(model_type: str) -> Any:  # Any: a configuration of transformers
    """A configuration with small sizes, with decoder settings where the type has them."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    problems: list[Exception] = []
    for more in _VARIANTS:
        try:
            config = config_class(**{**_small_fields(default, more), **_BY_TYPE.get(model_type, {})})
            with torch.device("meta"):
                AutoModelForCausalLM.from_config(config)
            return config
        except Exception as error:  # whatever a family raises
            problems.append(error)
    raise problems[0]


def _small_fields(default: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in {**_SMALL, **more}.items() if name in default}
    for name in ("num_key_value_heads", "n_group", "topk_group"):
        if default.get(name) is None and name not in more:
            found.pop(name, None)
    num_layers, small = default.get("num_hidden_layers", 0), found.get("num_hidden_layers", 2)
    for name, value in default.items():  # what has an entry for each layer
        if isinstance(value, list) and len(value) == num_layers and name not in found:
            found[name] = value[:small]
        if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            found[name] = {key: each for key, each in value.items() if int(key) < small}
    if "qk_rope_head_dim" in found and "head_dim" in found:
        found["head_dim"] = found["qk_rope_head_dim"]
    if "kv_lora_rank" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    kinds = list(dict.fromkeys(default.get("layer_types") or ()))
    if kinds:
        found["layer_types"] = (kinds * small)[:small]
    mlp_kinds = list(dict.fromkeys(default.get("mlp_layer_types") or ()))
    if mlp_kinds:
        found["mlp_layer_types"] = (mlp_kinds * small)[:small]
    if "is_decoder" in default:
        found["is_decoder"] = True
    for name, value in default.items():
        if name.endswith("_config") and isinstance(value, Mapping) and "model_type" in value:
            found[name] = {**value, **_small_fields(value, more)}
    return found


def check_type(model_type: str, folder: Path, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Returns column -> {"result": "exact" | "close" | "refused" | "wrong" | "no model", "why": ...}."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = small_config(model_type)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw(model)
        model.save_pretrained(folder)
        truth = _read(folder, "float32", "float32")
        with torch.inference_mode():
            truth(torch.arange(3, 9)[None]).logits  # noqa: B018  # it must run
    except Exception as error:  # whatever a family raises: then there is nothing to compare with
        return {column: {"result": "no model", "why": _reason(error)} for column in columns}
    return {column: _compare(folder, column) for column in columns}


def _read(folder: Path, column: str, dtype: str) -> Any:  # Any: a model of transformers
    """The model with the weights that the engine has in this column, computed by transformers in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM

    from inflight.kernels.quantized_weight import quantize_rows

    stored = torch.bfloat16 if column == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored, attn_implementation="eager").eval()
    if column == "int8":
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear and ".layers." in f".{name}":
                rounded = quantize_rows(module.weight.data, bits=8, group_size=0).dequantize()
                module.weight.data = rounded
    return model.to(getattr(torch, dtype))


def _draw(model: Any) -> None:
    """Wide weights, so that logits are far apart, and random norms and biases, so that one that is left out shows."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * STANDARD_DEVIATION
        parameter.data.copy_(1 + values if "norm" in name.lower() and parameter.dim() == 1 else values)
    for module in model.modules():
        if getattr(module, "padding_idx", None) is not None and isinstance(module, torch.nn.Embedding):
            module.weight.data[module.padding_idx] = 0  # transformers may do so when it loads the model


def _compare(folder: Path, column: str) -> dict[str, str]:
    from inflight import LLM, SamplingParams
    from inflight.errors import InflightError

    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=1)
    arguments: dict[str, Any] = {  # Any: `EngineArgs`
        "model_impl": "transformers",
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 1 << 26,
        "num_threads": 1,
        **COLUMNS[column],
    }
    try:
        with LLM(str(folder), **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
    except InflightError as error:
        return {"result": "refused", "why": _reason(error).replace(f"{folder}/", "")}
    except Exception as error:
        return {"result": "wrong", "why": f"not refused by name: {_reason(error)}"}
    answers = [(each.prompt_token_ids, each.outputs[0].token_ids) for each in outputs]
    ours = [
        entry[token].logprob
        for each in outputs
        for token, entry in zip(each.outputs[0].token_ids, each.outputs[0].logprobs or [], strict=True)
    ]
    truths = _log_probabilities(_read(folder, column, "float32"), answers)
    apart = [abs(truth - own) for (truth, _), own in zip(truths, ours, strict=True)]
    if column in _FACTOR:
        return _judge_rounded(folder, column, answers, truths, apart)
    for i, ((_, behind), difference) in enumerate(zip(truths, apart, strict=True)):
        if behind >= MARGIN or difference >= MARGIN:
            prompt = PROMPT_LENGTHS[i // NUM_OUTPUT_TOKENS]
            why = f"token {i % NUM_OUTPUT_TOKENS} after {prompt}: behind by {behind:.1e}, log-probability by {difference:.1e}"
            return {"result": "wrong", "why": why}
    return {"result": "exact", "why": f"log-probability by {max(apart):.1e}"}


_Answers = Sequence[tuple[list[int], list[int]]]  # prompt and generated tokens of each request


def _judge_rounded(
    folder: Path, column: str, answers: _Answers, truths: list[tuple[float, float]], apart: list[float]
) -> dict[str, str]:
    try:
        plain = _log_probabilities(_read(folder, column, "bfloat16"), answers)
        noise = sum(abs(own - truth) for (own, _), (truth, _) in zip(plain, truths, strict=True)) / len(plain)
    except RuntimeError:  # transformers cannot compute it in bfloat16
        noise = 0.0
    mean = sum(apart) / len(apart)
    why = f"mean difference {mean:.1e}, transformers' own in bfloat16 {noise:.1e}"
    is_close = mean <= _FACTOR[column] * max(noise, _LEAST_NOISE)
    return {"result": "close" if is_close else "wrong", "why": why}


def _log_probabilities(model: Any, answers: _Answers) -> list[tuple[float, float]]:  # Any: a model of transformers
    """Of each generated token: (its log-probability, how far its logit is behind the best one)."""
    import torch

    found = []
    for prompt, tokens in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].double()
        scores = logits.log_softmax(-1)
        for i, token in enumerate(tokens):
            found.append((float(scores[i, token]), float(logits[i].max() - logits[i, token])))
    return found


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:600]


def _in_a_process(model_types: Sequence[str], columns: Sequence[str]) -> _Found:
    """Checks the types in a process of their own. If it ends too early, the other types get another process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "INFLIGHT_LOG_LEVEL": "error"}
    command = [sys.executable, "-m", "benchmarks.quality.coverage", "--columns", *columns, "--one", *model_types]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_SECONDS * len(columns),
            env=environment,
        )
        output, why = done.stdout, f"the process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, why = (error.stdout or b"").decode(), f"it takes more than {TIMEOUT_SECONDS * len(columns)} s"
    found: _Found = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            found[result.pop("type")] = result
    if left := [model_type for model_type in model_types if model_type not in found]:
        print(f"{left[0]}: {why}", file=sys.stderr)
        found[left[0]] = {column: {"result": "wrong", "why": why} for column in columns}
        found |= _in_a_process(left[1:], columns) if left[1:] else {}
    return found


def table(found: _Found, columns: Sequence[str]) -> str:
    from transformers import __version__

    good = ("exact", "close")
    lines = [f"With transformers {__version__}, of {len(found)} types:", ""]
    for column in columns:
        counts = Counter(each[column]["result"] for each in found.values())
        right = f"{counts['close']} close" if column in _FACTOR else f"{counts['exact']} exact"
        lines.append(
            f"- `{column}`: {right}, {counts['refused']} refused, {counts['wrong']} wrong; for {counts['no model']} there is "
            "no small model to compare with"
        )
    runs = [name for name, each in sorted(found.items()) if all(each[column]["result"] in good for column in columns)]
    lines += ["", f"Exact or close in all columns: {', '.join(f'`{name}`' for name in runs)}.", ""]
    lines += [f"| type | {' | '.join(columns)} | why |", f"|---|{'---|' * len(columns)}---|"]
    for name, each in sorted(found.items()):
        if name not in runs:
            told = next(each[column]["why"] for column in columns if each[column]["result"] not in good)
            why = re.sub(r"rank \d+: ", "", told)  # several ranks refuse; which of them is first is chance
            # the message without its beginning, which is the same for all
            parts = why.partition(": ")[2].partition("KV cache: ")
            text = (parts[2] or parts[0]).partition(", in chunks and")[0].partition(". ")[0].replace("|", "/")
            lines.append(f"| `{name}` | {' | '.join(each[column]['result'] for column in columns)} | {text[:160]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", help="model types; default: all causal LMs of transformers")
    parser.add_argument("--columns", nargs="*", choices=COLUMNS, default=list(COLUMNS), help="default: all")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT}")
    parser.add_argument("--one", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="types at the same time")
    arguments = parser.parse_args()
    columns: list[str] = arguments.columns
    if arguments.one:
        for model_type in arguments.one:
            with tempfile.TemporaryDirectory() as folder:
                emit(type=model_type, **check_type(model_type, Path(folder) / "model", columns))
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = sorted(arguments.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: _Found = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        pieces = [types[start : start + PER_PROCESS] for start in range(0, len(types), PER_PROCESS)]
        for results in pool.map(partial(_in_a_process, columns=columns), pieces):
            found |= results
            for model_type, result in results.items():
                emit(type=model_type, **result)
    text = table(found, columns)
    print(text)
    if arguments.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
