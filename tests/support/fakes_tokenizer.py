"""Tokenizers for tests, made without a network: one of bare bytes, and trained ones of the three common kinds."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from inflight.tokenizer.tokenizer import Tokenizer

BOS, EOS, USER = "<s>", "</s>", "<|user|>"
BOS_ID, EOS_ID, USER_ID = 256, 257, 258
BYTE_VOCAB_SIZE = 259

CORPUS = [
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
    "the quick brown fox jumps over the lazy dog; The dog doesn't mind!",
    "Größe, naïve café — 東京は日本の首都です。 🙂🙃 emoji",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))  # 42",
] * 4


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Token i < 256 is the byte i; then BOS, EOS and USER, which are special."""
    characters = _byte_characters()
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={character: i for i, character in enumerate(characters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, EOS, USER])
    return Tokenizer(backend, {"bos_token": BOS, "eos_token": EOS}, [USER])


def _byte_characters() -> list[str]:
    """The printable character of each byte, found by encoding it: independent of what is tested."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[int, str] = {}
    for start in (0x20, 0xA0, 0x400, 0x800, 0x1000, 0x10000, 0x40000, 0x100000):
        for code in [*range(start, start + 0x500), *range(start, 0x110000 if start >= 0x10000 else 0x800, 0x7FF)]:
            if 0xD800 <= code < 0xE000:
                continue
            pieces = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(chr(code)))
            found |= dict(zip(chr(code).encode(), pieces, strict=True))
    for code in range(0x20):
        found[code] = backend.pre_tokenizer.pre_tokenize_str(chr(code))[0][0]
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(found.values()))
    missing = [byte for byte in range(256) if byte not in found]  # bytes that stand in no UTF-8 text
    assert len(rest) == len(missing)
    return [found.get(byte) or rest[missing.index(byte)] for byte in range(256)]


def train_byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: byte-level BPE; a BOS in front."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+|[^\s\p{L}\p{N}]+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, USER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    _put_bos_in_front(backend)
    return backend


def train_byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma: sentencepiece-like BPE, "▁" for spaces, bytes for characters it does not know."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", BOS, EOS, USER, *[f"<0x{byte:02X}>" for byte in range(256)]],
        limit_alphabet=60,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _put_bos_in_front(backend)
    return backend


def train_word_piece() -> tokenizers.Tokenizer:
    """As BERT."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", BOS, EOS, USER], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def train_metaspace() -> tokenizers.Tokenizer:
    """Unigram-like spaces with the Metaspace decoder, without bytes."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", BOS, EOS, USER], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


TRAINERS = {
    "byte_level": train_byte_level,
    "byte_fallback": train_byte_fallback,
    "word_piece": train_word_piece,
    "metaspace": train_metaspace,
}


@functools.cache
def trained(kind: str) -> tokenizers.Tokenizer:
    return TRAINERS[kind]()


def save_folder(folder: Path, kind: str, **config: object) -> Path:
    """A tokenizer folder in the Hugging Face layout; `config` adds to its tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = trained(kind)
    backend.save(str(folder / "tokenizer.json"))
    unk = {"word_piece": "[UNK]", "byte_level": None}.get(kind, "<unk>")
    named = {"bos_token": BOS, "eos_token": EOS, "unk_token": unk, "additional_special_tokens": [USER]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _put_bos_in_front(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
