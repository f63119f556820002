"""The link between stages on GPUs, over streams that run in any order which events allow: what is sent arrives, and only that.

Each of the four waits that keep a slot together is left out once, and the same schedules must find it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.distributed.activation_link import LinkSpec
from inflight.distributed.device_stage_link import DeviceStageLink
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from tests.unit.distributed.fake_streams import (
    FakeAccelerator,
    FakeBarrier,
    FakeDeviceChannel,
    FakeGroup,
    FakeStream,
    run,
)

HIDDEN_SIZE, MAX_TOKENS, SPLIT_BYTES = 3, 11, 40  # four tokens and more travel split


def activations(step_id: int, num_tokens: int) -> IntermediateTensors:
    """Every element says of which step, token, column and tensor it is."""
    elements = torch.arange(num_tokens * HIDDEN_SIZE, dtype=torch.float32).view(num_tokens, HIDDEN_SIZE)
    captured = torch.cat([step_id * 1000 + elements + 0.25, -step_id * 1000 - elements - 0.25], dim=1)
    return IntermediateTensors(step_id * 1000 + elements, -step_id * 1000 - elements, captured)


def link_spec(tp_size: int) -> LinkSpec:
    return LinkSpec(
        hidden_size=HIDDEN_SIZE,
        dtype=torch.float32,
        max_num_tokens=MAX_TOKENS,
        tensor_parallel_size=tp_size,
        split_bytes=SPLIT_BYTES,
        num_captured=2,
    )


@dataclass
class Rank:
    """One rank of one stage. Its output lies where that of the step before lay, as a graph's does."""

    stage: int
    is_last: bool
    device: FakeAccelerator
    link: DeviceStageLink
    host: FakeStream
    output: IntermediateTensors
    num_ended: int = 0

    def plan(self, step_id: int, num_tokens: int) -> None:
        if self.stage:
            self.link.post_receive(step_id, num_tokens)
        self.host.enqueue(partial(self._launch, step_id, num_tokens))

    def _launch(self, step_id: int, num_tokens: int) -> None:
        if self.stage:
            tensors = self.link.receive(step_id)
        else:
            tensors = self.output.first(num_tokens)
        self.device.compute.enqueue(partial(self._forward, step_id, tensors))
        if not self.is_last:
            self.link.send(step_id, tensors)

    def _forward(self, step_id: int, tensors: IntermediateTensors) -> None:
        wanted = activations(step_id, len(tensors.delta))
        if self.stage:
            assert torch.equal(tensors.delta, wanted.delta), (self.stage, step_id)
            assert torch.equal(tensors.residual, wanted.residual + self.stage - 1), (self.stage, step_id)
            assert torch.equal(tensors.tensors()[2], wanted.tensors()[2]), (self.stage, step_id)
            tensors.residual.add_(1)  # in place, as a norm does
        else:
            for tensor, values in zip(tensors.tensors(), wanted.tensors(), strict=True):
                tensor.copy_(values)
        self.num_ended += 1


def make_ranks(num_stages: int, tp_size: int, num_slots: int, *, one_queue: bool = False) -> list[Rank]:
    """In rank order: stage by stage."""
    channels = [[FakeDeviceChannel() for _ in range(tp_size)] for _ in range(num_stages - 1)]
    ranks = []
    for stage in range(num_stages):
        barrier = FakeBarrier(tp_size)
        for tp_rank in range(tp_size):
            device = FakeAccelerator(one_queue)
            link = DeviceStageLink(
                link_spec(tp_size),
                device,
                FakeGroup(tp_size, tp_rank, barrier),
                before=channels[stage - 1][tp_rank] if stage else None,
                after=channels[stage][tp_rank] if stage < num_stages - 1 else None,
                num_slots=num_slots,
            )
            output = activations(0, MAX_TOKENS)
            ranks.append(Rank(stage, stage == num_stages - 1, device, link, FakeStream(), output))
    return ranks


