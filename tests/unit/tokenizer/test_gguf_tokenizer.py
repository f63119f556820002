"""A tokenizer built from a GGUF file's metadata against the tokenizer.json it was converted from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from inflight.config.gguf_file import GgufFile, read_gguf
from inflight.errors import InvalidRequestError, TokenizerError
from inflight.tokenizer.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer
from tests.gguf_files import Number, write_gguf

# As the tokenizer.json of Llama 3 and of Qwen 2 have them
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "llama-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,
    "glm4": _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"|\p{N}" + _REST,
    # as the tokenizer.json of Qwen 3.5 has it: marks belong to words
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
CORPUS = [
    "The quick brown fox jumps over the lazy dog, 12345 times a day; it's what they'll do: we've seen it.",
    "def f(x):\n    return x ** 2 + 3.14159\n\n\nprint(f(10))\n",
    "Naïve café, déjà vu. Цены: 1 234 567 ₽. 東京は日本の首都です。 🙂🙂",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading",
    "it'S WE'LL",
    "a\r\n b\t\tc   ",
    "e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
    "<|begin|>hi<|end|><tool>x",
    "2024-11-21T18:31:59",
]


def train(pre: str) -> Backend:
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    split = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if pre == "gpt-2"
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if pre == "llama-bpe":
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", begin)]
        )
    return backend


def metadata_of(backend: Backend, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a tokenizer."""
    state = json.loads(backend.to_str())
    tokens = [backend.id_to_token(token_id) for token_id in range(backend.get_vocab_size())]
    added = {each["content"]: each["special"] for each in state["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Number("i", [{None: 1, True: 3, False: 4}[added.get(token)] for token in tokens]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": Number("I", tokens.index("<|begin|>")),
        "tokenizer.ggml.eos_token_id": Number("I", tokens.index("<|end|>")),
    }


def file_of(folder: Path, metadata: dict[str, Any]) -> GgufFile:
    return read_gguf(
        write_gguf(folder / "x.gguf", {key: value for key, value in metadata.items() if value is not None}, {})
    )


@pytest.mark.parametrize("pre", ["llama-bpe", "glm4", "qwen2", "qwen35", "gpt-2"])
def test_it_is_the_tokenizer_that_was_converted(tmp_path: Path, pre: str) -> None:
    backend = train(pre)
    ours = gguf_tokenizer(file_of(tmp_path, metadata_of(backend, pre)))
    truth = Tokenizer(Backend.from_str(backend.to_str()), {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    for text in TEXTS:
        ids = truth.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == truth.decode(ids)
    assert ours.special_tokens == truth.special_tokens
    assert ours.all_special_ids == truth.all_special_ids
    assert ours.vocabulary_bytes() == truth.vocabulary_bytes()


@pytest.mark.parametrize("has_prefix", [False, True])
def test_it_is_the_sentencepiece_model_that_was_converted(tmp_path: Path, has_prefix: bool) -> None:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=trained,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    truth = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(truth.get_piece_size())
    kinds = [
        3 if truth.is_control(i) else 2 if truth.is_unknown(i) else 6 if truth.is_byte(i) else 4 if i == 3 else 1
        for i in ids
    ]
    file = file_of(
        tmp_path,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [truth.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": Number("f", [truth.get_score(i) for i in ids]),
            "tokenizer.ggml.token_type": Number("i", kinds),
            "tokenizer.ggml.bos_token_id": Number("I", 1),
            "tokenizer.ggml.unknown_token_id": Number("I", 0),
            "tokenizer.ggml.add_space_prefix": has_prefix,
        },
    )
    ours = gguf_tokenizer(file)
    for text in [text for text in TEXTS if "<" not in text]:
        found = truth.encode(text)
        assert ours.encode(text) == [1, *found], text
        assert ours.decode(found) == truth.decode(found)
    assert ours.encode("a<tool>b", add_special_tokens=False)[1:-1].count(3) == 1
    metadata = {**file.metadata, "tokenizer.ggml.precompiled_charsmap": np.ones(3, dtype=np.int8)}
    with pytest.raises(TokenizerError, match="'llama' can, if the file has no normalisation of its own"):
        gguf_tokenizer(replace(file, metadata=metadata))


def test_the_default_splits_as_llama_cpp_does(tmp_path: Path) -> None:
    """Punctuation alone, then GPT-2's words, then digits in threes."""
    metadata = metadata_of(train("gpt-2"), "default")
    ours = gguf_tokenizer(file_of(tmp_path, metadata))
    pieces = ours._backend.pre_tokenizer.pre_tokenize_str("ab, cd12345 x")
    assert [text for text, _ in pieces] == ["ab", ",", "Ġcd", "123", "45", "Ġx"]


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_file_says_what_is_around_a_text(tmp_path: Path, first: bool, last: bool) -> None:
    metadata = metadata_of(train("llama-bpe"), "llama-bpe")
    metadata |= {"tokenizer.ggml.add_bos_token": first, "tokenizer.ggml.add_eos_token": last}
    ours = gguf_tokenizer(file_of(tmp_path, metadata))
    ids, plain = ours.encode("hi"), ours.encode("hi", add_special_tokens=False)
    assert ids == [ours.bos_token_id] * first + plain + [ours.eos_token_id] * last


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.scores does not have one entry"]),
        ({"tokenizer.ggml.model": None}, ["model=None"]),
        ({"tokenizer.ggml.pre": "tekken"}, ["pre='tekken'"]),
        ({"tokenizer.ggml.pre": None}, ["pre=None"]),
        ({"tokenizer.ggml.pre": Number("I", 3)}, ["pre=3"]),
        ({"tokenizer.ggml.tokens": None}, ["tokenizer.ggml.tokens is missing"]),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, ["tokenizer.ggml.tokens lists a token twice"]),
        ({"tokenizer.ggml.merges": ["ab"]}, ["the merge 'ab' is no pair"]),
        ({"tokenizer.ggml.merges": ["a nosuchtoken"]}, ["nosuchtoken"]),
        ({"tokenizer.ggml.token_type": None}, ["token_type"]),
        ({"tokenizer.ggml.token_type": Number("i", [1, 1])}, ["token_type"]),
        ({"tokenizer.ggml.bos_token_id": Number("I", 2**31)}, ["bos_token_id=2147483648"]),
        ({"tokenizer.ggml.eos_token_id": "x"}, ["eos_token_id='x'"]),
        ({"tokenizer.ggml.add_bos_token": "x"}, ["add_bos_token='x'"]),
    ],
)
def test_what_makes_no_tokenizer_says_what_to_do(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    file = file_of(tmp_path, {**metadata_of(train("qwen2"), "qwen2"), **changes})
    with pytest.raises(TokenizerError) as caught:
        gguf_tokenizer(file)
    for word in ("x.gguf", "tokenizer=", "skip_tokenizer_init", *words):
        assert word in str(caught.value)


def test_the_chat_template(tmp_path: Path) -> None:
    metadata = metadata_of(train("qwen2"), "qwen2")
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        gguf_chat_template(file_of(tmp_path, metadata)).render(messages)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "{{ eos_token }}{{ tools | length }}"
    template = gguf_chat_template(file_of(tmp_path, metadata))
    assert template.render(messages) == "<|begin|>hi"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    assert template.render(messages, tools=[tool]) == "<|end|>1"
    given = gguf_chat_template(file_of(tmp_path, metadata), "{{ eos_token }}{{ raise_exception('no') }}")
    with pytest.raises(InvalidRequestError, match="no"):
        given.render(messages)
