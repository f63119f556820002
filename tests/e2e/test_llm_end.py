"""An `LLM` ends with its last reference, and a forked process is refused: with ranks that are threads, and with processes."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial
from itertools import product
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import EngineClosedError, EngineDeadError
from tests.support.processes import children, have_ended
from tests.unit.entrypoints.mock_llm import TimedExecutor, TimedProcesses, mock_arguments

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
BACKENDS = [TimedExecutor, TimedProcesses]


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("inflight-")}


def llm_of(backend: type[Any], **more: Any) -> LLM:
    name = f"{backend.__module__}:{backend.__qualname__}"
    return LLM(**{**mock_arguments(skip_tokenizer_init=True, **more), "distributed_executor_backend": name})


@pytest.mark.parametrize(
    ("backend", "end"), [*product([TimedExecutor], ["del", "cycle", "another"]), (TimedProcesses, "cycle")]
)
def test_an_engine_ends_with_its_last_reference(backend: type[Any], end: str) -> None:
    threads, processes = own_threads(), children(os.getpid())
    llm: Any = llm_of(backend)
    assert len(llm.generate([[5, 6]], FIVE, use_tqdm=False)) == 1
    new = set(children(os.getpid())) - set(processes)
    assert own_threads() > threads and bool(new) == (backend is TimedProcesses)
    if end == "cycle":
        llm.itself = llm
    llm = llm_of(backend) if end == "another" else None
    gc.collect()
    assert have_ended(new)
    if llm is not None:
        assert len(llm.generate([[5, 6]], FIVE, use_tqdm=False)) == 1
        llm.close()
    assert own_threads() == threads and children(os.getpid()) == processes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_process_is_refused_and_the_parent_goes_on(backend: type[Any]) -> None:
    with llm_of(backend) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate([[5, 6], [7]], FIVE, use_tqdm=False)]
        for hold in (False, True):  # a thread of the parent may be in the middle of a call
            with llm._turn if hold else threading.Lock():
                child = os.fork()
            if child == 0:
                try:
                    for call in (partial(llm.generate, [[5, 6]], FIVE, use_tqdm=False), llm.timeline_events):
                        with pytest.raises(EngineClosedError):
                            call()
                    with pytest.raises(EngineDeadError):
                        llm.collective_rpc("timeline_events")
                    llm.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            outputs = llm.generate([[5, 6], [7]], FIVE, use_tqdm=False)
            assert [each.outputs[0].token_ids for each in outputs] == expected
