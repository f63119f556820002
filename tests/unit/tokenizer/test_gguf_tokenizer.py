"""A tokenizer built from a GGUF file's metadata against the tokenizer.json it was converted from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import GemmaTokenizer

from inflight.config.gguf_file import GgufFile
from inflight.config.gguf_parts import read_gguf
from inflight.errors import InvalidRequestError, TokenizerError
from inflight.tokenizer.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes
from tests.support.gguf_files import Number, write_gguf

# The patterns of the models' own tokenizer.json. None: the pre-tokenizer ByteLevel with its own pattern. "digits": the
# pre-tokenizer Digits before it, with each digit alone.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS: dict[str, str | None] = {
    "llama-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,
    "smaug-bpe": _WORDS + r"|\p{N}{1,3}" + _REST,  # SmolLM3
    "dbrx": _WORDS + r"|\p{N}{1,3}" + _REST,  # OLMo 2, Phi-4
    "glm4": _WORDS + r"|\p{N}{1,3}" + _REST,
    "qwen2": _WORDS + r"|\p{N}" + _REST,
    "deepseek-r1-qwen": _WORDS + r"|\p{N}" + _REST,
    "hunyuan": _WORDS + r"|\p{N}" + _REST,  # the pattern of its own Python file
    # as the tokenizer.json of Qwen 3.5 has it: marks belong to words
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Mistral Nemo and later
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Phi-4-mini
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "seed-coder": _WORDS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": None,
    "refact": "digits",  # Granite 3
    "smollm": "digits",  # SmolLM 1 and 2
    "roberta-bpe": None,
    "modern-bert": None,
}
WHOLE_WORDS = ("llama-bpe", "smaug-bpe", "tekken")
BEGIN = ("llama-bpe", "tekken")
ENCODERS = ("roberta-bpe", "modern-bert")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, 12345 times a day; it's what they'll do: we've seen it.",
    "def f(x):\n    return x ** 2 + 3.14159\n\n\nprint(f(10))\n",
    "Naïve café, déjà vu. Цены: 1 234 567 ₽. 東京は日本の首都です。 🙂🙂",
]
NASTY = [
    " ",
    "  leading",
    "it'S WE'LL",
    "a\r\n b\t\tc   ",
    "e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
    "<|begin|>hi<|end|><tool>x",
    "2024-11-21T18:31:59 // ok\n",
    "I'VE i've I\u2019ve don't'll 's 'S y'all'd've",
    "HTTPServer getHTTPResponseCode iPhone XMLHttpRequest ÄÖÜäöü ǅabc",
    "1 12 123 1234 12345 1234567890 ١٢٣٤٥ ½¾ Ⅷ x²y³ 3.14.15",
    "東京タワー 한국어 ไทยภาษาไทย हिन्दी ქართული",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ☺️",
    "o\u0308u\u0308 a\u0323\u0302 Z\u0351\u036b\u0343\u036a \u0301alone",
    "\ttab\t\tx \t y\n\n\n\nz\r\n\r\n  \r\r end   \n   ",
    "};\n// x\n};\n// y\n};\n// z",
    "a/b//c https://x.y/z?q=1&r=2#s  ///\n//  comment\n",
    "\u00a0nbsp\u3000wide\u2003em\u200bzero\ufeffbom\u2028line\u0085next",
    "x" * 3000 + " " * 300 + "-" * 300 + "9" * 300 + "\n" * 300 + "東" * 300,
]
WORD = "wordwithoutmerges"  # a token to which no merges lead
TEXTS = [*CORPUS, "", *NASTY, f"{WORD} W{WORD[1:]} {WORD}s {WORD}"]


@cache
def train(pre: str) -> Backend:
    """The vocabulary has tokens across the borders of words. So another split gives other ids."""
    backend = Backend(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    if "qwen" in pre or pre == "hunyuan":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    backend.train_from_iterator([*CORPUS, *NASTY] * 3, trainer)
    backend = with_word(backend, WORD)
    pattern = PATTERNS[pre]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pattern == "digits":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    around = [(token, backend.token_to_id(token)) for token in ("<|end|>", "<|begin|>")]
    if pre == "roberta-bpe":
        backend.post_processor = processors.RobertaProcessing(*around, add_prefix_space=False)
    elif pre == "modern-bert":
        backend.normalizer = normalizers.NFC()
        backend.post_processor = processors.BertProcessing(*around)
    if pre in BEGIN:
        begin = backend.token_to_id("<|begin|>")
        backend.post_processor = processors.TemplateProcessing(
            single=["<|begin|>", "$A"], special_tokens=[("<|begin|>", begin)]
        )
    return backend


def with_word(backend: Backend, word: str) -> Backend:
    """The tokenizer with one more token, to which no merges lead."""
    state = json.loads(backend.to_str())
    state["model"]["vocab"][word] = len(state["model"]["vocab"])
    return Backend.from_str(json.dumps(state))


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


@pytest.mark.parametrize("pre", PATTERNS)
def test_it_is_the_tokenizer_that_was_converted(tmp_path: Path, pre: str) -> None:
    backend = train(pre)
    ours = gguf_tokenizer(file_of(tmp_path, metadata_of(backend, pre)))
    truth = Tokenizer(Backend.from_str(backend.to_str()), {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    pairs = Backend.from_str(ours.to_json())
    for text in TEXTS:
        ids = truth.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == truth.decode(ids)
        if pre in ENCODERS:
            assert pairs.encode(text, "a pair").ids == backend.encode(text, "a pair").ids
    assert ours.special_tokens == truth.special_tokens
    assert ours.all_special_ids == truth.all_special_ids
    assert vocabulary_bytes(ours) == vocabulary_bytes(truth)


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
    with pytest.raises(TokenizerError, match="'llama' can, "):
        gguf_tokenizer(replace(file, metadata=metadata))


def gemma_tokenizer() -> GemmaTokenizer:
    """Trained on the texts of this file, with pieces that go over the borders of words and lines."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=first, limit_alphabet=150, show_progress=False)
    backend.train_from_iterator([*CORPUS, *NASTY] * 3, trainer)
    state = json.loads(backend.to_str())["model"]
    tokenizer = GemmaTokenizer(vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def test_it_is_the_tokenizer_of_gemma_4_that_was_converted(tmp_path: Path) -> None:
    truth = gemma_tokenizer()
    state = json.loads(truth.backend_tokenizer.to_str())
    tokens = truth.convert_ids_to_tokens(range(len(truth)))
    kinds = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2, "<mask>": 3, "<tool>": 4}
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.scores": Number("f", [-1000.0] * len(tokens)),
        "tokenizer.ggml.token_type": Number(
            "i", [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
        ),
        "tokenizer.ggml.bos_token_id": Number("I", 2),
        "tokenizer.ggml.eos_token_id": Number("I", 1),
        "tokenizer.ggml.unknown_token_id": Number("I", 3),
        "tokenizer.ggml.add_space_prefix": False,
    }
    ours = gguf_tokenizer(file_of(tmp_path, metadata))
    for text in [*TEXTS, "a<tool> b<bos>", "\n\n\n\n x\n\n"]:
        ids = truth(text)["input_ids"]
        assert ours.encode(text) == [2, *ids], text  # BOS is there, although this file does not say it
        assert ours.decode(ids) == truth.decode(ids, skip_special_tokens=True)
    assert max(truth(CORPUS[0])["input_ids"]) > 256, "the text has only bytes"
    with pytest.raises(TokenizerError, match="merges is missing"):
        gguf_tokenizer(file_of(tmp_path, metadata | {"tokenizer.ggml.merges": None}))


