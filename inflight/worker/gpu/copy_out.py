"""`CopiedStep`: copies a step's results from the GPU to the host while later steps run.

compute    | draw N | log-probabilities N | forward N+1 ....
copy_out                                  | to pinned memory | -> event -> drain thread
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event
from inflight.interface.step import ModelRunnerOutput, PromptLogprobs
from inflight.sample.logprobs import LogprobsTensors
from inflight.sample.processors import LogitsProcessors
from inflight.worker.prompt_logprobs import PromptLogprobsSpan, joined

NO_ROWS = np.empty(0, dtype=np.int32)


class CopiedStep:
    """The thread that launches steps starts the copies. The drain thread, which returns results to the engine, waits for
    them. This object keeps the tensors alive until the copies have ended."""

    def __init__(self) -> None:
        # one list per `PromptLogprobsSpan` (prompt tokens of one request); the forward fills the lists
        self.prompt_pieces: list[list[LogprobsTensors]] = []
        self._logprobs: list[LogprobsTensors] = []
        self._tokens: list[Tensor] = []
        self._on_host: list[LogprobsTensors] = []
        self._prompts_on_host: list[list[LogprobsTensors]] = []
        self._spans: tuple[PromptLogprobsSpan, ...] = ()
        self._rows: npt.NDArray[np.int32] = NO_ROWS
        self._event: Event | None = None

    def start(
        self,
        device: Accelerator,
        tokens: Tensor,
        processors: LogitsProcessors | None,
        spans: tuple[PromptLogprobsSpan, ...],
    ) -> Event:
        """Queue the copies of the log-probabilities and of `tokens`, int32 [n]. Returns an event that is reached when the
        copies have ended. Until then, `tokens` must not be overwritten."""
        self._spans = spans
        if processors is not None and processors.logprobs_rows is not None:
            self._rows = processors.logprobs_rows
            device.compute.enqueue(lambda: self._gather(processors, tokens))
        device.copy_out.wait(device.compute.record())
        device.copy_out.enqueue(lambda: self._copy(device, tokens))
        self._event = device.copy_out.record()
        return self._event

    def wait(self, step_id: int) -> ModelRunnerOutput:
        """Wait for the copies and return the step's output. The thread that launches steps must not call this."""
        if self._event is None:
            return ModelRunnerOutput(step_id=step_id)
        self._event.synchronize()
        return ModelRunnerOutput(
            step_id=step_id,
            sampled_token_ids=self._tokens[0].numpy().copy(),
            logprobs=joined(self._on_host) if self._on_host else None,
            logprobs_rows=self._rows,
            prompt_logprobs=tuple(
                PromptLogprobs(row=span.row, start=span.start, columns=joined(pieces))
                for span, pieces in zip(self._spans, self._prompts_on_host, strict=True)
            ),
        )

    def _gather(self, processors: LogitsProcessors, tokens: Tensor) -> None:
        found = processors.logprobs(tokens)
        assert found is not None
        self._logprobs.append(found)

    def _copy(self, device: Accelerator, tokens: Tensor) -> None:
        self._tokens.append(_to_host(device, tokens))
        self._on_host += _all_to_host(device, self._logprobs)
        self._prompts_on_host += [_all_to_host(device, pieces) for pieces in self.prompt_pieces]


def _all_to_host(device: Accelerator, pieces: Sequence[LogprobsTensors]) -> list[LogprobsTensors]:
    return [LogprobsTensors(*(_to_host(device, each) for each in piece)) for piece in pieces]


def _to_host(device: Accelerator, source: Tensor) -> Tensor:
    host = device.pinned(source.numel(), source.dtype).view(source.shape)
    host.copy_(source, non_blocking=True)
    return host
