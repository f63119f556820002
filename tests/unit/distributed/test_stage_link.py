"""The link between stages: order, overlap, split and gather, and what happens when a stage is gone.

The schedules: every stage prepares, computes and sends at random moments, over channels with random delays, and the first stage
takes the last one's tokens before it may begin a later step, as decoding does. 200 in `make test`, 10,000 in `make test-full`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

import pytest
import torch

from benchmarks.overlap.delayed_channel import DelayedChannel
from inflight.config.ranks import RankLayout
from inflight.distributed.activation_link import LinkSpec
from inflight.distributed.channel import Channel
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.stage_link import StageLink
from inflight.distributed.thread_world import ThreadWorlds
from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.timeline import Timeline

NUM_SCHEDULES = 10_000 if os.environ.get("INFLIGHT_TEST_FULL") == "1" else 200
HIDDEN_SIZE, MAX_TOKENS = 6, 40
TEMPLATE = IntermediateTensors.template(HIDDEN_SIZE, torch.float32, torch.device("cpu"), num_captured=2)


def spec(tp_size: int = 1, **fields: int) -> LinkSpec:
    return LinkSpec(
        **{  # type: ignore[arg-type]
            "hidden_size": HIDDEN_SIZE,
            "dtype": torch.float32,
            "max_num_tokens": MAX_TOKENS,
            "tensor_parallel_size": tp_size,
            "split_bytes": 200,
            **fields,
        }
    )


def activations(step_id: int, num_tokens: int) -> IntermediateTensors:
    """Every element says of which step, token, column and tensor it is."""
    elements = torch.arange(num_tokens * HIDDEN_SIZE, dtype=torch.float32).view(num_tokens, HIDDEN_SIZE)
    captured = torch.cat([step_id * 1000 + elements + 0.25, -step_id * 1000 - elements - 0.25], dim=1)
    return IntermediateTensors(step_id * 1000 + elements, -step_id * 1000 - elements, captured)


def test_padded_tensors_begin_with_the_tokens() -> None:
    tensors = activations(3, 2)
    assert tensors.padded(2) is tensors
    padded = tensors.padded(5)
    assert padded.delta.shape == padded.residual.shape == (5, tensors.delta.shape[1])
    for one, other in zip(padded.first(2).tensors(), tensors.tensors(), strict=True):
        assert torch.equal(one, other)


def no_delay(channel: Channel) -> Channel:
    return channel


def make_links(worlds: ThreadWorlds, link_spec: LinkSpec, wrap=no_delay) -> list[StageLink]:  # type: ignore[no-untyped-def]
    """One per rank, in rank order; made at once, because they shake hands."""
    layout = worlds.layout

    def make(rank: int) -> StageLink:
        world = worlds.of(rank)
        tp_rank, pp_rank = world.tp_rank, world.pp_rank
        is_last = pp_rank == layout.pipeline_parallel_size - 1
        return StageLink(
            link_spec,
            TEMPLATE,
            world.tensor_parallel_group("link"),
            Timeline(),
            before=wrap(world.channel(layout.rank(tp_rank, pp_rank - 1), "activations")) if pp_rank else None,
            after=None if is_last else wrap(world.channel(layout.rank(tp_rank, pp_rank + 1), "activations")),
        )

    with ThreadPoolExecutor(layout.world_size) as pool:
        return list(pool.map(make, range(layout.world_size)))


@dataclass
class Schedule:
    """What one random schedule does."""

    layout: RankLayout
    num_tokens: list[int]  # of each step
    lag: int  # step k needs the tokens of step k - lag
    depth: int  # steps that may be prepared and not ended
    seed: int

    @staticmethod
    def draw(seed: int) -> Schedule:
        rng = random.Random(seed)
        stages = rng.choice([2, 2, 3, 4])
        lag = rng.randint(1, 5)
        return Schedule(
            layout=RankLayout(rng.choice([1, 1, 2]), stages),
            num_tokens=[rng.choice([1, 2, 5, 9, MAX_TOKENS]) for _ in range(rng.randint(1, 8))],
            lag=lag,
            depth=lag + rng.randint(0, 2),
            seed=seed,
        )

    def delays(self, salt: int) -> Iterator[float]:
        rng = random.Random(self.seed * 1000 + salt)
        while True:
            yield rng.choice([0, 0, 0, 0.0005]) * rng.random()


class Rank(threading.Thread):
    """One rank's two threads in one stage: `run` prepares, a pool of one computes."""

    def __init__(self, schedule: Schedule, worlds: ThreadWorlds, rank: int, link: StageLink, salt: int) -> None:
        super().__init__()
        world, layout = worlds.of(rank), schedule.layout
        self.schedule, self.link, self.world = schedule, link, world
        self.is_first, self.is_last = world.pp_rank == 0, world.pp_rank == layout.pipeline_parallel_size - 1
        first, last = layout.rank(world.tp_rank, 0), layout.rank(world.tp_rank, layout.pipeline_parallel_size - 1)
        delays = schedule.delays(salt)
        self.receiver = (
            TokenReceiver(DelayedChannel(world.channel(last, "tokens"), delays, delays)) if self.is_first else None
        )
        self.sender = (
            TokenSender(DelayedChannel(world.channel(first, "tokens"), delays, delays)) if self.is_last else None
        )
        self.pauses, self.compute_times = schedule.delays(salt + 100), schedule.delays(salt + 200)
        self.tokens: list[Future[torch.Tensor] | None] = []
        self.ended: list[int] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with ThreadPoolExecutor(1) as compute:
                running: list[Future[None]] = []
                for step_id, num_tokens in enumerate(self.schedule.num_tokens):
                    if step_id >= self.schedule.depth:
                        running[step_id - self.schedule.depth].result()
                    time.sleep(next(self.pauses))
                    self.tokens.append(None if self.receiver is None else self.receiver.post(num_tokens))
                    if not self.is_first:
                        self.link.post_receive(step_id, num_tokens)
                    running.append(compute.submit(self.compute, step_id, num_tokens))
                for future in running:
                    future.result()
        except BaseException as error:
            self.error = error

    def compute(self, step_id: int, num_tokens: int) -> None:
        try:
            with torch.inference_mode():
                self.compute_step(step_id, num_tokens)
        except BaseException as error:
            self.world.close(repr(error))
            raise

    def compute_step(self, step_id: int, num_tokens: int) -> None:
        needed = step_id - self.schedule.lag
        if self.is_first:
            if needed >= 0:
                future = self.tokens[needed]
                assert future is not None
                assert future.result()[:, 0].tolist() == [
                    needed * 100 + i for i in range(self.schedule.num_tokens[needed])
                ]
            tensors = activations(step_id, num_tokens)
        else:
            tensors = self.link.receive(step_id)
            wanted = activations(step_id, num_tokens)
            offset = self.world.pp_rank - 1  # every stage before has added one
            assert torch.equal(tensors.delta, wanted.delta)
            assert torch.equal(tensors.residual, wanted.residual + offset)
        time.sleep(next(self.compute_times))
        if self.is_last:
            assert self.sender is not None
            self.sender.send(torch.arange(num_tokens, dtype=torch.int32)[:, None] + step_id * 100)
        else:
            tensors.residual.add_(0 if self.is_first else 1)  # in place, as a norm does
            self.link.send(step_id, tensors)
        self.ended.append(step_id)

    def close(self) -> None:
        for part in (self.link, self.sender, self.receiver):
            if part is not None:
                part.close()


