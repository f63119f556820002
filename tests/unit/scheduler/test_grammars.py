"""`RequestGrammars`: who is told, and once, that a grammar has been compiled."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import numpy as np
import pytest

from inflight.interface.request import EngineCoreRequest, ResolvedSampling
from inflight.kv_cache.request_blocks import RequestBlocks
from inflight.sampling_params import SamplingParams
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.request import Request
from inflight.structured_output.manager import StructuredOutputManager
from inflight.structured_output.pace import GrammarPace
from inflight.structured_outputs_params import StructuredOutputsParams


class Manager:
    """A future for each regular expression. Those that fail say so."""

    def __init__(self) -> None:
        self.pace = GrammarPace()
        self.futures: dict[str, Future[str]] = {}
        self.of_request: dict[str, Future[str]] = {}

    def submit(self, request_id: str, params: StructuredOutputsParams, **_: object) -> Future[str]:
        future = self.futures.setdefault(params.regex or "", Future())
        self.of_request[request_id] = future
        return future

    def failure(self, request_id: str) -> str:
        return self.of_request[request_id].result(0)

    def drop(self, request_id: str) -> None:
        del self.of_request[request_id]


def request(request_id: str, regex: str) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))
    sampling = ResolvedSampling(params=params, seed=0, max_tokens=9)
    core = EngineCoreRequest(request_id=request_id, sampling=sampling)
    return Request(core, np.ones(3, np.int32), order=0, blocks=RequestBlocks(([],), b""), max_model_len=64)


def make() -> tuple[RequestGrammars, Manager]:
    manager = Manager()
    return RequestGrammars(cast(StructuredOutputManager, manager)), manager


def test_requests_that_share_a_grammar_go_on_together() -> None:
    grammars, manager = make()
    for request_id, regex in (("a", "x"), ("b", "y"), ("c", "x")):
        grammars.add(request(request_id, regex))
    assert (grammars.take_compiled(), len(grammars.compiling)) == ([], 3)
    manager.futures["x"].set_result("")
    assert (grammars.take_compiled(), len(grammars.compiling)) == ([("a", ""), ("c", "")], 1)
    grammars.add(request("d", "x"))  # it has been compiled before
    manager.futures["y"].set_result("no such grammar")
    assert sorted(grammars.take_compiled()) == [("b", "no such grammar"), ("d", "")]
    assert (grammars.take_compiled(), len(grammars.compiling)) == ([], 0)


def test_a_dropped_request_is_not_told_and_its_id_may_come_again() -> None:
    grammars, manager = make()
    first = request("a", "x")
    grammars.add(first)
    grammars.drop(first)
    grammars.add(request("a", "y"))
    manager.futures["x"].set_result("")
    assert (grammars.take_compiled(), len(grammars.compiling)) == ([], 1)
    manager.futures["y"].set_result("")
    assert grammars.take_compiled() == [("a", "")]


def test_waiting_for_the_next_grammar_does_not_take_it_away() -> None:
    grammars, manager = make()
    grammars.add(request("a", "x"))
    start = time.monotonic()
    grammars.wait(0.02, for_all=False)
    grammars.wait(0.02, for_all=True)
    assert 0.04 <= time.monotonic() - start < 60  # as long as it was told
    manager.futures["x"].set_result("")
    grammars.wait(300, for_all=False)
    grammars.wait(300, for_all=True)
    assert time.monotonic() - start < 60  # and no longer than it takes
    assert grammars.take_compiled() == [("a", "")]


@pytest.mark.parametrize("for_all", [False, True])
def test_what_was_waited_for_can_be_taken(for_all: bool) -> None:
    """A future is done before its callbacks run. If only the future is waited for, a plan may lack the request, and the ranks
    of an external launcher make different plans."""
    grammars, manager = make()
    for regex in ("x", "y"):
        manager.submit(regex, StructuredOutputsParams(regex=regex)).add_done_callback(lambda _: time.sleep(0.3))
    for request_id, regex in (("a", "x"), ("b", "y"), ("c", "x")):
        grammars.add(request(request_id, regex))
    with ThreadPoolExecutor() as pool:
        for regex in ("x", "y"):
            pool.submit(manager.futures[regex].set_result, "")
        grammars.wait(300, for_all=for_all)
        taken = {request_id for request_id, _ in grammars.take_compiled()}
    assert taken == {"a", "b", "c"} if for_all else taken
