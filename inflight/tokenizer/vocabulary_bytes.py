"""`vocabulary_bytes`: what each token of a vocabulary adds to a text. Grammars are compiled for these bytes."""

from inflight.errors import TokenizerError
from inflight.tokenizer.tokenizer import Tokenizer


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token id adds to a text. A special token adds its own text. An id without a token adds b"".

    Raises:
        TokenizerError: the vocabulary is neither byte-level nor sentencepiece-like with byte fallback.
    """
    if not (tokenizer.is_byte_level or tokenizer.has_byte_fallback):
        raise TokenizerError(
            "this tokenizer's tokens have no bytes of their own: it is neither byte-level BPE nor sentencepiece-like with "
            "byte fallback"
        )
    num_ids = 1 + max(tokenizer.vocabulary().values())
    return [_bytes_in_text(tokenizer, token_id) for token_id in range(num_ids)]


def _bytes_in_text(tokenizer: Tokenizer, token_id: int) -> bytes:
    added = tokenizer.added_texts.get(token_id)
    if added is not None:
        return added.encode("utf-8")
    if tokenizer.is_byte_level:
        return tokenizer.token_bytes(token_id)
    byte = tokenizer.byte_fallback(token_id)
    if byte is not None:
        return bytes([byte])
    piece = tokenizer.id_to_piece(token_id) or ""
    return piece.replace("▁", " ").encode("utf-8")
