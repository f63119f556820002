"""`Completion`: one of a request's completions as it grows, and log-probabilities as users read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inflight.engine.detokenizer import Detokenizer
from inflight.engine.stop_strings import StopStrings
from inflight.interface.request import EngineCoreOutput, FinishReason, LogprobsColumns
from inflight.outputs import CompletionOutput, Logprob
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer


class Completion:
    """Tokens, text and log-probabilities of child `index`. `take_delta` moves them out, `cumulative` copies them.

    Attributes:
        has_news: something was added since the last `take_delta`.
        num_tokens: so far.
        last_token_time: kept here for the output processor, None before the first.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_strings: StopStrings | None,
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.has_news = False
        self.num_tokens = 0
        self.last_token_time: float | None = None
        self._stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._num_logprobs = params.logprobs
        self._detokenizer = Detokenizer(tokenizer, params, prompt_token_ids, stop_strings)
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0

    def add(self, output: EngineCoreOutput) -> None:
        """Take in tokens up to the one that completes a stop string, if one does; then it has ended, else when `output` says
        so. A token that ends the request for the core (EOS, a stop token) counts, but its text does not belong to the text.
        """
        assert self.finish_reason is None
        token_ids = output.new_token_ids
        ends_in_stop_token = output.finish_reason is FinishReason.STOP and bool(token_ids)
        text_ids = token_ids[:-1] if ends_in_stop_token else token_ids
        if (count := self._detokenizer.push(text_ids)) is not None:
            self._append(token_ids[:count], output.logprobs)
            self.finish(FinishReason.STOP, self._detokenizer.stop_string)
            return
        self._append(token_ids, output.logprobs)
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason, token_ids[-1] if ends_in_stop_token else None)

    def finish(
        self, finish_reason: FinishReason, stop_reason: str | int | None = None, end_token_id: int | None = None
    ) -> None:
        self._detokenizer.finish(end_token_id)
        self.finish_reason = finish_reason
        self._stop_reason = stop_reason
        self.has_news = True

    def fail(self) -> None:
        """End as an error, with the text so far."""
        self.finish_reason = FinishReason.ERROR
        self.has_news = True

    def cumulative(self) -> CompletionOutput:
        self._text += self._detokenizer.take()
        logprobs = None if self._logprobs is None else list(self._logprobs)
        return self._output(self._text, list(self._token_ids), logprobs)

    def take_delta(self) -> CompletionOutput:
        self.has_news = False
        token_ids, self._token_ids = self._token_ids, []
        logprobs = self._logprobs
        if logprobs is not None:
            self._logprobs = []
        return self._output(self._detokenizer.take(), token_ids, logprobs)

    def _append(self, token_ids: Sequence[int], columns: LogprobsColumns | None) -> None:
        self._token_ids += token_ids
        self.num_tokens += len(token_ids)
        self.has_news |= bool(token_ids)
        if self._logprobs is None or self._num_logprobs is None or not token_ids:
            return
        assert columns is not None and len(columns.ranks) >= len(token_ids), "the core left out log-probabilities"
        rows = logprobs_dicts(columns.rows(0, len(token_ids)), self._num_logprobs, self._tokenizer)
        self._logprobs += rows
        assert self._cumulative_logprob is not None
        for token_id, row in zip(token_ids, rows, strict=True):
            self._cumulative_logprob += row[token_id].logprob

    def _output(self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
        )


def logprobs_dicts(columns: LogprobsColumns, k: int, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    """One dict a position: the token itself first, then the k most probable ones, if it is not among them once more."""
    token_ids = columns.token_ids[:, : k + 1]
    known = [] if tokenizer is None else np.unique(token_ids).tolist()
    texts = {token_id: tokenizer.decode_token(token_id) for token_id in known} if tokenizer is not None else {}
    ranks = range(token_ids.shape[1])  # of columns 1..k
    rows = []
    for ids, values, rank in zip(
        token_ids.tolist(), columns.logprobs[:, : k + 1].tolist(), columns.ranks.tolist(), strict=True
    ):
        row = dict(zip(ids, map(Logprob, values, ranks, map(texts.get, ids)), strict=True))
        row[ids[0]] = Logprob(values[0], rank, texts.get(ids[0]))
        rows.append(row)
    return rows
