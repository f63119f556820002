"""`vocabulary_bytes`: what each token of a vocabulary adds to a text. Grammars are compiled for these bytes."""

from inflight.errors import TokenizerError
from inflight.tokenizer.tokenizer import Tokenizer

MAX_IDS = 2**22  # the largest vocabularies have 2**18 tokens; each id needs memory, whether it has a token or not


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token id adds to a text. A special token adds its own text. An id without a token adds b"".

    Raises:
        TokenizerError: the vocabulary is neither byte-level nor sentencepiece-like with byte fallback, or an id is too large.
    """
    if not (tokenizer.is_byte_level or tokenizer.has_byte_fallback):
        raise TokenizerError(
            "this tokenizer's tokens have no bytes of their own: it is neither byte-level BPE nor sentencepiece-like with "
            "byte fallback"
        )
    vocabulary = tokenizer.vocabulary()
    largest = max(vocabulary, key=vocabulary.__getitem__)
    num_ids = 1 + vocabulary[largest]
    if num_ids > MAX_IDS:
        raise TokenizerError(
            f"the vocabulary of this tokenizer has {len(vocabulary)} tokens, and gives {largest!r} the id {num_ids - 1}; ids "
            f"are less than {MAX_IDS}: tokenizer.json is damaged, download it again"
        )
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
