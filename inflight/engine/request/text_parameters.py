"""Checks the parameters of a request that need the tokenizer: stop strings and grammars. For bad words see bad_words.py."""

from collections.abc import Collection

from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.structured_output.loader import load_backend
from inflight.structured_output.spec import GrammarSpec, SchemaPlace
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
                    f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init=True); leave it out", name
                )
    for name in ("structured_outputs", "thinking_token_budget"):
        if getattr(params, name) in (None, -1):
            continue
        if not eos_token_ids:
            raise InvalidRequestError(f"{name} needs a model with an EOS token to end the text; leave it out", name)
        if params.allowed_token_ids is not None:
            raise InvalidRequestError(
                f"allowed_token_ids and {name} both restrict the tokens, and together may allow none; give only one",
                "allowed_token_ids",
            )


def unenforced_places(params: SamplingParams) -> tuple[SchemaPlace, ...]:
    """Returns the places in the JSON schemas of `params` that the grammar backend will not enforce."""
    wanted = params.structured_outputs
    return () if wanted is None else tuple(load_backend().relax(GrammarSpec.from_params(wanted))[1])
