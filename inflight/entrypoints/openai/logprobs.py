"""Writes log-probabilities in the form of completions, and those of prompts."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from inflight.entrypoints.http.logprobs import LOWEST, PositionLogprobs, finite, name_of, token_bytes
from inflight.entrypoints.openai.bodies import LogprobColumns, PromptLogprobs
from inflight.outputs import RequestOutput
from inflight.tokenizer.tokenizer import Tokenizer


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
            columns["tokens"].append(name_of(token_id, text, as_ids=self._as_ids))
            columns["token_logprobs"].append(None if found is None else finite(found.logprob))
            columns["top_logprobs"].append(None if row is None else self._best(row))
            columns["text_offset"].append(self._offset)
            self._offset += len(self._characters.decode(token_bytes(token_id, text, self._tokenizer)))
        return columns

    def _best(self, row: PositionLogprobs) -> dict[str, float]:
        """Token text -> log-probability, for the most probable tokens and the token in the text. If several tokens have the
        same text, the highest value is kept."""
        best: dict[str, float] = {}
        drawn, *others = row.items()
        for token_id, entry in [drawn, *sorted(others, key=lambda item: item[1].rank)]:
            name = name_of(token_id, entry.decoded_token or "", as_ids=self._as_ids)
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


# kind of a request's part -> what an answer has of its results, under the kind's name. Any: a result, and JSON
SHOWN_PARTS: dict[str, Callable[[Any], Any]] = {"prompt_logprobs": prompt_logprobs}


def shown_parts(kinds: Iterable[str], output: RequestOutput) -> dict[str, Any]:
    """The fields of an answer with what has come of parts of these kinds."""
    return {kind: SHOWN_PARTS[kind](output.parts[kind]) for kind in kinds if kind in output.parts}
