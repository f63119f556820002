"""`inflight generate --input`: every row is answered exactly once, whatever stops the run in between."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import Result

from inflight.entrypoints.cli.batch import DEFAULT_MAX_TOKENS, LOOKAHEAD, to_json
from inflight.entrypoints.cli.result_file import ResultFile
from inflight.entrypoints.cli.rows import InputRow
from inflight.errors import StepError
from inflight.outputs import CompletionOutput, Logprob, RequestOutput
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.architecture.source import ROOT
from tests.support.python_process import PythonProcess
from tests.unit.entrypoints.fake_engine import FakeEngine
from tests.unit.entrypoints.runner import invoke

ROWS: list[dict[str, Any]] = [
    {"prompt": "one"},
    {"id": "b", "prompt": "a longer one"},
    {"id": 3, "prompt": "no"},
    {"prompt_token_ids": [72, 105], "params": {"temperature": 0}},
    {"id": "é\n", "prompt": "日本"},
    {"prompt": "x" * 30},
]


def run(engine: FakeEngine, source: Path, target: Path, *options: str) -> Result:
    arguments = ["generate", "--input", str(source), "--output", str(target), *options]
    return invoke(arguments, obj=engine)


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_results(path: Path) -> dict[int, dict[str, Any]]:
    """By row; fails for a line that is not whole and for a row that is there twice."""
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_row = {result["row"]: result for result in results}
    assert len(by_row) == len(results)
    return by_row


def test_every_row_is_answered(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    engine = FakeEngine()
    done = run(engine, source, target)
    assert done.exit_code == 0, done.output
    results = read_results(target)
    assert {row: result["outputs"][0]["text"] for row, result in results.items()} == {
        1: "one!", 2: "a longer one!", 3: "no!", 4: "Hi!", 5: "日本!", 6: "x" * 30 + "!",
    }  # fmt: skip
    assert [result.get("id") for _, result in sorted(results.items())] == [None, "b", 3, None, "é\n", None]
    assert results[1] == {
        "row": 1,
        "outputs": [{"index": 0, "text": "one!", "finish_reason": "stop", "stop_reason": None, "num_tokens": 4}],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
    }
    assert engine.is_closed


def test_a_large_input_is_streamed(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": str(number)} for number in range(3000)])
    engine = FakeEngine(max_num_seqs=64)
    assert run(engine, source, tmp_path / "out.jsonl").exit_code == 0
    assert engine.most_unfinished <= LOOKAHEAD + 64
    assert len(read_results(tmp_path / "out.jsonl")) == 3000


def test_a_row_has_its_own_parameters(tmp_path: Path) -> None:
    rows = [
        {"prompt": "abcdef", "params": {"max_tokens": 2, "stop": ["z"], "logit_bias": {"65": 1.5}}},
        {"prompt": "a"},
    ]
    engine = FakeEngine()
    source = write_rows(tmp_path / "in.jsonl", rows)
    assert run(engine, source, tmp_path / "out.jsonl", "--max-tokens", "5", "--top-p", "0.5").exit_code == 0
    first, second = engine.params["1"], engine.params["2"]
    assert (first.max_tokens, first.stop, first.logit_bias, first.top_p) == (2, ("z",), {65: 1.5}, 0.5)
    assert (second.max_tokens, second.stop, second.top_p) == (5, (), 0.5)
    assert read_results(tmp_path / "out.jsonl")[1]["outputs"][0]["finish_reason"] == "length"


def test_integers_may_be_written_as_whole_floats(tmp_path: Path) -> None:
    params = {"max_tokens": 2.0, "seed": 1e3, "stop_token_ids": [7.0], "logit_bias": {"65.0": 1}, "temperature": 1.0}
    rows = [
        {"id": 4.0, "prompt_token_ids": [65.0, 66], "params": params},
        {"prompt": "a", "params": {"max_tokens": 2.5}},
    ]
    engine = FakeEngine()
    run(engine, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    first = engine.params["1"]
    assert (first.max_tokens, first.seed, tuple(first.stop_token_ids), first.logit_bias) == (2, 1000, (7,), {65: 1.0})
    assert engine.prompts["1"] == "AB" and type(first.max_tokens) is int and type(first.temperature) is float
    results = read_results(tmp_path / "out.jsonl")
    assert results[1]["id"] == 4 and "max_tokens" in results[2]["error"]


def test_a_row_may_have_a_form_of_its_own(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "params": {"structured_outputs": {"regex": "[ab]+"}}},
        {"prompt": "a", "params": {"structured_outputs": None}},
    ]
    engine = FakeEngine()
    assert run(engine, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl").exit_code == 0
    assert [params.structured_outputs for params in engine.params.values()] == [
        StructuredOutputsParams(regex="[ab]+"),
        None,
    ]


def test_a_row_without_max_tokens_has_room_for_its_min_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "params": {"min_tokens": 300}}]
    engine = FakeEngine()
    assert run(engine, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl").exit_code == 0
    assert [params.max_tokens for params in engine.params.values()] == [DEFAULT_MAX_TOKENS, 300]


def test_chats_and_tools(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = [{"messages": messages}, {"messages": messages, "tools": [{}]}, {"prompt": "Hi"}, {"prompt_token_ids": [65]}]
    engine = FakeEngine(has_chat_template=True)
    assert run(engine, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl").exit_code == 0
    assert list(engine.prompts.values()) == ["<user>Hi", "[1 tools]<user>Hi", "<user>Hi", "A"]
    raw = FakeEngine(has_chat_template=True)
    assert run(raw, tmp_path / "in.jsonl", tmp_path / "raw.jsonl", "--raw").exit_code == 0
    assert raw.prompts["3"] == "Hi"


def test_strict_tools_constrain_their_own_row(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = [{"messages": messages, "tools": [{"strict": strict}]} for strict in (True, False)]
    engine = FakeEngine(has_chat_template=True)
    assert run(engine, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl").exit_code == 0
    assert [params.structured_outputs is not None for params in engine.params.values()] == [True, False]


BAD_LINES = {
    b"{": "not valid JSON",
    b"[1]": "not a JSON object",
    b'"text"': "not a JSON object",
    b"\xff{}": "not valid JSON",
    b"[" * 100_000: "not valid JSON",
    b"{}": "exactly one of 'prompt'",
    b'{"prompt": "a", "messages": []}': "exactly one of 'prompt'",
    b'{"prompt": 5}': "must be a string",
    b'{"prompt": "a", "tools": []}': "a row with 'tools' must have 'messages'",
    b'{"promt": "a"}': "unknown key 'promt'",
    b'{"prompt": "a", "id": [1]}': "neither a string nor an integer",
    b'{"prompt": "a", "id": true}': "neither a string nor an integer",
    b'{"prompt": "a", "params": 1}': "params is a int",
    b'{"prompt": "a", "params": {"max_token": 1}}': "did you mean 'max_tokens'",
    b'{"prompt": "a", "params": {"temperature": "hot"}}': "temperature='hot'",
    b'{"prompt": "a", "params": {"stop": 5}}': "stop",
    b'{"prompt": "a", "params": {"logit_bias": {"a": 1}}}': "logit_bias",
    b'{"prompt_token_ids": ["a"]}': "not integers",
    b'{"messages": [{"role": "user", "content": "a"}]}': "no chat template",
    b'{"prompt": "' + b"a" * 2000 + b'"}': "too long",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items(), ids=[line[:40].hex() for line in BAD_LINES])
def test_a_bad_row_becomes_an_error_and_the_rest_goes_on(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "first"}\n' + line + b'\n\n{"prompt": "last"}')
    done = run(FakeEngine(), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert done.exit_code == 0, done.output
    results = read_results(tmp_path / "out.jsonl")
    assert sorted(results) == [1, 2, 4]
    assert message in results[2]["error"]
    assert "error" not in results[1] and "error" not in results[4]
    assert "1 rows could not be run" in done.stderr


def test_an_id_may_stand_once(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    target = tmp_path / "out.jsonl"
    run(FakeEngine(), source, target)
    results = read_results(target)
    assert results[1]["outputs"][0]["text"] == "x!"
    assert results[2] == {"row": 2, "error": "row 1 has the id 'a' already; give each row its own id"}
    # killed between the two, whichever came first, the other one is still to do
    lines = target.read_text().splitlines()
    for line in lines:
        target.write_text(line + "\n")
        run(FakeEngine(), source, target)
        assert read_results(target) == results


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The output file of a run of all rows in in.jsonl."""
    target = tmp_path / "out.jsonl"
    assert run(FakeEngine(), write_rows(tmp_path / "in.jsonl", ROWS), target).exit_code == 0
    return target.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_anywhere_is_completed(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    target.write_bytes(cut)
    engine = FakeEngine()
    assert run(engine, source, target).exit_code == 0
    assert read_results(target) == {json.loads(line)["row"]: json.loads(line) for line in whole.splitlines()}
    # no whole line's row is run again; one that lost only its newline is whole
    kept = sum(line in whole.split(b"\n") for line in cut.split(b"\n") if line)
    assert len(engine.prompts) == len(ROWS) - kept


def test_draws_do_not_depend_on_where_the_run_was_stopped(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    whole = FakeEngine()
    run(whole, source, target)
    target.write_bytes(b"".join(target.read_bytes().splitlines(keepends=True)[:3]))
    resumed = FakeEngine()
    run(resumed, source, target)
    assert resumed.params == {request_id: whole.params[request_id] for request_id in resumed.params}
    seeds = [params.seed for params in whole.params.values() if not params.greedy]
    assert len(set(seeds)) == len(seeds) and None not in seeds
    same = FakeEngine()
    run(same, source, tmp_path / "same.jsonl", "--seed", "7")
    assert {params.seed for params in same.params.values()} == {7}


def test_rows_are_found_by_id_when_the_input_changes(tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": name} for name in "abc"]
    target = tmp_path / "out.jsonl"
    run(FakeEngine(), write_rows(tmp_path / "in.jsonl", rows), target)
    engine = FakeEngine()
    run(engine, write_rows(tmp_path / "in.jsonl", [{"id": "new", "prompt": "new"}, *reversed(rows)]), target)
    assert list(engine.prompts.values()) == ["new"]


def test_a_failed_engine_keeps_what_was_done(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 5:
            raise StepError("boom", rank=0)

    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    engine = FakeEngine(on_step=fail)
    done = run(engine, source, target)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "error: boom"
    assert 0 < len(read_results(target)) < len(ROWS)
    assert engine.is_closed
    assert run(FakeEngine(), source, target).exit_code == 0
    assert len(read_results(target)) == len(ROWS)


def test_ctrl_c_leaves_a_valid_file(tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    before = signal.getsignal(signal.SIGINT)
    done = run(FakeEngine(on_step=interrupt), source, target)
    assert done.exit_code == 130
    assert "start the same command again" in done.stderr
    assert signal.getsignal(signal.SIGINT) is before
    assert set(read_results(target)) == {1, 3, 4}  # row 1 ends in the step that was interrupted
    assert run(FakeEngine(), source, target).exit_code == 0
    assert len(read_results(target)) == len(ROWS)


KILLED = """
import sys, time
from inflight.entrypoints.cli.main import app
from tests.unit.entrypoints.fake_engine import FakeEngine
app(["generate", "-i", sys.argv[1], "-o", sys.argv[2]], obj=FakeEngine(on_step=lambda step: time.sleep(0.002)))
"""


def test_a_killed_process_is_resumed(tmp_path: Path) -> None:
    rows = [{"prompt": "y" * (number % 17)} for number in range(1, 400)]
    source, target = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    process = PythonProcess([sys.executable, "-c", KILLED, str(source), str(target)], cwd=ROOT)
    deadline = time.monotonic() + 300
    while not (target.exists() and target.read_bytes().count(b"\n") >= 20):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    with target.open("ab") as file:
        file.write(b'{"row": 398, "outp')  # as if it had been killed in the middle of a write
    engine = FakeEngine()
    assert run(engine, source, target).exit_code == 0
    assert len(engine.prompts) <= len(rows) - 20
    assert sorted(read_results(target)) == list(range(1, 400))


def test_a_half_line_is_gone_before_anything_is_run(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    target.write_bytes(b'{"row": 1, "error": ""}\n{"row": 6, "outputs": [{"index"')
    assert run(FakeEngine(on_step=lambda step: os.kill(os.getpid(), signal.SIGINT)), source, target).exit_code == 130
    assert target.read_bytes() == b'{"row": 1, "error": ""}\n'


def test_a_result_is_in_the_file_at_once(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl") as results:
        results.write({"row": 1, "error": "\ud800"})
        assert (tmp_path / "out.jsonl").read_text() == '{"row": 1, "error": "\\ud800"}\n'
        assert json.loads((tmp_path / "out.jsonl").read_text()) == {"row": 1, "error": "\ud800"}


def test_overwrite_starts_anew(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    target.write_text("not a result\n")
    engine = FakeEngine()
    assert run(engine, source, target, "--overwrite").exit_code == 0
    assert len(engine.prompts) == len(ROWS)


@pytest.mark.parametrize("content", ["not a result\n", '{"row": 1}\n{"answer": 42}\n', '{"row": "1"}\n'])
def test_a_file_of_something_else_is_not_touched(tmp_path: Path, content: str) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    target.write_text(content)
    done = run(FakeEngine(), source, target)
    assert done.exit_code == 2
    assert "is not a result" in done.stderr
    assert target.read_text() == content


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with target.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(FakeEngine(), source, target)
    assert done.exit_code == 2
    assert "another run" in done.stderr


def test_the_exit_code_says_when_no_row_could_be_run(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", [{"id": 1}, {"prompt": 5}]), tmp_path / "out.jsonl"
    done = run(FakeEngine(), source, target)
    assert done.exit_code == 2
    assert "2 rows could not be run" in done.stderr
    assert all("error" in result for result in read_results(target).values())
    write_rows(source, [{"id": 1}, {"prompt": "a"}])
    assert run(FakeEngine(), source, tmp_path / "other.jsonl").exit_code == 0


def test_standard_streams() -> None:
    done = invoke(["generate", "-i", "-"], obj=FakeEngine(), input='{"prompt": "a"}\n{"id": 1}\n')
    assert done.exit_code == 0
    results = {result["row"]: result for result in map(json.loads, done.stdout.splitlines())}
    assert results[1]["outputs"][0]["text"] == "a!"
    assert results[2]["id"] == 1 and "error" in results[2]


def test_logprobs_and_token_ids_are_json(tmp_path: Path) -> None:
    source, target = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    assert run(FakeEngine(), source, target, "--logprobs", "1", "--token-ids").exit_code == 0
    completion = read_results(target)[1]["outputs"][0]
    assert completion["token_ids"] == [ord("a"), ord("!")]
    entry = {"token_id": ord("a"), "token": "a", "logprob": -9999.0, "rank": 1}  # JSON has no infinity
    assert completion["logprobs"][0] == [entry]
    assert completion["cumulative_logprob"] == -9999.0
    assert "Infinity" not in target.read_text()


def test_all_that_a_result_says() -> None:
    likely, unlikely = Logprob(-0.5, 1, "a"), Logprob(-12_000.0, 7, "b")
    completion = CompletionOutput(
        index=1,
        text="b",
        token_ids=[98],
        cumulative_logprob=-12_000.0,
        logprobs=[{98: unlikely, 97: likely}],
        finish_reason="stop",
        stop_reason="c",
    )
    output = RequestOutput(
        request_id="x",
        prompt=None,
        prompt_token_ids=[97, 98, 97],
        outputs=[completion],
        parts={"prompt_logprobs": [None, {98: unlikely}, {97: likely}]},
        num_cached_tokens=2,
    )
    first = {"token_id": 97, "token": "a", "logprob": -0.5, "rank": 1}
    second = {"token_id": 98, "token": "b", "logprob": -9999.0, "rank": 7}
    shown = {"index": 1, "text": "b", "finish_reason": "stop", "stop_reason": "c", "num_tokens": 1}
    with_logprobs = {**shown, "cumulative_logprob": -12_000.0, "logprobs": [[second, first]]}
    assert to_json(InputRow(4, "id", {}), output, with_token_ids=False) == {
        "row": 4,
        "id": "id",
        "outputs": [with_logprobs],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "prompt_logprobs": [None, [second], [first]],
    }
    completion.logprobs, output.parts = None, {}
    assert to_json(InputRow(4, None, {}), output, with_token_ids=True) == {
        "row": 4,
        "outputs": [{**shown, "token_ids": [98]}],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
    }
