"""Writes log-probabilities in the two forms of OpenAI's API, one for chats and one for completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence

from inflight.entrypoints.openai.responses import LogprobColumns, PromptLogprobs, TokenLogprob, TopLogprob
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
            "token": _name(token_id, text, as_ids=as_ids),
            "logprob": finite(found.logprob),
            "bytes": list(_token_bytes(token_id, text, tokenizer)),
        }

    entries: list[TokenLogprob] = []
    for row in rows:
        best = sorted(row.items(), key=lambda item: item[1].rank)[:top]
        entries.append({**shown(*next(iter(row.items()))), "top_logprobs": [shown(*other) for other in best]})
    return entries


def _name(token_id: int, text: str, *, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def _token_bytes(token_id: int, text: str, tokenizer: Tokenizer | None) -> bytes:
    """The token's bytes in UTF-8. If the token is only a part of a character, its decoded text does not contain these bytes, so
    they come from the tokenizer."""
    if _REPLACEMENT not in text or tokenizer is None:
        return text.encode("utf-8")
    byte = tokenizer.byte_fallback(token_id)
    return tokenizer.token_bytes(token_id) if byte is None else bytes([byte])


class CompletionLogprobs:
    """Makes `choices[].logprobs` for one choice of a completion. Text offsets count from the beginning of the choice, also in
    later chunks. `as_ids`: tokens are shown by their ids, as "token_id:7"."""

    def __init__(self, tokenizer: Tokenizer | None = None, *, as_ids: bool = False) -> None:
        self._offset = 0
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")  # a character may consist of several tokens

    def columns(self, rows: Sequence[PositionLogprobs | None], first: tuple[int, str] = (0, "")) -> LogprobColumns:
        """The columns of the next tokens. The row of the prompt's first token is None, so `first` gives its id and text."""
        columns: LogprobColumns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            token_id, found = (first[0], None) if row is None else next(iter(row.items()))
            text = first[1] if found is None else found.decoded_token or ""
            columns["tokens"].append(_name(token_id, text, as_ids=self._as_ids))
            columns["token_logprobs"].append(None if found is None else finite(found.logprob))
            columns["top_logprobs"].append(None if row is None else self._best(row))
            columns["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(_token_bytes(token_id, text, self._tokenizer)))
        return columns

    def _best(self, row: PositionLogprobs) -> dict[str, float]:
        """Token text -> log-probability, for the most probable tokens and the token in the text. If several tokens have the
        same text, the highest value is kept."""
        best: dict[str, float] = {}
        drawn, *others = row.items()
        for token_id, entry in [drawn, *sorted(others, key=lambda item: item[1].rank)]:
            name = _name(token_id, entry.decoded_token or "", as_ids=self._as_ids)
            best[name] = max(best.get(name, LOWEST), finite(entry.logprob))
        return best


def prompt_logprobs(rows: Sequence[PositionLogprobs | None]) -> PromptLogprobs:
    """The log-probabilities of a prompt in vLLM's form: for each position a dict by token id, but None for the first."""
    return [
        None
        if row is None
        else {
            str(token_id): {"logprob": finite(found.logprob), "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in row.items()
        }
        for row in rows
    ]


def finite(value: float) -> float:
    """
    Raises:
        EngineError: the value is NaN, because a logit of the model was infinite or NaN.
    """
    if math.isnan(value):
        raise EngineError("a log-probability is not a number: the model's logits are not finite")
    return max(value, LOWEST)
