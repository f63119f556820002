"""Log-probabilities of prompt tokens: which of a step's hidden states they come from, and how they are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from inflight.interface.request import Int32Array, LogprobsColumns
from inflight.interface.step import NewRequestData, SchedulerOutput
from inflight.sample.logprobs import LogprobsTensors, gather_logprobs
from inflight.worker.input_batch import InputBatch

MAX_ROWS = 256  # the most rows of logits in memory at once


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpan:
    """Prompt tokens whose log-probabilities a step computes: `[start, start + len(targets))` of the request in row `row`.

    The log-probabilities are computed from the step's hidden states `[first_token, first_token + len(targets))`.
    """

    row: int
    start: int
    first_token: int
    targets: Int32Array
    num_logprobs: int

    def pieces(
        self, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], targets: Tensor
    ) -> list[LogprobsTensors]:
        """Compute the log-probabilities and leave them on the device, in consecutive pieces of up to MAX_ROWS rows.
        `hidden`: the hidden states of all tokens of the step. `targets`: `self.targets` on the device."""
        found = []
        for i in range(0, len(targets), MAX_ROWS):
            wanted, first = targets[i : i + MAX_ROWS], self.first_token + i
            found.append(
                gather_logprobs(compute_logits(hidden[first : first + len(wanted)]), wanted, self.num_logprobs)
            )
        return found


def joined(pieces: Sequence[LogprobsTensors]) -> LogprobsColumns:
    """Wait for the device, and copy consecutive pieces to the host."""
    return LogprobsColumns.joined([piece.to_columns() for piece in pieces])


class PromptLogprobsProgress:
    """Remembers for each slot which prompt tokens already have log-probabilities. Only the thread that prepares steps uses
    it.

    Attributes:
        wanted: slot -> (log-probabilities per token, number of prompt positions done).
    """

    def __init__(self) -> None:
        self.wanted: dict[int, tuple[int, int]] = {}

    def add(self, data: NewRequestData) -> None:
        self.wanted.pop(data.slot, None)
        wanted = data.sampling.params.prompt_logprobs
        if wanted is not None:
            self.wanted[data.slot] = (wanted, data.num_prompt_logprobs_done)

    def advance(
        self, plan: SchedulerOutput, query_start_loc: Int32Array, batch: InputBatch
    ) -> tuple[PromptLogprobsSpan, ...]:
        """The prompt tokens whose log-probabilities this step computes. Each token is returned once."""
        spans = []
        for row, slot in enumerate(plan.slots.tolist()):
            if slot not in self.wanted:
                continue
            wanted, done = self.wanted[slot]
            computed = int(plan.num_computed_tokens[row])
            # the hidden state at position p gives the probabilities of the token at p + 1
            start = max(done, computed + 1)
            stop = min(computed + int(plan.num_scheduled_tokens[row]) + 1, int(batch.num_prompt_tokens[slot]))
            if stop <= start:
                continue
            self.wanted[slot] = (wanted, stop)
            first_token = int(query_start_loc[row]) + start - 1 - computed
            spans.append(PromptLogprobsSpan(row, start, first_token, batch.token_ids[slot, start:stop].copy(), wanted))
        return tuple(spans)
