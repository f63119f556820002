"""A link between two ranks breaks while both reach the engine: the tokens are the same, and the fewest ranks are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.executor import broken_links

PROMPTS = [[3, 4, 5], [6] * 20]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(("num_epochs", "replaced"), [(2, []), (10**6, [1])], ids=["comes back", "stays broken"])
def test_a_rank_is_replaced_only_if_its_link_stays_broken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_epochs: int, replaced: list[int]
) -> None:
    # on a busy machine the ranks need long to meet again
    monkeypatch.setattr(broken_links, "LINK_SECONDS", 2.0 if replaced else 300.0)
    with LLM(
        dtype="float32",
        max_model_len=64,
        num_threads=1,
        kv_cache_memory_bytes=1 << 22,
        pipeline_parallel_size=2,
        distributed_executor_backend="tests.e2e.deaf_worker:DeafExecutor",
    ) as llm:
        executor: Any = llm.llm_engine.executor  # Any: its processes are private
        before = [rank.process.pid for rank in executor._ranks]
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        llm.collective_rpc("cut", (1, num_epochs))
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == expected
        after = [rank.process.pid for rank in executor._ranks]
        assert [rank for rank in range(2) if after[rank] != before[rank]] == replaced
        status = llm.llm_engine.core.fault_status()
        assert (status.state, status.num_recoveries) == ("healthy", {"link_broken": 1})
        assert status.epoch >= 3  # the ranks tried more than once
    assert ("(0 cannot reach 1): replacing ranks 1" in caplog.text) == bool(replaced)
