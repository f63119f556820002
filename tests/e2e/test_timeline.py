"""Timelines of real engines: the API, one clock for engine and ranks, and where an engine without requests is not idle time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight import LLM, SamplingParams
from inflight.errors import EngineClosedError
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("timeline") / "model", seed=0)


def open_llm(folder: Path, *, depth: int = 1, num_stages: int = 1) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 22,
        generation_config="none",
        pipeline_parallel_size=num_stages,
        distributed_executor_backend="uni",
        async_scheduling=None if num_stages > 1 else depth == 2,
    )


@pytest.fixture(scope="module", params=[1, 2])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(folder, depth=request.param) as llm:
        yield llm


def generate(llm: LLM) -> None:
    llm.generate([[5, 9, 14], [7, 8]], PARAMS, use_tqdm=False)


def test_every_step_is_on_every_timeline(llm: LLM) -> None:
    generate(llm)
    events = llm.timeline_events()
    assert list(events) == ["engine", "rank 0"]
    planned = {event.step_id for event in events["engine"] if event.phase == "plan"}
    assert len(planned) >= 12
    for phase in ("prepare", "forward", "sample", "drain"):
        assert {event.step_id for event in events["rank 0"] if event.phase == phase} == planned
    of_step = {event.phase: event for found in events.values() for event in found if event.step_id == min(planned)}
    order = ["idle", "plan", "prepare", "forward", "sample", "drain", "commit"]
    assert [of_step[phase].start_ns for phase in order] == sorted(of_step[phase].start_ns for phase in order)


def test_time_between_calls_is_nobodys(llm: LLM) -> None:
    """Each call's first step follows upon nothing; depth 2 may have planned one step more than the call needed."""
    generate(llm)
    idle = [event for event in llm.timeline_events()["engine"] if event.phase == "idle"]
    before, steps_before = llm.step_figures().ranks["rank 0"].num_periods, len(idle)
    llm.llm_engine.add_request("x", {"prompt_token_ids": [3]}, PARAMS)
    llm.llm_engine.step()
    llm.llm_engine.abort_requests(["x"])
    generate(llm)
    idle = [event for event in llm.timeline_events()["engine"] if event.phase == "idle"]
    assert len(idle) == steps_before + 2
    assert all(event.start_ns < event.end_ns for event in idle)
    figures = llm.step_figures().ranks["rank 0"]
    assert before + 11 <= figures.num_periods <= before + 11 + 3
    assert figures.idle_share is not None and 0 < figures.idle_share < 1
    assert figures.hidden_share is not None and 0 <= figures.hidden_share <= 1


def test_a_trace_is_written(llm: LLM, tmp_path: Path) -> None:
    generate(llm)
    llm.write_trace(tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert {"plan", "commit", "idle", "prepare", "forward", "sample"} <= lanes
    latest = max(entry["args"]["step"] for entry in entries if entry["ph"] == "X")
    recent = llm.llm_engine.timeline_events(first_step=latest)
    assert all({event.step_id for event in found} == {latest} for found in recent.values())
    assert llm.timeline_events().keys() == llm.step_figures().ranks.keys() | {"engine"}


def test_every_stage_has_its_own_timeline(folder: Path) -> None:
    with open_llm(folder, num_stages=2) as llm:
        generate(llm)
        events = llm.timeline_events()
        assert list(events) == ["engine", "rank 0", "rank 1"]
        drawing = {name for name, found in events.items() if any(event.phase == "sample" for event in found)}
        assert drawing == {"rank 1"}
        assert all(figures.num_periods >= 11 for figures in llm.step_figures().ranks.values())
    with pytest.raises(EngineClosedError):
        llm.timeline_events()
