"""`word_piece_tokenizer`: the tokenizer of BERT, of what a GGUF file has of it.

llama.cpp's converter writes the beginning of a word as U+2581 and its letters, and a later piece of a word without "##". The
file does not say whether texts become lower case, so the vocabulary tells it: a vocabulary for lower case has no capitals.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

_BEGINNING = "\u2581"
_LATER = "##"


def word_pieces(tokens: Sequence[str], is_control: Sequence[bool]) -> list[str]:
    """The tokens as BERT's vocabulary has them. `is_control`: of each token, whether it is no part of a text."""

    def piece(token: str, control: bool) -> str:
        if token.startswith(_BEGINNING):
            return token.removeprefix(_BEGINNING)
        is_special = control or (token.startswith("[") and token.endswith("]"))
        return token if is_special or not token else _LATER + token

    return [piece(token, control) for token, control in zip(tokens, is_control, strict=True)]


def word_piece_tokenizer(vocabulary: Mapping[str, int], unknown: str) -> tokenizers.Tokenizer:
    """`vocabulary`: as `word_pieces` returns the tokens."""
    backend = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    is_special = {token for token in vocabulary if token.startswith("[") and token.endswith("]")}
    has_capitals = any(token != token.lower() for token in vocabulary.keys() - is_special)
    backend.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix=_LATER)
    return backend


def surround_pairs(backend: tokenizers.Tokenizer, first: str, last: str, *, as_roberta: bool = False) -> None:
    """Put `first` before a text and `last` behind it. Of a pair, the second text and the token behind it have type 1.
    `as_roberta`: two of `last` are between the texts of a pair, and all types are 0."""
    second = 0 if as_roberta else 1
    between = [last, last] if as_roberta else [last]
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *between, f"$B:{second}", f"{last}:{second}"],
        special_tokens=[(token, backend.token_to_id(token)) for token in (first, last)],
    )
