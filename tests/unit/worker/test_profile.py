"""`profile` through collective_rpc: a trace per rank, with the steps in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import InvalidRequestError, StepError
from inflight.worker.profiling import RankProfiler
from tests.support.model_zoo import FAMILY_CONFIGS, write_model


@pytest.mark.parametrize("size", [1, 2])
def test_a_trace_shows_the_steps(tmp_path: Path, size: int) -> None:
    folder = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "model", seed=1)
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=1 << 20,
        generation_config="none",
        num_threads=1,
        pipeline_parallel_size=size,
        pipeline_stagger=size if size > 1 else None,  # measured, it would have run steps before
        distributed_executor_backend="uni",
    )
    call = llm.llm_engine.executor.collective_rpc
    with pytest.raises(StepError, match=r"not running"):
        call("profile", (False,))
    assert call("profile", (True, str(tmp_path / "traces"))) == [None] * size
    with pytest.raises(StepError, match="running already"):
        call("profile", (True, str(tmp_path / "traces")))
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    paths = call("profile", (False,))
    llm.close()
    # ranks that are threads of one process have one trace, the first rank's
    assert paths == [str(tmp_path / "traces" / "tp0-pp0.json")] + [None] * (size - 1)
    events = json.loads(Path(paths[0]).read_text())["traceEvents"]
    steps = [event["name"] for event in events if str(event.get("name")).startswith("step ")]
    assert sorted(steps) == sorted(["step 0", "step 1", "step 2"] * size)
    assert any(str(event.get("name")).startswith(("decoder_layers", "aten::linear")) for event in events)


def test_a_profiler_that_is_closed_writes_no_trace_and_starts_again(tmp_path: Path) -> None:
    profiler = RankProfiler("rank", "cpu")
    profiler.close()
    profiler.start(str(tmp_path / "first"))
    profiler.close()
    profiler.close()
    with pytest.raises(InvalidRequestError, match="not running"):
        profiler.stop()
    assert list((tmp_path / "first").iterdir()) == []
    profiler.start(str(tmp_path / "second"))
    assert profiler.stop() == str(tmp_path / "second" / "rank.json")
    assert "traceEvents" in json.loads((tmp_path / "second" / "rank.json").read_text())
