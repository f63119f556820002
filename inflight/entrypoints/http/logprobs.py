"""Writes log-probabilities as a list of tokens, each with its most probable alternatives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from inflight.entrypoints.http.bodies import TokenLogprob, TopLogprob
from inflight.errors import EngineError
from inflight.outputs import Logprob
from inflight.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # written instead of minus infinity, which JSON does not have
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the decoded text of a token that is only a part of a character contains it

# The log-probabilities at one position, by token id. The first entry is that of the token that is at this position in the text.
PositionLogprobs = Mapping[int, Logprob]


def chat_logprobs(
    rows: Sequence[PositionLogprobs], top: int, tokenizer: Tokenizer | None, *, as_ids: bool = False
) -> list[TokenLogprob]:
    """`choices[].logprobs.content`: one entry per token. `as_ids`: tokens are shown by their ids, as "token_id:7"."""

    def shown(token_id: int, found: Logprob) -> TopLogprob:
        text = found.decoded_token or ""
        return {
            "token": name_of(token_id, text, as_ids=as_ids),
            "logprob": finite(found.logprob),
            "bytes": list(token_bytes(token_id, text, tokenizer)),
        }

    entries: list[TokenLogprob] = []
    for row in rows:
        best = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        drawn = next(iter(row.items()))
        entries.append({**shown(*drawn), "top_logprobs": [shown(*other) for other in best]})
    return entries


def name_of(token_id: int, text: str, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def token_bytes(token_id: int, text: str, tokenizer: Tokenizer | None) -> bytes:
    """The token's bytes in UTF-8. If the token is only a part of a character, its decoded text does not contain these bytes, so
    they come from the tokenizer."""
    if _REPLACEMENT not in text or tokenizer is None:
        return text.encode("utf-8")
    byte = tokenizer.byte_fallback(token_id)
    return tokenizer.token_bytes(token_id) if byte is None else bytes([byte])


def finite(value: float) -> float:
    """
    Raises:
        EngineError: the value is NaN, because a logit of the model was infinite or NaN.
    """
    if math.isnan(value):
        raise EngineError("a log-probability is not a number: the model's logits are not finite")
    return max(value, LOWEST)
