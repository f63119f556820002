"""`tokenize_bad_words`: the tokens of words that an answer must not contain."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.errors import InvalidRequestError
from inflight.tokenizer.tokenizer import Tokenizer


def tokenize_bad_words(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word as they are at the beginning of a text and after a space. If the tokens after a space end
    with those at the beginning, they are left out.

    Raises:
        InvalidRequestError: a word has no tokens in the vocabulary.
    """

    def tokenize(word: str, variant: str) -> tuple[int, ...]:
        try:
            token_ids = tokenizer.encode(variant, add_special_tokens=False)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"bad_words: {error}", "bad_words") from error
        if not token_ids or tokenizer.unk_token_id in token_ids or max(token_ids) >= vocab_size:
            raise InvalidRequestError(
                f"the bad word {word!r} has no tokens in the vocabulary; leave it out", "bad_words"
            )
        return tuple(token_ids)

    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        at_start = tokenize(word, bare or word)
        found[at_start] = None
        if bare:
            after_space = tokenize(word, " " + bare)
            if after_space[-len(at_start) :] != at_start:  # otherwise `at_start` already forbids `after_space`
                found[after_space] = None
    return tuple(found)
