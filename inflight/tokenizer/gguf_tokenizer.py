"""Makes a tokenizer and a chat template from a GGUF file.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md defines the keys. The model "gpt2" is byte-level BPE,
with one of the splits of gguf_splits.py. The model "llama" is the BPE of sentencepiece, without normalisation: spaces become
U+2581, and characters that no token has become bytes. The model "gemma4" is the same with merges instead of scores. The model
"bert" is WordPiece (gguf_word_pieces.py), the model "t5" Unigram (gguf_unigram.py).
"""

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from inflight.config.gguf_file import GgufFile, GgufStrings
from inflight.errors import TokenizerError
from inflight.tokenizer.chat_template import ChatTemplate, choose_source, naming_model
from inflight.tokenizer.gguf_splits import PRE, SPLITS, Split, find_split
from inflight.tokenizer.gguf_unigram import unigram_tokenizer
from inflight.tokenizer.gguf_word_pieces import surround_pairs, word_piece_tokenizer, word_pieces
from inflight.tokenizer.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_CHAT_TEMPLATE = "tokenizer.chat_template"
_NUM_COMPARED = 4096  # tokens
_Pairs = list[tuple[str, str]]  # tokens that are merged, the first pair first


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """
    Raises:
        TokenizerError: the file has no tokenizer, or its tokenizer cannot be made from the data in it.
    """
    model = file.metadata.get(f"{_PREFIX}model")
    is_sentencepiece = model == "llama" and f"{_PREFIX}precompiled_charsmap" not in file.metadata
    if not is_sentencepiece and model not in ("gpt2", "bert", "gemma4", "t5"):
        raise _unusable(
            file,
            f"{_PREFIX}model={model!r} cannot be made into a tokenizer; 'gpt2', 'gemma4', 'bert' and 't5' can, and 'llama' "
            "can, if the file has no normalisation of its own",
        )
    tokens = _strings(file, "tokens")
    if model == "bert":
        tokens = word_pieces(tokens, (_numbers(file, "token_type", tokens) == _CONTROL).tolist())
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise _unusable(file, f"{_PREFIX}tokens lists a token twice")
    special = _special_tokens(file, tokens)
    encoder = ""  # of encoders, which tokens are around a text
    has_bos = True
    if model == "t5":
        backend = _unigram(file, tokens)
        encoder = "roberta"
    elif model == "bert":
        encoder = "bert"
        unknown = _token(file, "unknown_token_id", tokens)
        backend = word_piece_tokenizer(vocabulary, "[UNK]" if unknown is None else unknown)
    elif is_sentencepiece:
        pairs = _pairs_by_scores(file, tokens, vocabulary)
        backend = _sentencepiece(file, tokens, vocabulary, pairs, has_prefix=_flag(file, "add_space_prefix", True))
    elif model == "gemma4":
        backend = _sentencepiece(file, tokens, vocabulary, _merges(file), has_prefix=False)
    else:
        split = find_split(file, special.get("bos_token"))
        if split is None:
            known = ", ".join(SPLITS)
            raise _unusable(file, f"{PRE}={file.metadata[PRE]!r} is not known; known are {known}")
        backend = _byte_level(file, vocabulary, split)
        has_bos = split.has_bos
        encoder = split.encoder
    _add_tokens(file, backend, tokens)
    if encoder:
        first = special.get("cls_token", special.get("bos_token"))  # newer files have it as BOS
        last = special.get("sep_token", special.get("eos_token"))
        if first is None or last is None:
            raise _unusable(file, f"{_PREFIX}bos_token_id or {_PREFIX}seperator_token_id is missing")
        surround_pairs(backend, first, last, as_roberta=encoder == "roberta")
    else:
        _surround(file, backend, special, has_bos=has_bos)
    return Tokenizer(backend, special)


def _unigram(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    rules = file.metadata.get(f"{_PREFIX}precompiled_charsmap")
    try:
        return unigram_tokenizer(
            tokens,
            _numbers(file, "scores", tokens),
            _numbers(file, "token_type", tokens),
            charsmap=rules.tobytes() if isinstance(rules, np.ndarray) else b"",
            has_prefix=_flag(file, "add_space_prefix", True),
        )
    except Exception as error:  # the library raises nothing more specific
        raise error if isinstance(error, TokenizerError) else _unusable(file, str(error)) from error


def _merges(file: GgufFile) -> _Pairs:
    pairs = []
    for merge in _strings(file, "merges"):
        middle = merge.find(" ", 1)
        if middle < 0:
            raise _unusable(file, f"the merge {merge!r} is no pair")
        pairs.append((merge[:middle], merge[middle + 1 :]))
    return pairs


def _pair_encoding(file: GgufFile, vocabulary: dict[str, int], pairs: _Pairs, **options: Any) -> tokenizers.Tokenizer:
    """`options`: arguments of the library's class BPE."""
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary, pairs, **options))
    except Exception as error:  # the library raises nothing more specific
        raise _unusable(file, str(error)) from error