def test_the_default_splits_as_llama_cpp_does(tmp_path: Path) -> None:
    """Punctuation alone, then GPT-2's words, then digits in threes."""
    metadata = metadata_of(train("gpt-2"), "default")
    ours = gguf_tokenizer(file_of(tmp_path, metadata))
    pieces = ours._backend.pre_tokenizer.pre_tokenize_str("ab, cd12345 x")
    assert [text for text, _ in pieces] == ["ab", ",", "Ġcd", "123", "45", "Ġx"]


@pytest.mark.parametrize(
    ("architecture", "bos", "expected"),
    [("qwen2", "<|begin|>", "qwen2"), ("llama", "<|begin_of_text|>", "llama-bpe"), ("llama", "<|begin|>", "default")],
)
def test_a_file_from_before_the_names_of_splits(
    tmp_path: Path, architecture: str, bos: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of Qwen and of Llama 3 are recognised. Other files are split as llama.cpp splits them, and a warning says so."""
    named = metadata_of(train("glm4"), expected)
    named["tokenizer.ggml.tokens"] = [
        bos if token == "<|begin|>" else token for token in named["tokenizer.ggml.tokens"]
    ]
    truth = gguf_tokenizer(file_of(tmp_path, named))
    ours = gguf_tokenizer(file_of(tmp_path, named | {"tokenizer.ggml.pre": None, "general.architecture": architecture}))
    for text in TEXTS:
        assert ours.encode(text) == truth.encode(text)
    assert ("has no tokenizer.ggml.pre" in caplog.text) == (expected == "default")


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
        ({"tokenizer.ggml.pre": "viking"}, ["pre='viking' is not known", "llama-bpe", "qwen2", "tekken", "gpt-4o"]),
        ({"tokenizer.ggml.pre": ""}, ["pre='' is not known"]),
        ({"tokenizer.ggml.pre": Number("I", 3)}, ["pre=3 is not known"]),
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