def run_schedule(seed: int) -> None:
    schedule = Schedule.draw(seed)
    worlds = ThreadWorlds(schedule.layout, timeout_seconds=300)
    salts = iter(range(1000))

    def wrap(channel: Channel) -> Channel:
        delays = schedule.delays(next(salts))
        return DelayedChannel(channel, delays, delays)

    links = make_links(worlds, spec(schedule.layout.tensor_parallel_size), wrap)
    ranks = [Rank(schedule, worlds, rank, link, 200 + rank) for rank, link in enumerate(links)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    stuck = [rank.world.rank for rank in ranks if rank.is_alive()]
    errors = [rank.error for rank in ranks if rank.error is not None]
    worlds.close("the test is over")
    for rank in ranks:
        rank.close()
    assert not stuck, f"deadlock of ranks {stuck} in {schedule}"
    if errors:
        raise errors[0]
    steps = list(range(len(schedule.num_tokens)))
    assert all(rank.ended == steps for rank in ranks), schedule


def test_random_schedules_end_and_keep_their_order() -> None:
    for seed in range(NUM_SCHEDULES):
        run_schedule(seed)


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 17, MAX_TOKENS])
@pytest.mark.parametrize("tp_size", [2, 3])
def test_large_states_travel_split_and_arrive_whole(tp_size: int, num_tokens: int) -> None:
    worlds = ThreadWorlds(RankLayout(tp_size, 2), timeout_seconds=300)
    counted: list[int] = []

    class Counting(DelayedChannel):
        def send(self, tensor: torch.Tensor) -> None:
            counted.append(tensor.numel())
            super().send(tensor)

    links = make_links(worlds, spec(tp_size), lambda channel: Counting(channel, repeat(0.0), repeat(0.0)))
    counted.clear()  # the handshake
    for link in links[tp_size:]:
        link.post_receive(7, num_tokens)
    for link in links[:tp_size]:
        link.send(7, activations(7, num_tokens))
    with ThreadPoolExecutor(tp_size) as pool:
        received = list(pool.map(lambda link: link.receive(7), links[tp_size:]))
    for tensors in received:
        for one, other in zip(tensors.tensors(), activations(7, num_tokens).tensors(), strict=True):
            assert torch.equal(one, other)
    is_split = num_tokens * HIDDEN_SIZE * 4 >= 200
    assert sum(counted) == 4 * num_tokens * HIDDEN_SIZE * (1 if is_split else tp_size)
    worlds.close("the test is over")
    for link in links:
        link.close()