def _byte_level(file: GgufFile, vocabulary: dict[str, int], split: Split) -> tokenizers.Tokenizer:
    backend = _pair_encoding(file, vocabulary, _merges(file), ignore_merges=split.has_whole_words)
    if split.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs_by_scores(file: GgufFile, tokens: list[str], vocabulary: dict[str, int]) -> _Pairs:
    """Two neighbours are merged if they are a token together, first those whose token has the highest score."""
    scores, types = (_numbers(file, name, tokens) for name in ("scores", "token_type"))
    mergeable = [token_id for token_id in np.argsort(-scores, kind="stable") if types[token_id] == _NORMAL]
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, mergeable)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _sentencepiece(
    file: GgufFile, tokens: list[str], vocabulary: dict[str, int], pairs: _Pairs, *, has_prefix: bool
) -> tokenizers.Tokenizer:
    """`has_prefix`: a space is added before a text."""
    unknown = _token(file, "unknown_token_id", tokens, default=0)
    backend = _pair_encoding(file, vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = [normalizers.Replace(" ", "\u2581")]
    words = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *spaces])
        backend.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = normalizers.Sequence(spaces)
        backend.decoder = decoders.Sequence(words)
    return backend


def gguf_chat_template(file: GgufFile, given: str | None = None, image_token: str = "") -> ChatTemplate:
    """Uses the template `given` (the name of one of the file's templates, Jinja text, or another file). If it is None, uses the
    templates in the GGUF file."""
    sources = {
        key.removeprefix(_CHAT_TEMPLATE).removeprefix(".") or "default": value
        for key, value in file.metadata.items()
        if isinstance(value, str) and (key == _CHAT_TEMPLATE or key.startswith(f"{_CHAT_TEMPLATE}."))
    }
    special_tokens = _special_tokens(file, _strings(file, "tokens"))
    chosen = choose_source(given, lambda: sources)
    with naming_model(file.path, given):
        return ChatTemplate(chosen, special_tokens, image_token)


def check_tokens(file: GgufFile, beside: Tokenizer, folder: Path) -> None:
    """Compare the tokens of a GGUF file with the tokenizer.json beside it, which is used instead.

    Raises:
        TokenizerError: most ids have other tokens, so the tokenizer is that of another model.
    """
    array = file.metadata.get(f"{_PREFIX}tokens")
    if file.metadata.get(f"{_PREFIX}model") not in ("gpt2", "llama", "gemma4") or not isinstance(array, GgufStrings):
        return  # other kinds spell their tokens in another way than tokenizer.json
    tokens = file.read_strings(array)
    ids = range(0, len(tokens), 1 + len(tokens) // _NUM_COMPARED)
    other = [token_id for token_id in ids if beside.id_to_piece(token_id) != tokens[token_id]]
    if len(other) > len(ids) / 2:
        i = other[0]
        raise TokenizerError(
            f"{folder / 'tokenizer.json'} is not of the model in {file.path}: token {i} is {beside.id_to_piece(i)!r} there and "
            f"{tokens[i]!r} here, and so on; remove it, or name the right one with tokenizer=..."
        )


def _unusable(file: GgufFile, why: str) -> TokenizerError:
    return TokenizerError(
        f"{file.path}: {why}; put the model's tokenizer.json beside the file, name its folder or hub id with tokenizer=..., or "
        "serve token ids only with skip_tokenizer_init=True"
    )


def _strings(file: GgufFile, name: str) -> list[str]:
    array = file.metadata.get(f"{_PREFIX}{name}")
    if not isinstance(array, GgufStrings):
        raise _unusable(file, f"{_PREFIX}{name} is missing")
    return file.read_strings(array)


def _add_tokens(file: GgufFile, backend: tokenizers.Tokenizer, tokens: list[str]) -> None:
    """Add the control tokens and the user-defined tokens. `encode` finds them in a text before it splits the text."""
    types = _numbers(file, "token_type", tokens)
    for kind, is_special in ((_UNKNOWN, True), (_CONTROL, True), (_USER_DEFINED, False)):
        found = [tokens[token_id] for token_id in np.flatnonzero(types == kind)]
        added = [AddedToken(text, special=is_special, normalized=False) for text in found if text]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)


def _numbers(file: GgufFile, name: str, tokens: list[str]) -> np.ndarray:
    """An array with a number for each token."""
    numbers = file.metadata.get(f"{_PREFIX}{name}")
    if not isinstance(numbers, np.ndarray) or len(numbers) != len(tokens):
        raise _unusable(file, f"{_PREFIX}{name} does not have one entry for each of {len(tokens)} tokens")
    return numbers


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {name: _token(file, key, tokens) for name, key in _SPECIAL_TOKENS.items()}
    return {name: token for name, token in found.items() if token is not None}


def _token(file: GgufFile, key: str, tokens: list[str], default: int | None = None) -> str | None:
    """The token whose id the file has under this key. `default`: the id if it has none."""
    token_id = file.metadata.get(f"{_PREFIX}{key}", default)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise _unusable(file, f"{_PREFIX}{key}={token_id!r} is not one of {len(tokens)} token ids")
    return tokens[token_id]


def _surround(file: GgufFile, backend: tokenizers.Tokenizer, special: dict[str, str], *, has_bos: bool) -> None:
    """Set the tokens that `encode` puts around a text. `has_bos`: whether BOS comes first if the file has no add_bos_token."""
    first = [special["bos_token"]] if _flag(file, "add_bos_token", has_bos) and "bos_token" in special else []
    last = [special["eos_token"]] if _flag(file, "add_eos_token", False) and "eos_token" in special else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([*first, *last])],
        )


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"{_PREFIX}{name}", default)
    if not isinstance(value, bool):
        raise _unusable(file, f"{_PREFIX}{name}={value!r} is not true or false")
    return value
