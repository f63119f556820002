"""Checks the parameters of a request that need the tokenizer: stop strings, bad words and grammars."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.structured_output.loader import load_backend
from inflight.structured_output.spec import GrammarSpec
from inflight.tokenizer.tokenizer import Tokenizer


def check_text_parameters(params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]) -> None:
    """Check everything that can be checked before a grammar is compiled.

    Raises:
        InvalidRequestError: a parameter needs a tokenizer or an EOS token that the model does not have, or two parameters
            exclude each other.
    """
    if tokenizer is None:
        for name in ("structured_outputs", "stop", "bad_words"):
            if getattr(params, name):
                raise InvalidRequestError(
                    f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init=True); leave it out"
                )
    for name in ("structured_outputs", "thinking_token_budget"):
        if getattr(params, name) in (None, -1):
            continue
        if not eos_token_ids:
            raise InvalidRequestError(f"{name} needs a model with an EOS token to end the text; leave it out")
        if params.allowed_token_ids is not None:
            raise InvalidRequestError(
                f"allowed_token_ids and {name} both restrict the tokens, and together may allow none; give only one"
            )


def unenforced_places(params: SamplingParams) -> tuple[str, ...]:
    """Returns the places in the JSON schemas of `params` that the grammar backend will not enforce."""
    wanted = params.structured_outputs
    return () if wanted is None else tuple(load_backend().relax(GrammarSpec.from_params(wanted))[1])


def tokenize_bad_words(words: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word as they are at the beginning of a text and after a space. If the tokens after a space end
    with those at the beginning, they are left out.

    Raises:
        InvalidRequestError: a word has no tokens in the vocabulary.
    """

    def tokenize(word: str, variant: str) -> tuple[int, ...]:
        token_ids = tokenizer.encode(variant, add_special_tokens=False)
        if not token_ids or tokenizer.unk_token_id in token_ids or max(token_ids) >= vocab_size:
            raise InvalidRequestError(f"the bad word {word!r} has no tokens in the vocabulary; leave it out")
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
