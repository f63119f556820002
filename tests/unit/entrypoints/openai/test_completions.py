"""Prompts of completions, and those that ask a model to fill in the middle."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from inflight.entrypoints.openai.completions import _FIM_TOKENS, _check_suffix, _prompt
from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.tokenizer.tokenizer import Tokenizer

FAMILIES = {texts[0]: texts for texts in _FIM_TOKENS}
CODE_LLAMA = _FIM_TOKENS[-1]


def byte_level(*special: str) -> Tokenizer:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", *special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(letters))])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """It writes a blank before each text."""
    letters = {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3} | {f"<0x{i:02X}>": 4 + i for i in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in CODE_LLAMA])
    return Tokenizer(backend)


def prompt(tokenizer: Tokenizer, **fields: Any) -> tuple[list[str | None], str | None]:
    """The pieces of the prompt, and the text that `echo` shows."""

    async def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens)

    model = SimpleNamespace(max_model_len=99)
    engine: Any = SimpleNamespace(tokenizer=tokenizer, encode=encode, model=model)
    made = asyncio.run(_prompt(engine, CompletionRequest(prompt="ab", **fields), "ab"))
    return [tokenizer.id_to_piece(token) for token in made.token_ids], made.text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_prefix_suffix_middle(family: str) -> None:
    before_prefix, before_suffix, before_answer = FAMILIES[family]
    tokenizer = byte_level(*FAMILIES[family])
    expected = ["<s>", before_prefix, "a", "b", before_suffix, "b", "a", before_answer]
    assert prompt(tokenizer, suffix="ba") == (expected, "ab")
    assert prompt(tokenizer, suffix="ba", add_special_tokens=False)[0] == expected[1:]


def test_a_suffix_begins_where_the_answer_ends() -> None:
    """No blank comes before it: Code Llama's own code encodes it in this way."""
    pieces, _ = prompt(sentencepiece(), suffix="b a")
    assert pieces == ["\u2581<PRE>", "\u2581", "a", "b", "\u2581<SUF>", "b", "\u2581", "a", "\u2581<MID>"]


def test_an_empty_suffix_is_none_and_a_model_without_the_tokens_takes_no_other() -> None:
    assert prompt(byte_level(), suffix="")[0] == ["<s>", "a", "b"]
    with pytest.raises(FieldError, match="this model has none: leave suffix out") as raised:
        prompt(byte_level(*FAMILIES["<fim_prefix>"][:2]), suffix="a")
    assert raised.value.param == "suffix"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": ["a", "b"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
    ],
)
def test_what_a_suffix_excludes(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as raised:
        _check_suffix(CompletionRequest(suffix="x", **fields))
    assert raised.value.param == param
    _check_suffix(CompletionRequest(suffix="", **fields))
    _check_suffix(CompletionRequest(suffix="x", echo=True, logprobs=None, prompt=["a", "b"]))