def two_stages(timeout_seconds: float = 20.0, *, seconds: float = 0.0) -> tuple[ThreadWorlds, StageLink, StageLink]:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds)
    first, last = make_links(worlds, spec(), lambda channel: DelayedChannel(channel, repeat(seconds), repeat(seconds)))
    return worlds, first, last


def close(worlds: ThreadWorlds, *links: StageLink) -> None:
    worlds.close("the test is over")
    for link in links:
        link.close()


def test_a_send_returns_at_once_and_travels_beside_the_next_step() -> None:
    worlds, first, last = two_stages(seconds=0.5)  # four waits of each step: 2 s

    def overlaps(first_id: int) -> bool:
        step_ids = range(first_id, first_id + 3)
        for step_id in step_ids:
            last.post_receive(step_id, 4)
        start = time.monotonic()
        for step_id in step_ids:
            first.send(step_id, activations(step_id, 4))
        sent = time.monotonic() - start
        for step_id in step_ids:
            assert torch.equal(last.receive(step_id).delta, activations(step_id, 4).delta)
        return sent < 1.5 and time.monotonic() - start < 3 * 2.0  # both directions work at the same time

    assert any(overlaps(first_id) for first_id in range(0, 30, 3))  # other programs may use the machine
    close(worlds, first, last)


def test_received_tensors_are_the_receivers_own() -> None:
    """The next layers change them in place, and a middle stage sends them on, while later steps arrive."""
    worlds, first, last = two_stages()
    for step_id in range(6):
        last.post_receive(step_id, 3)
        first.send(step_id, activations(step_id, 3))
    received = [last.receive(step_id) for step_id in range(6)]
    with torch.inference_mode():
        for tensors in received:
            tensors.residual.zero_()
    assert [float(tensors.delta[0, 0]) for tensors in received] == [1000.0 * step_id for step_id in range(6)]
    close(worlds, first, last)


def test_the_two_ends_must_agree() -> None:
    worlds = ThreadWorlds(RankLayout(1, 2), timeout_seconds=300)

    def make(rank: int) -> StageLink:
        channel = worlds.of(rank).channel(1 - rank, "activations")
        ends = {"before": None, "after": channel} if rank == 0 else {"before": channel, "after": None}
        group = worlds.of(rank).tensor_parallel_group("link")
        return StageLink(spec(hidden_size=6 + rank), TEMPLATE, group, Timeline(), **ends)

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.submit(make, 0), pool.submit(make, 1)
        with pytest.raises(ConnectionError, match=r"\[6, .*\], but this stage expects \[7, "):
            last.result()
    close(worlds, first.result())


def test_a_silent_stage_is_an_error_within_the_time_limit() -> None:
    worlds, first, last = two_stages(timeout_seconds=0.1)
    last.post_receive(0, 1)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"nothing for 0\.1 s"):
        last.receive(0)
    assert time.monotonic() - start < 60
    last.post_receive(1, 1)
    with pytest.raises(ConnectionError, match="the link between the stages is broken"):  # the order is lost for good
        last.receive(1)
    close(worlds, first, last)


def test_a_stage_that_leaves_frees_the_one_that_waits() -> None:
    worlds, first, last = two_stages()
    last.post_receive(0, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(last.receive, 0)
        time.sleep(0.02)
        worlds.of(0).close("a step failed on it")
        with pytest.raises(ConnectionError, match="rank 0 has left: a step failed on it"):
            waiting.result(timeout=300)
    first.send(0, activations(0, 1))  # it fails in its thread
    first.close()
    with pytest.raises(ConnectionError):
        first.send(1, activations(1, 1))
    close(worlds, last)


def test_a_send_that_has_failed_is_told_by_the_next_receive() -> None:
    """The next stage has missed a step: nothing that a middle stage still receives may be computed."""
    worlds = ThreadWorlds(RankLayout(1, 3), timeout_seconds=300)
    first, middle, last = make_links(worlds, spec())
    middle.post_receive(1, 1)
    first.send(1, activations(1, 1))
    middle._posted[0][1].result(timeout=300)  # it has come, and was in order
    last.close()
    middle.send(0, activations(0, 1))
    assert middle._sender is not None
    middle._sender.submit(lambda: None).result(timeout=300)  # behind the send, which has failed in this thread
    with pytest.raises(ConnectionError, match="the link between the stages is broken"):
        middle.receive(1)
    close(worlds, first, middle, last)


def test_steps_are_received_in_the_order_in_which_they_were_posted() -> None:
    worlds, first, last = two_stages()
    last.post_receive(3, 1)
    with pytest.raises(AssertionError, match=r"step 4 .*step 3"):
        last.receive(4)
    close(worlds, first, last)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inflight-")]
