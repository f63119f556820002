"""`CopiedStep`: copies a step's results from the GPU to the host while later steps run.

compute    | draw N | log-probabilities N | forward N+1 ....
copy_out                                  | to pinned memory | -> event -> drain thread
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event
from inflight.interface.request import LogprobsColumns
from inflight.interface.step import ModelRunnerOutput
from inflight.sample.logprobs import LogprobsTensors
from inflight.sample.processors import LogitsProcessors
from inflight.worker.parts.row_parts import StepParts

NO_ROWS = np.empty(0, dtype=np.int32)


class CopiedStep:
    """The thread that launches steps starts the copies. The drain thread, which returns results to the engine, waits for
    them. This object keeps the tensors alive until the copies have ended."""

    def __init__(self) -> None:
        self._logprobs: list[LogprobsTensors] = []
        self._tokens: list[Tensor] = []
        self._on_host: list[LogprobsTensors] = []
        self._parts: StepParts | None = None
        self._rows: npt.NDArray[np.int32] = NO_ROWS
        self._event: Event | None = None

    def start(
        self, device: Accelerator, tokens: Tensor, processors: LogitsProcessors | None, parts: StepParts | None
    ) -> Event:
        """Queue the copies of the log-probabilities, of `tokens`, int32 [n], and of what `parts` have found. Returns an event
        that is reached when the copies have ended. Until then, `tokens` must not be overwritten."""
        self._parts = parts
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
            logprobs=LogprobsColumns.joined([piece.to_columns() for piece in self._on_host]) if self._on_host else None,
            logprobs_rows=self._rows,
            parts=() if self._parts is None else self._parts.results(),
        )

    def _gather(self, processors: LogitsProcessors, tokens: Tensor) -> None:
        found = processors.logprobs(tokens)
        assert found is not None
        self._logprobs.append(found)

    def _copy(self, device: Accelerator, tokens: Tensor) -> None:
        self._tokens.append(_to_host(device, tokens))
        self._on_host += _all_to_host(device, self._logprobs)
        if self._parts is not None:
            self._parts.copy(partial(_to_host, device))


def _all_to_host(device: Accelerator, pieces: Sequence[LogprobsTensors]) -> list[LogprobsTensors]:
    return [LogprobsTensors(*(_to_host(device, each) for each in piece)) for piece in pieces]


def _to_host(device: Accelerator, source: Tensor) -> Tensor:
    host = device.pinned(source.numel(), source.dtype).view(source.shape)
    host.copy_(source, non_blocking=True)
    return host
