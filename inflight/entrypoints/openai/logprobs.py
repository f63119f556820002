"""Writes log-probabilities in the two forms of OpenAI's API, one for chats and one for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inflight.entrypoints.openai.responses import LogprobColumns, PromptLogprobs, TokenLogprob, TopLogprob
from inflight.outputs import Logprob
from inflight.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # written instead of minus infinity, which JSON does not have
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the decoded text of a token that is only a part of a character contains it

# The log-probabilities at one position, by token id. The first entry is that of the token that is at this position in the text.
Row = Mapping[int, Logprob]


def chat_logprobs(rows: Sequence[Row], top: int, tokenizer: Tokenizer | None) -> list[TokenLogprob]:
    """`choices[].logprobs.content`: one entry per token."""
    return [_chat_entry(row, top, tokenizer) for row in rows]


def _chat_entry(row: Row, top: int, tokenizer: Tokenizer | None) -> TokenLogprob:
    token_id, found = next(iter(row.items()))
    best = sorted(row.items(), key=lambda item: item[1].rank)[:top]
    return {
        **_token(token_id, found, tokenizer),
        "top_logprobs": [_token(other_id, other, tokenizer) for other_id, other in best],
    }


def _token(token_id: int, found: Logprob, tokenizer: Tokenizer | None) -> TopLogprob:
    text = found.decoded_token or ""
    return {"token": text, "logprob": finite(found.logprob), "bytes": list(_token_bytes(token_id, text, tokenizer))}


def _token_bytes(token_id: int, text: str, tokenizer: Tokenizer | None) -> bytes:
    """The token's bytes in UTF-8. If the token is only a part of a character, its decoded text does not contain these bytes, so
    they come from the tokenizer."""
    if _REPLACEMENT not in text or tokenizer is None:
        return text.encode("utf-8")
    byte = tokenizer.byte_fallback(token_id)
    return tokenizer.token_bytes(token_id) if byte is None else bytes([byte])


class CompletionLogprobs:
    """Makes `choices[].logprobs` for one choice of a completion. Text offsets count from the beginning of the choice, also in
    later chunks."""

    def __init__(self) -> None:
        self._offset = 0

    def columns(self, rows: Sequence[Row | None], first_token: str = "") -> LogprobColumns:
        """The columns of the next tokens. The row of the prompt's first token is None, so `first_token` gives its text."""
        columns: LogprobColumns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            found = None if row is None else next(iter(row.values()))
            text = first_token if found is None else found.decoded_token or ""
            columns["tokens"].append(text)
            columns["token_logprobs"].append(None if found is None else finite(found.logprob))
            columns["top_logprobs"].append(None if row is None else self._best(row))
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns

    def _best(self, row: Row) -> dict[str, float]:
        """Token text -> log-probability, for the most probable tokens and the token in the text. If several tokens have the
        same text, the highest value is kept."""
        best: dict[str, float] = {}
        drawn, *others = row.values()
        for entry in [drawn, *sorted(others, key=lambda entry: entry.rank)]:
            text = entry.decoded_token or ""
            best[text] = max(best.get(text, LOWEST), finite(entry.logprob))
        return best


def prompt_logprobs(rows: Sequence[Row | None]) -> PromptLogprobs:
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
    return max(value, LOWEST)
