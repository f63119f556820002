"""`ActivationLink`: moves activations from one pipeline stage to the next. `LinkSpec`: the sizes that both ends must share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.device.base import TORCH_DTYPES
from inflight.distributed.channel import Channel
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup

SPLIT_BYTES = 1 << 16  # a smaller tensor is not split: gathering its parts would cost more time than is saved


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """What the two ends of a link must agree on before the first step. If a step's tensors are large, each rank of a stage
    sends a part of the tensors. `num_captured`: of layers whose inputs travel, too (`ModelArchitecture.captured`)."""

    hidden_size: int
    dtype: torch.dtype
    max_num_tokens: int
    tensor_parallel_size: int
    split_bytes: int = SPLIT_BYTES
    num_captured: int = 0

    def part(self, num_tokens: int, tp_rank: int) -> slice | None:
        """Returns the tokens that rank `tp_rank` sends, or None if a step of `num_tokens` tokens is not split."""
        num_bytes = num_tokens * self.hidden_size * self.dtype.itemsize
        if self.tensor_parallel_size == 1 or num_bytes < self.split_bytes:
            return None
        size = self.part_size(num_tokens)
        return slice(min(tp_rank * size, num_tokens), min((tp_rank + 1) * size, num_tokens))

    def part_size(self, num_tokens: int) -> int:
        """Returns the number of tokens of the largest part. The last parts may have fewer tokens, or none."""
        return -(-num_tokens // self.tensor_parallel_size)

    def columns(self) -> Tensor:
        """The fields as numbers, to compare two specs."""
        dtype = list(TORCH_DTYPES.values()).index(self.dtype)
        sizes = [self.hidden_size, dtype, self.max_num_tokens, self.tensor_parallel_size, self.split_bytes]
        return torch.tensor([*sizes, self.num_captured], dtype=torch.int64, device="cpu")


class ActivationLink(ABC):
    """One rank's link to the stages before and after it. It owns both channels.

    The thread that prepares steps calls `post_receive`. The thread that computes calls `receive` and `send`. Both threads call
    in the order of the steps. After an error every `receive` and `send` raises, because the tensors of a step were lost.

    Args:
        group: the ranks of this stage. They gather the parts of split tensors. Only this link uses the group.
        before, after: channels to the rank with the same tp_rank in the previous and the next stage. The first stage has no
            `before`, the last stage no `after`.
    """

    def __init__(
        self, spec: LinkSpec, group: TensorParallelGroup, before: Channel | None, after: Channel | None
    ) -> None:
        self._spec = spec
        self._group = group
        self._before, self._after = before, after
        self._error: Exception | None = None

    @abstractmethod
    def post_receive(self, step_id: int, num_tokens: int) -> None:
        """Announce the next step that this stage computes. `num_tokens`: the number of tokens in the step's plan (the
        scheduler's output), at most `max_num_tokens`."""

    @abstractmethod
    def receive(self, step_id: int) -> IntermediateTensors:
        """Returns the tensors of the oldest posted step. The caller may change them in place until it calls `receive` again."""

    @abstractmethod
    def send(self, step_id: int, tensors: IntermediateTensors) -> None:
        """Queue the tensors of a step. They must have as many tokens as the step's plan, and must not be changed any more."""

    def close(self) -> None:
        """Drop queued steps, and let every wait fail. Idempotent. Any thread may call it, except the link's own threads."""
        for channel in (self._before, self._after):
            if channel is not None:
                channel.close()

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise ConnectionError(f"the link between the stages is broken: {self._error}") from self._error


def agree(spec: LinkSpec, before: Channel | None, after: Channel | None) -> None:
    """Send `spec` to the next stage, and compare it with the spec of the previous stage. Uses the channels of the host.

    Raises:
        ConnectionError: the previous stage has another model, or another configuration.
    """
    ours = spec.columns()
    if after is not None:
        after.send(ours)
    if before is not None:
        theirs = torch.empty_like(ours)
        before.receive(theirs)
        if not torch.equal(ours, theirs):
            raise ConnectionError(
                f"the previous stage sends (hidden_size, dtype, max tokens, TP size, split, captures) = {theirs.tolist()}, "
                f"but this stage expects {ours.tolist()}: give both ranks the same model and configuration"
            )
