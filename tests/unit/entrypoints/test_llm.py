"""`LLM` over mock steps, and the interrupt of a call. tests/e2e/test_llm.py has real tokens."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tqdm.auto import tqdm

from benchmarks.shared.mock_executor import mock_tokens
from inflight import LLM, SamplingParams, StructuredOutputsParams
from inflight.engine.core.step_figures import step_figures
from inflight.entrypoints.llm import _Call
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.entrypoints.offline_engine import OfflineEngine
from inflight.errors import EngineClosedError, InvalidRequestError
from inflight.outputs import CompletionOutput, RequestOutput
from inflight.tokenizer.user_tokenizer import UserTokenizer
from tests.unit.entrypoints.mock_llm import mock_arguments

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "find_it", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOCK_STEP_SECONDS", "0.0005")
        with LLM(**mock_arguments(scheduling_policy="priority", max_num_seqs=4)) as made:
            yield made


def run(llm: LLM, prompts: Any, params: Any = FIVE, **more: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **more)


def chat(llm: LLM, messages: Any, params: Any = FIVE, **more: Any) -> list[RequestOutput]:
    return llm.chat(messages, params, use_tqdm=False, **more)


def texts(llm: LLM, outputs: list[RequestOutput]) -> list[str]:
    """The prompts."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    return [tokenizer.decode(output.prompt_token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one", 1),
        ([5, 6, 7], 1),
        ({"prompt": "one"}, 1),
        (["one", "two", "three"], 3),
        (("one", [5, 6]), 2),
        ([{"prompt_token_ids": [5]}, "two", [7, 8]], 3),
        ([], 0),
    ],
)
def test_each_prompt_has_its_output_in_the_order_of_the_prompts(llm: LLM, prompts: Any, count: int) -> None:
    outputs = run(llm, prompts)
    assert len(outputs) == count
    for output in outputs:
        assert output.finished
        tokenizer = llm.llm_engine.tokenizer
        assert tokenizer is not None
        assert output.outputs[0].token_ids == mock_tokens(tokenizer, output.prompt_token_ids, 5)
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == count
    ids = [int(output.request_id) for output in outputs]
    assert ids == list(range(min(ids, default=0), min(ids, default=0) + count))


def test_parameters_of_all_prompts_or_of_each(llm: LLM) -> None:
    def lengths(params: Any) -> list[int]:
        return [len(output.outputs[0].token_ids) for output in run(llm, ["a", "b"], params)]

    assert lengths(FIVE) == [5, 5]
    assert lengths([FIVE, SamplingParams(max_tokens=3, ignore_eos=True)]) == [5, 3]
    assert lengths((SamplingParams(max_tokens=1), FIVE)) == [1, 5]
    most = llm.get_default_sampling_params().max_tokens
    assert most is not None and lengths([None, FIVE])[1] == 5 and max(lengths(None)) <= most
    for params in ([FIVE], [FIVE] * 3):
        with pytest.raises(InvalidRequestError, match=rf"there are {len(params)} sampling_params for 2 prompts"):
            lengths(params)
    for wrong, place in (([FIVE, 5], r"sampling_params\[1\]"), ("ab", "sampling_params "), (5, "sampling_params ")):
        with pytest.raises(InvalidRequestError, match=place):
            lengths(wrong)


def test_prompts_of_a_wrong_type(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="not a int"):
        run(llm, 5)
    for given in ({"b", "a"}, 5.0, b"bytes", object(), str):
        with pytest.raises(InvalidRequestError, match=r"^prompts must be"):
            run(llm, given)


