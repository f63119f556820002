"""`CopiedStep`: what a step leaves for the host, on its way there beside the steps that follow.

compute    | draw N | log-probabilities N | forward N+1 ....
copy_out                                  | to pinned memory | -> event -> drain thread
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event
from inflight.interface.step import ModelRunnerOutput, PromptLogprobs
from inflight.sample.device_features import DeviceFeatures
from inflight.sample.logprobs import LogprobsTensors
from inflight.worker.prompt_logprobs import PromptLogprobsWork, joined

NO_ROWS = np.empty(0, dtype=np.int32)


class CopiedStep:
    """The thread that launches fills it, the one that drains waits for it. What is on the device stays until then."""

    def __init__(self) -> None:
        self.prompt_pieces: list[list[LogprobsTensors]] = []  # of each piece of work, by the forward
        self._logprobs: list[LogprobsTensors] = []
        self._tokens: list[Tensor] = []
        self._on_host: list[LogprobsTensors] = []
        self._prompts_on_host: list[list[LogprobsTensors]] = []
        self._work: tuple[PromptLogprobsWork, ...] = ()
        self._rows: npt.NDArray[np.int32] = NO_ROWS
        self._event: Event | None = None

    def start(
        self,
        device: Accelerator,
        tokens: Tensor,
        features: DeviceFeatures | None,
        work: tuple[PromptLogprobsWork, ...],
    ) -> Event:
        """Queue the copies of the tokens, int32 [n], and log-probabilities. Nobody overwrites `tokens` before the event."""
        self._work = work
        if features is not None and features.logprobs_rows is not None:
            self._rows = features.logprobs_rows
            device.compute.enqueue(lambda: self._gather(features, tokens))
        device.copy_out.wait(device.compute.record())
        device.copy_out.enqueue(lambda: self._copy(device, tokens))
        self._event = device.copy_out.record()
        return self._event

    def wait(self, step_id: int) -> ModelRunnerOutput:
        """The step's answer. Any thread but the one that launches."""
        if self._event is None:
            return ModelRunnerOutput(step_id=step_id)
        self._event.synchronize()
        return ModelRunnerOutput(
            step_id=step_id,
            sampled_token_ids=self._tokens[0].numpy().copy(),
            logprobs=joined(self._on_host) if self._on_host else None,
            logprobs_rows=self._rows,
            prompt_logprobs=tuple(
                PromptLogprobs(row=work.row, start=work.start, columns=joined(pieces))
                for work, pieces in zip(self._work, self._prompts_on_host, strict=True)
            ),
        )

    def _gather(self, features: DeviceFeatures, tokens: Tensor) -> None:
        found = features.after_draw(tokens)
        assert found is not None
        self._logprobs.append(found)

    def _copy(self, device: Accelerator, tokens: Tensor) -> None:
        self._tokens.append(_to_host(device, tokens))
        self._on_host += _all_to_host(device, self._logprobs)
        self._prompts_on_host += [_all_to_host(device, pieces) for pieces in self.prompt_pieces]


def _all_to_host(device: Accelerator, pieces: Sequence[LogprobsTensors]) -> list[LogprobsTensors]:
    return [
        LogprobsTensors(
            token_ids=_to_host(device, piece.token_ids),
            logprobs=_to_host(device, piece.logprobs),
            ranks=_to_host(device, piece.ranks),
        )
        for piece in pieces
    ]


def _to_host(device: Accelerator, source: Tensor) -> Tensor:
    host = device.pinned(source.numel(), source.dtype).view(source.shape)
    host.copy_(source, non_blocking=True)
    return host
