"""Engines of a GGUF file and of a GPTQ folder against the engine of the same weights in plain form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.config.gguf_parts import read_gguf
from inflight.errors import ConfigError, TokenizerError
from inflight.tokenizer.gguf_tokenizer import gguf_tokenizer
from tests.support.gguf_files import Number
from tests.support.gguf_models import write_pair
from tests.support.mxfp4_checkpoints import write_mxfp4
from tests.support.quantized_checkpoints import gptq
from tests.unit.model_loader import test_float8_source as float8
from tests.unit.model_loader import test_packed_checkpoint as packed

PROMPT = [5, 9, 14, 7, 3]


def open_llm(path: Path, **arguments: Any) -> LLM:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 64}
    return LLM(str(path), **{**defaults, "kv_cache_memory_bytes": 1 << 22, **arguments})


def tokens(path: Path, **arguments: Any) -> list[int]:
    with open_llm(path, **arguments) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids


def put_into_hub_cache(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's client leaves it: a blob, and a link to it. The hub is offline from now on."""
    import huggingface_hub.constants

    commit, repository = "0123456789abcdef0123456789abcdef01234567", cache / "models--org--quants"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (repository / name).mkdir(parents=True)
    (repository / "blobs" / "1234").write_bytes(file.read_bytes())
    (repository / "snapshots" / commit / "m-Q4_K_M.gguf").symlink_to("../../blobs/1234")
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))


def test_a_gguf_file_named_itself_or_by_its_folder(tmp_path: Path) -> None:
    plain, file = write_pair(tmp_path, "llama")
    truth = tokens(plain)
    assert tokens(file) == truth
    assert tokens(tmp_path) == truth
    with pytest.raises(ConfigError, match=r"load_format='safetensors'.*model\.gguf"):
        open_llm(file, load_format="safetensors")


def test_a_gptq_folder(tmp_path: Path) -> None:
    plain, quantized = packed.write_pair(tmp_path, packed.GPTQ_CONFIG, gptq, bits=4, group_size=32)
    assert tokens(quantized) == tokens(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "family"), [("blocks", "llama"), ("fbgemm", "qwen3_moe"), ("one scale", "dots1")])
def test_a_folder_in_fp8(tmp_path: Path, name: str, family: str, dtype: str) -> None:
    """Dense layers, experts, and a family that transformers' code computes."""
    plain, stored = float8.write_pair(tmp_path, name, family, getattr(torch, dtype))
    assert tokens(stored, dtype="auto") == tokens(plain, dtype="auto")


def test_the_option_may_name_fp8(tmp_path: Path) -> None:
    _, stored = float8.write_pair(tmp_path, "blocks")
    assert tokens(stored, quantization="fp8") == tokens(stored)
    with pytest.raises(ConfigError, match=r"quantization='fbgemm_fp8'"):
        open_llm(stored, quantization="fbgemm_fp8")


def test_experts_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C++ kernels, which round activations to 8 bits."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    plain, packed_in_four_bits = write_mxfp4(tmp_path)
    truth = tokens(plain)
    assert tokens(packed_in_four_bits) == truth
    assert tokens(packed_in_four_bits, quantization="mxfp4", tensor_parallel_size=2) == truth
    assert tokens(packed_in_four_bits, model_impl="transformers") == truth


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    vocabulary = [*letters, "<|end|>", *(f"<unused{i}>" for i in range(203 - len(letters) - 1))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": Number("i", [1] * len(letters) + [3] * (203 - len(letters))),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": Number("I", len(letters)),
        "tokenizer.ggml.eos_token_id": Number("I", len(letters)),
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    _, file = write_pair(tmp_path, "qwen3", {}, metadata)
    with open_llm(file, skip_tokenizer_init=False) as llm:
        (output,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert output.prompt_token_ids == [letters.index(letter) for letter in "abc"]
        messages = [{"role": "user", "content": "ab"}]
        (chat,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, add_generation_prompt=False)
        assert chat.prompt_token_ids == [letters.index("a"), letters.index("b"), len(letters)]
    put_into_hub_cache(file, tmp_path / "hub", monkeypatch)
    with open_llm(Path("org/quants:Q4_K_M"), skip_tokenizer_init=False) as llm:
        (again,) = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, add_generation_prompt=False)
        assert again.prompt_token_ids == chat.prompt_token_ids
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(gguf_tokenizer(read_gguf(file)).to_json())
    with open_llm(file, skip_tokenizer_init=False, tokenizer=str(tmp_path / "tokenizer")) as llm:
        (again,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        assert again.prompt_token_ids == output.prompt_token_ids


def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    _, file = write_pair(tmp_path, "qwen3", {})
    with pytest.raises(TokenizerError, match="tokenizer=") as caught:
        open_llm(file, skip_tokenizer_init=False)
    assert "model.gguf" in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        open_llm(file, skip_tokenizer_init=False)
