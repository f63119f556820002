"""`PromptLogprobsPart`: the request wants log-probabilities of its prompt tokens. `PromptLogprobsResult`: some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inflight.interface.parts import PartResult, RequestPart
from inflight.interface.request import LogprobsColumns


@dataclass(frozen=True, kw_only=True)
class PromptLogprobsPart(RequestPart):
    """The first of several sequences computes the prompt, so only it has the part.

    Attributes:
        num_logprobs: how many of the most probable tokens are wanted at each position, beside the token itself.
        num_done: for how many prompt tokens the receiver knows the log-probabilities. The first prompt token has none, and
            counts as done.
    """

    is_of_leader = True

    kind: Literal["prompt_logprobs"] = "prompt_logprobs"
    num_logprobs: int
    num_done: int = 1

    @property
    def first_position(self) -> int:
        """The hidden state at a position gives the probabilities of the next token."""
        return self.num_done - 1

    def after(self, result: PartResult) -> PromptLogprobsPart:
        assert isinstance(result, PromptLogprobsResult)
        return replace(self, num_done=result.start + len(result.columns.ranks))


@dataclass(frozen=True, kw_only=True)
class PromptLogprobsResult(PartResult):
    """Log-probabilities of the prompt tokens `[start, start + n)`."""

    kind: Literal["prompt_logprobs"] = "prompt_logprobs"
    start: int
    columns: LogprobsColumns

    @property
    def size(self) -> int:
        return self.columns.token_ids.size

    def joined(self, later: Sequence[PromptLogprobsResult]) -> PromptLogprobsResult:
        columns = LogprobsColumns.joined([self.columns, *(result.columns for result in later)])
        return replace(self, columns=columns)

    def pieces(self, max_size: int) -> Iterator[PromptLogprobsResult]:
        for first, rows in self.columns.pieces(max_size):
            yield replace(self, start=self.start + first, columns=rows)