class Table:
    """As a DataFrame: its iterator returns the names of the columns."""

    columns = ("question",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


class Column:
    """As a Series of another library, whose entries are not Python's own values."""

    def __init__(self, values: list[Any], method: str) -> None:
        setattr(self, method, lambda: values)

    def __iter__(self) -> Iterator[object]:
        return iter((object(),))


@pytest.mark.parametrize(
    "make",
    [
        tuple,
        iter,
        lambda texts: (text for text in texts),
        lambda texts: dict.fromkeys(texts).keys(),
        lambda texts: dict(enumerate(texts)).values(),
        np.array,
        lambda texts: np.array(texts, dtype=object),
        lambda texts: Column(texts, "tolist"),
        lambda texts: Column(texts, "to_list"),
        lambda texts: Column(texts, "to_pylist"),
        deque,
    ],
)
@pytest.mark.parametrize("call", [run, chat])
def test_prompts_of_any_list(llm: LLM, make: Any, call: Any) -> None:
    given = ["one", "two", "three"]
    if call is run:
        assert texts(llm, run(llm, make(given))) == texts(llm, run(llm, given))
        return
    conversations = [({"role": "user", "content": text},) for text in given]
    with suppress(TypeError):  # a dictionary is no key
        assert texts(llm, chat(llm, make(conversations))) == texts(llm, chat(llm, conversations))


@pytest.mark.parametrize(
    "ids",
    [
        np.array([5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint8),
        (5, 6, 7),
        range(5, 8),
        deque([5, 6, 7]),
        Column([5, 6, 7], "tolist"),
        torch.tensor([5, 6, 7]),
    ],
)
def test_token_ids_of_any_list_are_one_prompt(llm: LLM, ids: Any) -> None:
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        assert [output.prompt_token_ids for output in run(llm, prompts)] == [[5, 6, 7]]
    assert [output.prompt_token_ids for output in run(llm, [ids, "a", ids])][::2] == [[5, 6, 7]] * 2


def test_token_ids_in_two_dimensions_are_several_prompts(llm: LLM) -> None:
    for rows in (np.array([[5, 6], [7, 8]]), torch.tensor([[5, 6], [7, 8]]), [np.array([5, 6]), (7, 8)]):
        assert [output.prompt_token_ids for output in run(llm, rows)] == [[5, 6], [7, 8]]


def test_a_table_is_no_list_of_prompts(llm: LLM) -> None:
    """It would complete the names of the columns."""
    for call in (run, chat):
        with pytest.raises(InvalidRequestError, match="give one of its columns"):
            call(llm, Table())


WRONG_PROMPTS: list[Any] = [
    "x" * 300_000,
    [5] * 100_000,
    "",
    [],
    None,
    float("nan"),
    7.5,
    b"bytes",
    [10**6],
    [-1],
    [5, "a"],
    [True],
    "\ud800",
    {"prompt": 5},
    {"text": "x"},
    {"prompt": "a", "prompt_token_ids": [5]},
    {"prompt": "a", "cache_salt": 5},
    {"prompt_token_ids": "a"},
    {1, 2},
    object(),
]


@pytest.mark.parametrize("index", [0, 3, 6])
def test_an_error_names_the_wrong_one_of_many_prompts(llm: LLM, index: int) -> None:
    for wrong in WRONG_PROMPTS:
        prompts: list[Any] = ["a"] * 7
        prompts[index] = wrong
        with pytest.raises(InvalidRequestError) as alone:
            run(llm, [wrong])
        with pytest.raises(InvalidRequestError) as found:
            run(llm, prompts)
        assert str(found.value) == f"prompts[{index}]: {alone.value}"
        assert type(found.value) is type(alone.value)
        assert getattr(found.value, "num_tokens", 0) == getattr(alone.value, "num_tokens", 0)
    for params in (SamplingParams(allowed_token_ids=[10**8]), SamplingParams(logit_bias={10**8: 1})):
        with pytest.raises(InvalidRequestError, match=rf"^prompts\[{index}\]: "):
            run(llm, ["a"] * 7, [params if i == index else FIVE for i in range(7)])
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        ["text"],
        [5],
        "text",
        5,
        None,
        [{"role": "user", "content": "x" * 300_000}],
    ],
)
def test_an_error_names_the_wrong_one_of_many_conversations(llm: LLM, wrong: Any) -> None:
    for index in (1, 4):
        conversations: list[Any] = [HELLO] * 5
        conversations[index] = wrong
        with pytest.raises(InvalidRequestError, match=rf"^messages\[{index}\]"):
            chat(llm, conversations)


