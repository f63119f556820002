"""`unigram_tokenizer`: the Unigram of sentencepiece (arXiv:1804.10959), of what a GGUF file has of it.

llama.cpp's converter calls it "t5", and writes it for XLM-RoBERTa, multilingual E5 and BGE-M3. The file's key
remove_extra_whitespaces is not read: newer converters put another setting there (clean_up_tokenization_spaces), and these
models have learned texts without such spaces.
"""

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

_NORMAL, _UNKNOWN, _UNUSED, _BYTE = 1, 2, 5, 6  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"


def unigram_tokenizer(
    tokens: Sequence[str], scores: np.ndarray, types: np.ndarray, *, charsmap: bytes, has_prefix: bool
) -> tokenizers.Tokenizer:
    """
    Args:
        scores, types: a number for each token: its log-probability, and its kind.
        charsmap: sentencepiece's compiled rules for the normalisation of a text; empty if there are none.
        has_prefix: a space is added before a text.

    Raises:
        ValueError: there is no unknown token, or the rules are damaged.
    """
    unknown = np.flatnonzero(types == _UNKNOWN)
    if len(unknown) == 0:
        raise ValueError("no token has the type of the unknown token (2)")
    # The library makes the score of unknown characters of the lowest one. Tokens that are not in use have one far below it.
    least = float(scores[types == _NORMAL].min(initial=0.0))
    pieces = [
        (_without_use(token) if kind == _UNUSED else token, max(float(score), least))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    ]
    has_bytes = bool((types == _BYTE).any())
    backend = tokenizers.Tokenizer(models.Unigram(pieces, int(unknown[0]), has_bytes))
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    rules = [normalizers.Precompiled(charsmap)] if charsmap else []
    backend.normalizer = normalizers.Sequence([*rules, *spaces])
    scheme = "always" if has_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    words = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), words]) if has_bytes else words
    return backend


def _without_use(token: str) -> str:
    """A token that is in no text."""
    return f"\0{token}"
