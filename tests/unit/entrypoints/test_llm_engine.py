"""`LLMEngine` over mock steps: outputs of each kind, ends of requests, what it refuses at its start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.shared.mock_executor import mock_tokens
from inflight.config.engine_args import EngineArgs
from inflight.engine.request.request_state import RequestOutputKind
from inflight.entrypoints import llm_engine
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.entrypoints.offline_engine import MAX_UNENFORCED_LINES
from inflight.errors import ConfigError, EngineClosedError, EngineDeadError, InvalidRequestError
from inflight.outputs import RequestOutput
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.support.waits import wait_until
from tests.unit.entrypoints.mock_llm import mock_arguments

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOCK_STEP_SECONDS", "0.0005")
        made = LLMEngine.from_args(EngineArgs(**mock_arguments()))
        yield made
        made.close()
        made.close()


def steps(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_outputs_of_each_kind(engine: LLMEngine) -> None:
    engine.add_request("final", [5, 6], FIVE)
    engine.add_request("all", [5, 6], FIVE, kind=RequestOutputKind.CUMULATIVE)
    engine.add_request("new", [5, 6], FIVE, kind=RequestOutputKind.DELTA)
    outputs = steps(engine)
    assert engine.tokenizer is not None
    tokens = mock_tokens(engine.tokenizer, [5, 6], 5)
    found = {
        name: [o.outputs[0].token_ids for o in outputs if o.request_id == name] for name in ("final", "all", "new")
    }
    assert found["final"] == [tokens]
    assert found["all"][-1] == tokens and len(found["all"]) > 1
    assert [token for new in found["new"] for token in new] == tokens and len(found["new"]) > 1
    assert [output.finished for output in outputs].count(True) == 3
    assert all(output.finished for output in outputs if output.request_id == "final")


def test_a_stop_string_ends_the_request_in_the_core(engine: LLMEngine) -> None:
    engine.add_request("a", "x", LONG)
    [whole] = steps(engine)
    stop = whole.outputs[0].text[20:26]
    engine.add_request("a", "x", SamplingParams(max_tokens=500, ignore_eos=True, stop=[stop]))
    [output] = steps(engine)
    assert output.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    for _ in range(3):  # those in flight
        assert engine.step() == []
    assert not engine.core.has_unfinished_requests()


def test_requests_that_are_aborted_are_gone(engine: LLMEngine) -> None:
    engine.add_request("a", "x", LONG)
    engine.add_request("b", "y", FIVE)
    with pytest.raises(InvalidRequestError, match="still running"):
        engine.add_request("b", "z", FIVE)
    engine.step()
    engine.abort_requests(["a", "unknown"])
    assert [output.request_id for output in steps(engine)] == ["b"]
    for _ in range(3):
        assert engine.step() == []
    assert not engine.core.has_unfinished_requests()
    engine.add_request("a", "x", SamplingParams(n=3, max_tokens=2, ignore_eos=True))
    assert [len(output.outputs) for output in steps(engine)] == [3]


def test_the_events_of_later_steps(engine: LLMEngine) -> None:
    engine.add_request("a", "x", FIVE)
    steps(engine)
    events = engine.timeline_events()
    last = max(event.step_id for event in events["rank 0"])
    assert {event.step_id for event in events["rank 0"]} >= {last - 1, last}
    later = engine.timeline_events(last)
    assert list(later) == ["engine", "rank 0"]
    assert {event.step_id for event in later["rank 0"]} == {last}
    assert later["engine"] == [event for event in events["engine"] if event.step_id >= last] != events["engine"]


def test_prompts_of_chats_have_no_further_special_tokens(engine: LLMEngine) -> None:
    assert engine.tokenizer is not None and engine.chat_template is not None
    messages = [{"role": "user", "content": "Hi"}]
    text = engine.chat_template.render(messages)
    assert engine.render_chat(messages) == engine.tokenizer.encode(text, add_special_tokens=False)


def test_the_cache_outside_is_forgotten_only_if_asked(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(engine.core, "reset_prefix_cache", lambda *, reset_connector: seen.append(reset_connector))
    engine.reset_prefix_cache()
    engine.reset_prefix_cache(reset_connector=True)
    assert seen == [False, True]


def schema(name: str) -> SamplingParams:
    """`name` has a part that no grammar enforces."""
    parts = {"type": "object", "properties": {name: {"not": {}}}}
    return SamplingParams(structured_outputs=StructuredOutputsParams(json=parts, lenient=True))


def test_parts_that_are_not_enforced_are_logged_once(engine: LLMEngine, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in enumerate(["first", "first", "second"]):
        engine.add_request(str(number), "x", schema(name))
    engine.abort_requests(map(str, range(3)))
    assert caplog.text.count("cannot enforce") == 2
    assert caplog.text.index("first") < caplog.text.index("second")


def test_a_new_engine_has_all_its_steps_and_bounds_its_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = LLMEngine.from_args(EngineArgs(**mock_arguments()))
    engine.add_request("a", "x", FIVE)
    steps(engine)
    assert min(event.step_id for event in engine.timeline_events()["rank 0"]) == 0
    engine._log_unenforced(f"place {i}" for i in range(MAX_UNENFORCED_LINES + 5))
    engine._log_unenforced(["another"])
    assert caplog.text.count("cannot enforce") == MAX_UNENFORCED_LINES
    engine.close()


def test_an_engine_that_is_dead_takes_no_requests(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def dead() -> None:
        raise EngineDeadError("the GPU is gone")

    monkeypatch.setattr(engine.core, "check_alive", dead)
    with pytest.raises(EngineDeadError, match="the GPU is gone"):
        engine.add_request("a", "x", FIVE)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2: only"),
        ({"kv_events_config": {"enable_kv_cache_events": True}}, "kv_events_config: the engine runs in the caller"),
    ],
)
def test_what_one_engine_in_this_process_cannot_do(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLMEngine.from_args(EngineArgs(**mock_arguments(**more)))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def running() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("inflight-")}

    before = running()

    def fail(*_: object) -> None:
        assert running() - before, "the rank's"
        raise error

    monkeypatch.setattr(llm_engine, "make_core", fail)
    with pytest.raises(error):
        LLMEngine.from_args(EngineArgs(**mock_arguments()))
    wait_until(lambda: running() <= before)


def test_a_closed_engine() -> None:
    engine = LLMEngine.from_args(EngineArgs(**mock_arguments(skip_tokenizer_init=True)))
    assert (engine.tokenizer, engine.chat_template) == (None, None)
    engine.close()
    for call in (engine.step, engine.timeline_events, lambda: engine.add_request("a", [5], FIVE)):
        with pytest.raises(EngineClosedError, match="make a new one"):
            call()