def run_steps(ranks: list[Rank], num_tokens: list[int], seed: int) -> None:
    for step_id, count in enumerate(num_tokens):
        for rank in ranks:
            rank.plan(step_id, count)
    run([stream for rank in ranks for stream in [rank.host, *rank.device.streams]], seed)
    assert [rank.num_ended for rank in ranks] == [len(num_tokens)] * len(ranks)


@given(
    num_stages=st.integers(2, 4),
    tp_size=st.integers(1, 3),
    num_slots=st.integers(1, 3),
    one_queue=st.booleans(),
    num_tokens=st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_what_is_sent_arrives(
    num_stages: int, tp_size: int, num_slots: int, one_queue: bool, num_tokens: list[int], seed: int
) -> None:
    """Without a deadlock, even where a transfer that waits holds up the whole device."""
    run_steps(make_ranks(num_stages, tp_size, num_slots, one_queue=one_queue), num_tokens, seed)


# stage, which of its streams: compute, the one of the link
WAITS = {
    "a step is computed before it has arrived": (1, 0),
    "a slot is filled again before it has been copied out": (1, 1),
    "a slot is filled again before it has been sent": (0, 0),
    "a slot is sent before it has been filled": (0, 1),
}


@pytest.mark.parametrize("mistake", WAITS)
@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_wait_that_is_left_out_is_found(mistake: str, num_slots: int) -> None:
    stage, stream = WAITS[mistake]
    num_found = 0
    for seed in range(40):
        ranks = make_ranks(2, 1, num_slots)
        ranks[stage].device.streams[stream].deaf = True
        rng = random.Random(seed)
        try:
            run_steps(ranks, [rng.randint(1, MAX_TOKENS) for _ in range(8)], seed)
        except AssertionError:
            num_found += 1
    assert num_found > 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, MAX_TOKENS])
@pytest.mark.parametrize("tp_size", [2, 3, 5])
def test_large_states_travel_split(tp_size: int, num_tokens: int) -> None:
    ranks = make_ranks(2, tp_size, 2)
    run_steps(ranks, [num_tokens], seed=0)
    channels = [rank.link._before for rank in ranks[tp_size:]]
    travelled = sum(channel.num_elements for channel in channels if isinstance(channel, FakeDeviceChannel))
    is_split = num_tokens * HIDDEN_SIZE * 4 >= SPLIT_BYTES
    assert travelled == 4 * num_tokens * HIDDEN_SIZE * (1 if is_split else tp_size)


def test_steps_lie_at_one_address() -> None:
    first, last = make_ranks(2, 1, 2)
    assert first.link.arrived is None and last.link.arrived is not None
    for step_id, num_tokens in enumerate([3, 7, 5]):
        last.link.post_receive(step_id, num_tokens)
        received = last.link.receive(step_id)
        assert received.delta.data_ptr() == last.link.arrived.delta.data_ptr()
        assert received.residual.data_ptr() == last.link.arrived.residual.data_ptr()
        assert received.delta.shape == received.residual.shape == (num_tokens, HIDDEN_SIZE)
        assert received.delta.is_contiguous() and received.residual.is_contiguous()


def test_an_error_is_raised_by_every_call_after_it() -> None:
    ranks = make_ranks(3, 1, 2)
    middle = ranks[1]
    middle.link.post_receive(0, 2)
    middle.link.post_receive(1, 2)
    tensors = middle.link.receive(0)
    middle.link.close()
    middle.link.close()
    with pytest.raises(ConnectionError, match="this rank has stopped its communication"):
        run(middle.device.streams, seed=0)
    for call in (lambda: middle.link.receive(1), lambda: middle.link.send(0, tensors)):
        with pytest.raises(ConnectionError, match="this rank has stopped"):
            call()


def test_steps_are_received_in_the_order_in_which_they_were_posted() -> None:
    device = FakeAccelerator()
    link = DeviceStageLink(link_spec(1), device, TensorParallelGroup(), before=FakeDeviceChannel(), after=None)
    link.post_receive(3, 1)
    with pytest.raises(AssertionError, match=r"step 4 .*step 3"):
        link.receive(4)
