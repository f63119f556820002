"""`StageLink`: moves activations from one pipeline stage to the next through the host. Only `receive` waits.

    stage p    compute thread   | forward N |          | forward N+1 |          | forward N+2 | ...
               send thread                  | send N ............... | send N+1 ............... |
    stage p+1  receive thread   (posted)    | receive N, gather .... | receive N+1, gather .... |
               compute thread                                        | forward N |           | forward N+1 |

A step's receive is posted when the step is prepared, long before the tensors arrive. The number of tokens is in the step's plan
(the scheduler's output), and the stages agreed on the other sizes at start-up. So only the tensors' bytes are sent. Each
direction has its own channel and thread, which sends or receives the steps in order. Every receive gets new memory, not a slot
of a fixed ring, because the next layers change the residual in place, and a middle stage sends this memory to its next stage.

A step that verifies drafts (guessed tokens) may have fewer tokens than its plan. Its tensors are sent with as many tokens as
the plan has. The ranks of the receiving stage know how many of these tokens are valid.

All ranks of a stage hold the same hidden states. If these are large, each rank sends only a part: rank t of a stage sends the
t-th part of the tokens to rank t of the next stage. The ranks of the next stage then gather the parts in a group that only the
receive thread uses.
"""

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from inflight.device.long_calls import LONG_CALLS
from inflight.distributed.activation_link import ActivationLink, LinkSpec, agree
from inflight.distributed.channel import Channel
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.timeline import Timeline


class StageLink(ActivationLink):
    """Its channels are channels of the host. The caller owns the tensors that `receive` returns.

    Args:
        template: tensors with the hidden size, the dtype and the device of the tensors to be received.

    Raises:
        ConnectionError: the previous stage has another model, or another configuration.
    """

    def __init__(
        self,
        spec: LinkSpec,
        template: IntermediateTensors,
        group: TensorParallelGroup,
        timeline: Timeline,
        *,
        before: Channel | None,
        after: Channel | None,
    ) -> None:
        super().__init__(spec, group, before, after)
        self._template = template
        self._timeline = timeline
        agree(spec, before, after)
        self._receiver = ThreadPoolExecutor(1, "inflight-receive") if before else None
        self._sender = ThreadPoolExecutor(1, "inflight-send") if after else None
        self._posted: deque[tuple[int, Future[IntermediateTensors]]] = deque()
        self._closing = threading.Lock()

    def post_receive(self, step_id: int, num_tokens: int) -> None:
        assert num_tokens <= self._spec.max_num_tokens, (num_tokens, self._spec)
        assert self._receiver is not None, "the first stage receives nothing"
        self._posted.append((step_id, self._receiver.submit(self._receive, step_id, num_tokens)))

    def receive(self, step_id: int) -> IntermediateTensors:
        """Wait until the tensors have arrived, and return them."""
        posted, future = self._posted.popleft()
        assert posted == step_id, f"step {step_id} is computed, but step {posted} was posted before it"
        LONG_CALLS.before()
        with self._timeline.span(step_id, "receive"):
            received = future.result()
        self._raise_if_broken()
        return received

    def send(self, step_id: int, tensors: IntermediateTensors) -> None:
        assert self._sender is not None, "the last stage sends nothing"
        self._raise_if_broken()
        self._sender.submit(self._send, step_id, tensors)

    def close(self) -> None:
        """As in the base class. This also ends the threads."""
        with self._closing:
            super().close()
            for pool in (self._receiver, self._sender):
                if pool is not None:
                    pool.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _receive(self, step_id: int, num_tokens: int) -> IntermediateTensors:
        assert self._before is not None
        try:
            self._raise_if_broken()
            part = self._spec.part(num_tokens, self._group.rank)
            if part is None:
                received = self._template.empty_like(num_tokens)
                for tensor in received.tensors():
                    self._before.receive(tensor)
                return received
            own = self._template.empty_like(self._spec.part_size(num_tokens))  # the last part may have fewer tokens
            count = part.stop - part.start
            for tensor in own.tensors():
                self._before.receive(tensor[:count])
            gathered = (self._group.all_gather(tensor, dim=0)[:num_tokens] for tensor in own.tensors())
            return IntermediateTensors(*gathered)
        except Exception as error:
            self._error = self._error or error
            raise

    @torch.inference_mode()
    def _send(self, step_id: int, tensors: IntermediateTensors) -> None:
        assert self._after is not None
        if self._error is not None:
            return
        try:
            with self._timeline.span(step_id, "send"):
                part = self._spec.part(len(tensors.delta), self._group.rank) or slice(None)
                for tensor in tensors.tensors():
                    self._after.send(tensor[part])
        except Exception as error:
            self._error = error  # the next `send` or `receive` raises it
