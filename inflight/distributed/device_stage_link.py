"""`DeviceStageLink`: moves activations to the GPU of the next stage while both GPUs compute. The host waits for nothing.

    stage p    compute  | forward N, copy N |      | forward N+1, copy N+1 |
               after                        | send N ...........|          | send N+1 ...........|
    stage p+1  before   ....................| receive N, gather | .........| receive N+1, gather |
               compute                                          | copy N, forward N |            | copy N+1, forward N+1 |

Each direction has its own stream (`before` receives, `after` sends), its own channel, and a ring of slots. A slot is memory for
one step. Events make a stream wait before it reads or writes a slot:

    receive   `before` waits until the slot's old contents were copied out;  `compute` waits until the step has arrived
    send      `compute` waits until the slot's old contents were sent;       `after` waits until the step was copied in

So a transfer runs during the forward of another step. Two slots per direction are enough: a sending stage waits only if the
receiving stage is behind by as many steps as the two stages have slots together. Received tensors are always copied to the same
address, where a CUDA graph reads them.

**Nothing deadlocks.** A transfer is a kernel that waits on the device for the transfer at the other end. Streams share a
limited number of hardware queues, so other kernels may have to wait behind this kernel. Therefore `receive`, and not
`post_receive`, launches the transfer of a step, right before the kernels that need it. So on each rank every kernel is launched
after all kernels that it depends on, and all kernels of a rank could run in the order of the launches, on one queue. The proof
that each transfer ends is an induction over the steps, and within a step over the stages. At some time both receive N and the
send N of the previous stage run, because everything that was launched before them belongs to steps before N, or to step N on
earlier stages. The host runs ahead of the device, so a receive is still launched long before its tensors are needed.

Every communicator (connection between GPUs) is used on one stream, by one thread, in step order, so both of its ends see the
same sequence. A waiting transfer occupies only `CHANNEL_CTAS` multiprocessors, so the kernels that it waits for can run.

Large hidden states are split over the ranks of a stage (`stage_link.py` explains this). The stream `before` gathers the parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event, Stream
from inflight.distributed.activation_link import ActivationLink, LinkSpec
from inflight.distributed.channel import Channel
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup

NUM_SLOTS = 2


@dataclass(slots=True)
class _Slot:
    """Flat memory for the tensors of one step. It may be written again after the event `free`."""

    memory: Tensor
    free: Event | None = None


def _ring(spec: LinkSpec, device: torch.device, num_slots: int) -> Iterator[_Slot]:
    """An endless iterator over the slots of one direction, which are used one after another."""
    num_elements = (2 + spec.num_captured) * spec.max_num_tokens * spec.hidden_size
    return cycle([_Slot(torch.empty(num_elements, dtype=spec.dtype, device=device)) for _ in range(num_slots)])


class DeviceStageLink(ActivationLink):
    """The channels of this link are channels between devices. Before the link is made, the stages must compare their `spec`
    with `agree`. `receive` and `send` launch the transfer, and return.

    On the stream `compute`, each `receive` overwrites the tensors that the previous `receive` returned. `send` also reads its
    tensors on `compute`, so later kernels of that stream may change them.

    Args:
        num_slots: the number of slots in each direction.

    Attributes:
        arrived: memory for the received tensors, [max_num_tokens, hidden_size]; None on the first stage. `receive` fills the
            part for the step's tokens and returns this part. The rest does not change.
    """

    def __init__(
        self,
        spec: LinkSpec,
        device: Accelerator,
        group: TensorParallelGroup,
        *,
        before: Channel | None,
        after: Channel | None,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        super().__init__(spec, group, before, after)
        self._compute = device.compute
        self._posted: deque[tuple[int, int]] = deque()  # step_id, num_tokens
        self._count = 2 + spec.num_captured  # of tensors
        self.arrived: IntermediateTensors | None = None
        if before is not None:
            self._inbox = _ring(spec, device.torch_device, num_slots)
            self._before_stream = device.new_stream()
            shape = (self._count, spec.max_num_tokens, spec.hidden_size)
            self._arrived = torch.zeros((2, *shape[1:]), dtype=spec.dtype, device=device.torch_device)
            captured = self._arrived.new_zeros(shape[1], spec.num_captured * shape[2]) if spec.num_captured else None
            self.arrived = IntermediateTensors(self._arrived[0], self._arrived[1], captured)
            num_elements = self._count * spec.part_size(spec.max_num_tokens) * spec.hidden_size if group.size > 1 else 0
            self._part = torch.empty(num_elements, dtype=spec.dtype, device=device.torch_device)
        if after is not None:
            self._outbox = _ring(spec, device.torch_device, num_slots)
            self._after_stream = device.new_stream()

    def post_receive(self, step_id: int, num_tokens: int) -> None:
        assert num_tokens <= self._spec.max_num_tokens, (num_tokens, self._spec)
        self._posted.append((step_id, num_tokens))

    def receive(self, step_id: int) -> IntermediateTensors:
        assert self._before is not None and self.arrived is not None, "the first stage receives nothing"
        posted, num_tokens = self._posted.popleft()
        assert posted == step_id, f"step {step_id} is computed, but step {posted} was posted before it"
        self._raise_if_broken()
        slot = next(self._inbox)
        stream = self._before_stream
        if slot.free is not None:
            stream.wait(slot.free)
        whole = self._whole(slot.memory, num_tokens)
        part = self._spec.part(num_tokens, self._group.rank)
        if part is None:
            self._launch(stream, partial(self._before.receive, whole))
        else:
            if part.stop > part.start:
                self._launch(stream, partial(self._before.receive, self._whole(self._part, part.stop - part.start)))
            self._launch(stream, partial(self._gather, num_tokens, whole))
        self._compute.wait(stream.record())
        received = self.arrived.first(num_tokens)
        self._launch(self._compute, partial(_copy_out, whole, self._arrived[:, :num_tokens], received.captured))
        slot.free = self._compute.record()
        return received

    def send(self, step_id: int, tensors: IntermediateTensors) -> None:
        assert self._after is not None, "the last stage sends nothing"
        self._raise_if_broken()
        rows = self._spec.part(len(tensors.delta), self._group.rank) or slice(0, len(tensors.delta))
        if rows.stop == rows.start:
            return
        slot = next(self._outbox)
        stream = self._after_stream
        if slot.free is not None:
            self._compute.wait(slot.free)
        whole = self._whole(slot.memory, rows.stop - rows.start)
        self._launch(self._compute, partial(_fill, whole, [tensor[rows] for tensor in tensors.tensors()]))
        stream.wait(self._compute.record())
        self._launch(stream, partial(self._after.send, whole))
        slot.free = stream.record()

    def _whole(self, memory: Tensor, num_tokens: int) -> Tensor:
        """A view of `memory` for all tensors of a step, which are sent as one, [2 + num_captured, num_tokens, hidden_size]."""
        shape = (self._count, num_tokens, self._spec.hidden_size)
        return memory[: self._count * num_tokens * self._spec.hidden_size].view(shape)

    def _gather(self, num_tokens: int, whole: Tensor) -> None:
        """Fill `whole` with the parts that the ranks of the stage have received. Each rank has its own part in `_part`."""
        num_elements = self._count * self._spec.part_size(num_tokens) * self._spec.hidden_size
        gathered = self._group.all_gather(self._part[:num_elements], dim=0)
        for rank, part in enumerate(gathered.chunk(self._group.size)):
            rows = self._spec.part(num_tokens, rank)
            assert rows is not None
            whole[:, rows] = self._whole(part, rows.stop - rows.start)

    def _launch(self, stream: Stream, work: Callable[[], object]) -> None:
        def launch() -> None:
            try:
                work()
            except Exception as error:
                self._error = self._error or error
                raise

        stream.enqueue(launch)


def _fill(whole: Tensor, tensors: Sequence[Tensor]) -> None:
    whole[0], whole[1] = tensors[0], tensors[1]
    for captured in tensors[2:]:
        whole[2:].copy_(_layers(captured, whole))


def _copy_out(whole: Tensor, pair: Tensor, captured: Tensor | None) -> None:
    pair.copy_(whole[:2])
    if captured is not None:
        _layers(captured, whole).copy_(whole[2:])


def _layers(captured: Tensor, whole: Tensor) -> Tensor:
    """[num_tokens, num_captured * hidden_size] -> a view of it, [num_captured, num_tokens, hidden_size]."""
    return captured.view(len(captured), -1, whole.shape[2]).transpose(0, 1)
