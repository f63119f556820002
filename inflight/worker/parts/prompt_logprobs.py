"""`PromptLogprobsReader`: log-probabilities of prompt tokens, from the hidden states of the tokens before them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from inflight.interface.prompt_logprobs import PromptLogprobsPart, PromptLogprobsResult
from inflight.interface.request import LogprobsColumns
from inflight.interface.step import SchedulerOutput
from inflight.models.causal_lm import CausalLM
from inflight.sample.logprobs import LogprobsTensors, gather_logprobs
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.parts.reader import Found, PartReader, PartWork, prompt_rows

MAX_ROWS = 256  # the most rows of logits in memory at once


class PromptLogprobsReader(PartReader):
    """`PartWork.arrays` are the tokens whose log-probabilities are computed: each follows one of the work's tokens."""

    kind = "prompt_logprobs"

    def prepare(self, plan: SchedulerOutput, inputs: StepInputs, batch: InputBatch) -> Iterator[PartWork]:
        for (row, slot, first_token, computed, num_tokens), part in prompt_rows(plan, inputs, batch, self.parts):
            assert isinstance(part, PromptLogprobsPart)
            # the hidden state at position p gives the probabilities of the token at p + 1
            start = max(part.num_done, computed + 1)
            stop = min(computed + num_tokens + 1, int(batch.num_prompt_tokens[slot]))
            if stop <= start:
                continue
            self.parts[slot] = replace(part, num_done=stop)
            yield PartWork(
                reader=self,
                part=part,
                row=row,
                slot=slot,
                first_token=first_token + start - 1 - computed,
                start=start - 1,
                num_tokens=stop - start,
                arrays=(batch.token_ids[slot, start:stop].copy(),),
            )

    def read(self, hidden: Tensor, work: PartWork, arrays: Sequence[Tensor], model: CausalLM) -> Found:
        assert isinstance(work.part, PromptLogprobsPart)
        (targets,) = arrays
        found: Found = []
        for i in range(0, len(targets), MAX_ROWS):
            wanted = targets[i : i + MAX_ROWS]
            first = work.first_token + i
            logits = model.compute_logits(hidden[first : first + len(wanted)])
            found.append(gather_logprobs(logits, wanted, work.part.num_logprobs))
        return found

    def to_host(self, work: PartWork, found: Found) -> PromptLogprobsResult:
        pieces = [LogprobsTensors(*piece).to_columns() for piece in found]
        return PromptLogprobsResult(start=work.start + 1, columns=LogprobsColumns.joined(pieces))