@pytest.mark.parametrize("wrong", ["hello", HELLO[0], 5, None, {1}, b"x", ["hello", "you"]])
def test_a_text_is_no_conversation(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages.*(list of|give) messages"):
        chat(llm, wrong)


def test_a_chat_model_that_says_nothing_to_a_raw_text(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def output(text: str, finish_reason: str = "stop") -> Any:
        completion = CompletionOutput(index=0, text=text, token_ids=[1], finish_reason=finish_reason)
        return RequestOutput(request_id="1", prompt="What is 2 + 3?", prompt_token_ids=[5], outputs=[completion])

    llm._hint_at_chat([output("5"), output("", "length"), output("", "error")])
    assert not caplog.records
    for _ in range(2):
        llm._hint_at_chat([output("5"), output(" ")])
    assert len(caplog.records) == 1
    assert "llm.chat(" in caplog.text and "What is 2 + 3?" in caplog.text


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("call", [run, chat])
def test_priorities_are_those_of_the_prompts(llm: LLM, kind: Any, call: Any) -> None:
    """Of 12 prompts, 4 run at a time."""
    prompts: Any = [[{"role": "user", "content": str(i)}] if call is chat else str(i) for i in range(12)]

    def first_ended(priority: Any) -> set[int]:
        """Which 4 end first. The order counts, not the times of the metrics: they are exact only to the pauses of a thread."""
        ended: list[str] = []

        def step() -> list[RequestOutput]:
            outputs = LLMEngine.step(llm.llm_engine)
            ended.extend(output.request_id for output in outputs if output.finished)
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.llm_engine, "step", step)
            ids = [output.request_id for output in call(llm, prompts, priority=priority)]
        return {ids.index(request_id) for request_id in ended[:4]}

    assert first_ended(kind(range(12, 0, -1))) == {8, 9, 10, 11}
    assert first_ended(range(12)) == first_ended(None) == {0, 1, 2, 3}
    assert first_ended(np.arange(12, 0, -1)) == {8, 9, 10, 11}
    for wrong, words in (
        ([1], "1 numbers for 12 prompts"),
        (5, "not a list"),
        ({1: 2}, "not a list"),
        ([0] * 5 + ["a"] + [0] * 6, r"priority\[5\]='a'"),
        ([0] * 11 + [1.5], r"priority\[11\]=1.5"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call(llm, prompts, priority=wrong)


@pytest.mark.parametrize(("call", "given"), [(run, "a"), (chat, HELLO)])
def test_arguments_of_other_libraries(llm: LLM, call: Any, given: Any) -> None:
    assert len(call(llm, given, lora_request=None)) == 1
    with pytest.raises(InvalidRequestError, match=r"has no argument 'lora_request' \(given: 5\); LoRA"):
        call(llm, given, lora_request=5)
    with pytest.raises(InvalidRequestError, match="did you mean 'use_tqdm'"):
        call(llm, given, use_tqmd=True)
    for name in ("tools", "chat_template_kwargs"):
        if call is run:
            with pytest.raises(InvalidRequestError, match=rf"generate has no argument '{name}'"):
                run(llm, given, **{name: [TOOL]})
    with pytest.raises(InvalidRequestError, match="continue_final_message" if call is chat else "priority$"):
        call(llm, given, unknown=1)


def test_chats_are_rendered(llm: LLM) -> None:
    [one] = texts(llm, chat(llm, HELLO))
    assert "Hi" in one and one.endswith("assistant\n")
    other = [{"role": "user", "content": "Bye"}]
    assert texts(llm, chat(llm, [HELLO, other])) == [one, one.replace("Hi", "Bye")]
    assert one.startswith(texts(llm, chat(llm, HELLO, add_generation_prompt=False))[0])
    assert not texts(llm, chat(llm, HELLO, add_generation_prompt=False))[0].endswith("assistant\n")
    [begun] = texts(llm, chat(llm, [*HELLO, {"role": "assistant", "content": "Well"}], **CONTINUED))
    assert begun.endswith("Well")
    assert "find_it" in texts(llm, chat(llm, HELLO, tools=[TOOL]))[0]
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        chat(llm, [])
    outputs = chat(llm, [HELLO, other], [FIVE, SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 2]


@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_thinks_unless_its_answer_has_begun(llm: LLM, monkeypatch: pytest.MonkeyPatch, continues: bool) -> None:
    seen: list[dict[str, Any]] = []

    def add(_request_id: str, _prompt: Any, _params: Any, **more: Any) -> None:
        seen.append(more)
        raise InvalidRequestError("seen")

    monkeypatch.setattr(llm.llm_engine, "add_request", add)
    with pytest.raises(InvalidRequestError, match="seen"):
        chat(
            llm,
            [*HELLO, {"role": "assistant", "content": "x"}],
            continue_final_message=continues,
            add_generation_prompt=not continues,
        )
    assert seen == [{"add_special_tokens": False, "thinks_first": not continues, "priority": 0}]


def test_strict_tools_constrain_a_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SamplingParams] = []

    def add(_request_id: str, _prompt: Any, params: SamplingParams, **_: Any) -> None:
        seen.append(params)
        raise InvalidRequestError("seen")

    monkeypatch.setattr(llm.llm_engine, "add_request", add)
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    for tools in ([strict], [TOOL]):
        with pytest.raises(InvalidRequestError, match="seen"):
            chat(llm, HELLO, SamplingParams(), tools=tools)
    assert [params.structured_outputs is not None for params in seen] == [True, False]


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_the_bar_counts_requests(llm: LLM, capsys: pytest.CaptureFixture[str], shows: bool, is_chat: bool) -> None:
    given: Any = [HELLO] * 3 if is_chat else ["a", "b", "c"]
    (llm.chat if is_chat else llm.generate)(given, FIVE, use_tqdm=shows)
    shown = capsys.readouterr().err
    assert ("3/3" in shown) is shows
    assert bool(re.search(r"in \d+, out \d+ tokens/s", shown)) is shows
    for outputs in (llm.generate("a", FIVE), llm.chat(HELLO, FIVE)):
        assert len(outputs) == 1
    assert capsys.readouterr().err.count("1/1") >= 2


def test_requests_that_fail_while_they_run_are_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Their texts are empty. A grammar is compiled beside the steps, so it cannot be refused before."""
    wrong = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="("))
    outputs = run(llm, ["a", "b", "c"], [FIVE, wrong, wrong])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error"]
    [record] = caplog.records
    assert "2 of 3 requests" in record.getMessage() and f"prompts[1]: {outputs[1].error}" in record.getMessage()


def test_a_wrong_request_ends_its_call_and_no_other(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        run(llm, ["a", ""])
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(run(llm, "a")) == 1


def test_an_interrupt_ends_the_requests_before_the_call_returns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request ends, which moves the bar. The other one never ends."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = llm.llm_engine
    step = engine.step

    def step_without_end() -> list[RequestOutput]:
        outputs = step()
        if not engine.has_unfinished_requests():
            engine.add_request("more", "x", FIVE)
        return [output for output in outputs if output.outputs[0].token_ids[1:] == []]

    with monkeypatch.context() as patch:
        patch.setattr(tqdm, "update", interrupt)
        patch.setattr(engine, "step", step_without_end)
        with pytest.raises(KeyboardInterrupt):
            run(llm, ["a", "b"], [SamplingParams(max_tokens=1), FIVE])
    assert "inflight-call" not in [thread.name for thread in threading.enumerate()]
    engine.abort_requests(["more"])
    assert not engine.has_unfinished_requests()
    assert len(run(llm, "a")) == 1


def test_calls_of_several_threads_come_one_after_another(llm: LLM) -> None:
    outputs: dict[int, list[RequestOutput]] = {}
    threads = [
        threading.Thread(target=lambda i=i: outputs.update({i: run(llm, [f"{i} {j}" for j in range(5)])}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for i in range(4):
        assert texts(llm, outputs[i]) == [f"{i} {j}" for j in range(5)]


def test_tokenizer_and_defaults(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, UserTokenizer)
    assert "Hi" in tokenizer.apply_chat_template(HELLO, tokenize=False)
    params = llm.get_default_sampling_params()
    params.temperature = 0.125
    assert llm.get_default_sampling_params().temperature != 0.125


def test_the_prefix_cache_is_forgotten(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def cached() -> int:
        return run(llm, [list(range(40))[8:]] * 1)[0].num_cached_tokens

    llm.reset_prefix_cache()
    assert (cached(), cached()) == (0, 16)
    llm.reset_prefix_cache()
    assert cached() == 0
    seen: list[bool] = []
    monkeypatch.setattr(
        llm.llm_engine.core, "reset_prefix_cache", lambda *, reset_connector: seen.append(reset_connector)
    )
    llm.reset_prefix_cache(reset_connector=True)
    llm.reset_prefix_cache()
    assert seen == [True, False]


def test_the_times_of_steps(llm: LLM, tmp_path: Path) -> None:
    run(llm, ["a", "b"])
    events = llm.timeline_events()
    assert list(events) == ["engine", "rank 0"]
    assert {event.phase for event in events["rank 0"]} == {"forward"}
    assert {"plan", "commit"} <= {event.phase for event in events["engine"]}
    assert llm.step_figures() == step_figures(llm.timeline_events())
    llm.write_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text(encoding="utf-8")
    assert text.endswith("\n")
    names = {entry["name"] for entry in json.loads(text)["traceEvents"]}
    assert {"forward", "plan"} <= {name.split()[0] for name in names}


def test_methods_of_workers_are_called(llm: LLM) -> None:
    assert llm.collective_rpc("phase") == [""]
    with pytest.raises(Exception, match="no public method 'nothing'"):
        llm.collective_rpc("nothing")


def test_an_engine_without_a_tokenizer_and_after_its_end() -> None:
    with LLM(**mock_arguments(skip_tokenizer_init=True)) as made:
        assert made.get_tokenizer() is None
        assert len(run(made, [[5, 6]])[0].outputs[0].token_ids) == 5
        engine = made.llm_engine
    with pytest.raises(EngineClosedError, match="make a new one"):
        run(made, [[5, 6]])
    with pytest.raises(EngineClosedError):
        engine.step()
    with pytest.raises(EngineClosedError):
        made.timeline_events()
    made.close()


# -- the thread of a call ------------------------------------------------------------------------------------------------


class Engine:
    """An interrupt comes while request number `last` is added, or, with -1, in the first step."""

    def __init__(self, last: int) -> None:
        self.last, self.num_steps = last, 0
        self.takes_images = False
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.call: _Call

    def add_request(self, request_id: str, *_: Any, **__: Any) -> None:
        self.added.append(request_id)
        self.call.is_interrupted = len(self.added) == self.last + 1

    def step(self) -> list[Any]:
        self.num_steps += 1
        self.call.is_interrupted = True
        return []

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize(("last", "num_added", "num_steps"), [(0, 1, 0), (1, 2, 0), (-1, 4, 1)])
def test_an_interrupt_is_noticed_after_each_request_and_each_step(last: int, num_added: int, num_steps: int) -> None:
    """To prepare a long list of prompts may take a minute."""
    engine = Engine(last)
    engine.call = call = _Call(
        cast(OfflineEngine, engine), threading.Lock(), [(name, name, None, {}) for name in "abcd"]
    )
    call.run()
    assert isinstance(call.outputs.exception(0), KeyboardInterrupt)
    assert (len(engine.added), engine.num_steps, engine.aborted) == (num_added, num_steps, list("abcd"))
    assert call.progress.get_nowait() == []


def test_only_the_last_output_of_a_request_counts() -> None:
    class Talkative(Engine):
        def step(self) -> list[Any]:
            self.num_steps += 1
            return [SimpleNamespace(request_id="a", finished=self.num_steps == 3, number=self.num_steps)]

    engine = Talkative(-2)
    engine.call = call = _Call(cast(OfflineEngine, engine), threading.Lock(), [("a", "a", None, {})])
    call.run()
    assert [output.number for output in cast("list[Any]", call.outputs.result())] == [3]
    assert (len(call.progress.get_nowait()), call.progress.get_nowait()) == (1, [])
