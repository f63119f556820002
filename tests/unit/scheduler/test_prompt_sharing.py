"""`PromptSharing`: whose blocks a request may use, and how many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.interface.parts import RequestPart
from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.manager import NO_BLOCKS
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.request import Request, RequestStatus

BLOCK_SIZE = 4


class Bench:
    """A follower and its leader, with a cache that only notes what it is asked for."""

    def __init__(
        self,
        num_prompt_tokens: int = 9,
        *,
        status: RequestStatus = RequestStatus.RUNNING,
        shares: bool = True,
        **core: Any,
    ) -> None:
        self.asked: list[Any] = []
        cache: Any = SimpleNamespace(block_size=BLOCK_SIZE, share_prompt=self.share, get_computed_blocks=self.find)
        cache.num_tokens_of = lambda computed: len(computed[0]) * BLOCK_SIZE if computed else 0
        self.shares = shares
        self.requests: dict[str, Request] = {}
        self.sharing = PromptSharing(self.requests, cache)
        self.leader = self.request("leader", num_prompt_tokens)
        self.leader.status = status
        self.follower = self.request("follower", num_prompt_tokens, prompt_leader="leader", **core)

    def request(self, name: str, num_prompt_tokens: int, **core: Any) -> Request:
        sampling = ResolvedSampling(params=SamplingParams(), seed=0, max_tokens=9)
        given = EngineCoreRequest(request_id=name, sampling=sampling, **core)
        prompt = np.arange(num_prompt_tokens, dtype=np.int32)
        blocks = RequestBlocks(([],), name.encode())
        self.requests[name] = Request(given, prompt, order=len(self.requests), blocks=blocks, max_model_len=64)
        return self.requests[name]

    def share(self, blocks: RequestBlocks, of_leader: RequestBlocks, count: int) -> tuple[list[int], ...]:
        assert (blocks, of_leader) == (self.follower.blocks, self.leader.blocks)
        self.asked.append(("share", count))
        return ([7] * count,) if self.shares else NO_BLOCKS

    def find(self, blocks: RequestBlocks, tokens: Any) -> tuple[list[int], ...]:
        self.asked.append(("find", len(tokens)))
        return ([8] * 2,)


class Silent(RequestPart):
    """It asks for no token."""

    kind = "silent"


def parts(*num_done: int) -> tuple[RequestPart, ...]:
    return tuple(PromptLogprobsPart(num_logprobs=0, num_done=each) for each in num_done)


@pytest.mark.parametrize(
    ("given", "emitted", "last"),
    [
        ((), (), 8),
        ((), (5, 6), 10),
        (parts(0), (), -1),
        (parts(3), (), 2),
        (parts(9), (5, 6), 8),
        (parts(9, 4), (5, 6), 3),
        ((Silent(), *parts(4), Silent()), (), 3),
        ((Silent(),), (), 8),
    ],
)
def test_the_first_token_that_a_request_computes_itself(
    given: tuple[RequestPart, ...], emitted: tuple[int, ...], last: int
) -> None:
    """The last one, or the first one that a part of the request asks for."""
    bench = Bench(parts=given, emitted_token_ids=emitted, shares=False)
    assert bench.sharing.last_reusable(bench.follower) == last
    bench.sharing.computed_blocks(bench.follower)
    assert bench.asked[-1] == ("find", last + 1)


@pytest.mark.parametrize(
    ("num_tokens", "computed", "waits"), [(9, 0, True), (9, 7, True), (9, 8, False), (5, 0, True), (4, 0, False)]
)
def test_a_follower_waits_until_its_leader_s_prompt_is_planned(num_tokens: int, computed: int, waits: bool) -> None:
    """Unless the prompt fits one block."""
    bench = Bench(num_tokens)
    bench.leader.num_computed_tokens = computed
    assert (bench.sharing.leader_to_wait_for(bench.follower) is bench.leader) == waits
    assert bench.sharing.leader_to_wait_for(bench.leader) is None


def test_only_a_follower_that_has_never_run_has_a_leader_that_has_not_ended() -> None:
    bench = Bench()
    assert bench.sharing.leader(bench.follower) is bench.leader
    assert bench.sharing.leader(bench.leader) is None
    bench.follower.status = RequestStatus.PREEMPTED
    assert bench.sharing.leader(bench.follower) is None
    bench.follower.status = RequestStatus.WAITING
    del bench.requests["leader"]
    assert bench.sharing.leader(bench.follower) is None
    assert bench.sharing.leader_to_wait_for(bench.follower) is None


@pytest.mark.parametrize(
    ("fields", "blocks", "asked"),
    [
        ({}, [7, 7], [("share", 2)]),
        ({"num_prompt_tokens": 8}, [7], [("share", 1)]),  # the last token is its own
        ({"num_prompt_tokens": 8, "emitted_token_ids": (1, 2)}, [7], [("share", 1)]),
        ({"parts": parts(6)}, [7], [("share", 1)]),
        ({"status": RequestStatus.PREEMPTED}, [8, 8], [("find", 9)]),
        ({"shares": False}, [8, 8], [("share", 2), ("find", 9)]),
    ],
)
def test_blocks_are_those_of_a_running_leader_or_in_the_cache(fields: Any, blocks: list[int], asked: Any) -> None:
    bench = Bench(**fields)
    assert bench.sharing.computed_blocks(bench.follower) == (blocks,)
    assert bench.asked == asked


@pytest.mark.parametrize(("limit", "is_long"), [(0, True), (2, False), (8, False), (9, False)])
def test_tokens_in_cached_blocks_do_not_make_a_request_long(limit: int, is_long: bool) -> None:
    """Nine tokens, eight of them in blocks. The blocks of a short one are not looked up."""
    bench, limits = Bench(), SimpleNamespace(is_long=lambda num_tokens: num_tokens > limit)
    assert bench.sharing.is_long(bench.leader, limits) == is_long  # type: ignore[arg-type]
    assert bench.asked == ([("find", 9)] if limit < 9 else [])
