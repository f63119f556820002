"""Random-weight models of real shapes, tokenizer included, made once and kept.

    python -m benchmarks.models qwen3-0.6b [--models FOLDER]

Speed does not depend on the weights' values as long as they are no zeros or denormals: they are drawn from N(0, 0.02), as
transformers initialises a model. The shapes of `gguf_shapes.py` are GGUF files; all others are folders.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shared.gguf_shapes import GGUF_SHAPES, gguf_file, gguf_shape

DEFAULT_MODELS_FOLDER = Path("build/models")  # relative to the working directory; ignored by git

_TINY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A model_type of transformers and the fields of its config."""

    model_type: str
    fields: dict[str, Any]  # Any: values of config.json


SHAPES = {
    "qwen3-0.6b": Shape(
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    "llama-1b": Shape(
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 16384,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-270m": Shape(
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-0.8b": Shape(
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "moe-a": Shape(
        "qwen3_moe",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "moe_intermediate_size": 384,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 4096,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3.5-tiny": Shape(
        "qwen3_5_text",
        {
            **_TINY,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-tiny": Shape("llama", {**_TINY, "tie_word_embeddings": False}),
    "qwen3-tiny": Shape("qwen3", {**_TINY, "rope_theta": 1e6, "tie_word_embeddings": True}),
}


def model_folder(model: str, models_folder: Path) -> Path:
    """The folder or GGUF file of a shape's model, made if it is not there; any other `model` is a folder or file already."""
    if (quantized := gguf_shape(model)) is not None:
        return gguf_file(model, quantized, models_folder)
    if model not in SHAPES:
        folder = Path(model)
        if not is_gguf(folder) and not (folder / "config.json").is_file():
            known = ", ".join((*SHAPES, *GGUF_SHAPES))
            raise SystemExit(f"{model!r} is neither a model folder, nor a .gguf file, nor one of {known}")
        return folder
    folder = models_folder / model
    if not (folder / "config.json").is_file():
        models_folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{model}-", dir=models_folder))
        try:
            write_model(SHAPES[model], unfinished)
            unfinished.chmod(0o755)
            unfinished.rename(folder)  # whole or not at all
        except BaseException:
            shutil.rmtree(unfinished)
            raise
    return folder


def write_model(shape: Shape, folder: Path) -> None:
    """config.json, model.safetensors in bfloat16, and a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(shape.model_type, dtype="bfloat16", **shape.fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 4,000 tokens, trained on the standard library's own source."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))[:150]
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(sources, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)


def is_gguf(model: Path) -> bool:
    return model.suffix == ".gguf" and model.is_file()


def weight_bytes(folder: Path) -> int:
    """Size of the checkpoint's tensors; tied weights are stored, and counted, once."""
    if is_gguf(folder):
        return folder.stat().st_size
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_into_page_cache(model: Path) -> None:
    """A folder's files, or one file: so that what is timed next is the engine and not the disk."""
    buffer = bytearray(2**24)
    for path in model.iterdir() if model.is_dir() else [model]:
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def add_model_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """--model and --models, as every benchmark takes them; `model_folder` reads them."""
    parser.add_argument(
        "--model",
        default=default,
        help=f"a shape ({', '.join(SHAPES)}; as GGUF {', '.join(GGUF_SHAPES)}, or so many layers of it, NAME:12), a model "
        "folder, or a .gguf file [%(default)s]",
    )
    parser.add_argument(
        "--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where models of a shape are kept [%(default)s]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model with random weights, unless it is there.")
    parser.add_argument("shape", choices=[*SHAPES, *GGUF_SHAPES], nargs="+")
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="folder [%(default)s]")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in args.shape:
        folder = model_folder(name, args.models)
        print(f"{name}: {weight_bytes(folder) / 1e6:.0f} MB of weights in {folder}")


if __name__ == "__main__":
    main()
