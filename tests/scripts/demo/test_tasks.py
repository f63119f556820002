"""The answers are recomputed here from the text of the prompt, by other code than the generators'."""

from __future__ import annotations

import itertools
import json
import re
from random import Random

import pytest

from scripts.demo import fact_table
from scripts.demo.tasks import KINDS, MULTI_TURN, Sample, draw, is_correct, is_held_out

COUNT = 300


def samples(kind: str, held_out: bool = False) -> list[Sample]:
    rng = Random(f"test {kind} {held_out}")
    return [draw(kind, rng, held_out) for _ in range(COUNT)]


def prompt(sample: Sample) -> str:
    text = sample.messages[-1]["content"]
    assert isinstance(text, str)
    return text


def answer(sample: Sample) -> str:
    text = sample.answer["content"]
    assert isinstance(text, str)
    return text


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_no_argument_tuple_is_on_both_sides() -> None:
    training = {sample.key for kind in KINDS for sample in samples(kind)}
    held_out = {sample.key for kind in KINDS for sample in samples(kind, held_out=True)}
    assert training and held_out and not training & held_out
    assert not any(map(is_held_out, training)) and all(map(is_held_out, held_out))


def test_a_sum_is_on_one_side_with_and_without_a_tool() -> None:
    with_tool = [sample for sample in samples("tools") if sample.key[:2] == ("arithmetic", "add")]
    assert with_tool and all(numbers(sample.messages[0]["content"]) for sample in with_tool)


def test_sums_are_held_out_in_either_order() -> None:
    assert all(
        sample.key[2] <= sample.key[3] for sample in samples("arithmetic") if sample.key[1] in ("add", "compare")
    )


def test_no_held_out_sum_or_difference_is_a_step_of_a_training_answer() -> None:
    steps = {
        (operation, a, b)
        for sample in samples("arithmetic")
        for operation, pattern in (("add", r"(\d+) \+ (\d+) ="), ("subtract", r"(\d+) - (\d+) ="))
        for a, b in (map(int, pair) for pair in re.findall(pattern, answer(sample)))
    }
    steps = {(operation, *(sorted(pair) if operation == "add" else pair)) for operation, *pair in steps}
    held_out = {sample.key[1:] for sample in samples("arithmetic", held_out=True)}
    assert ("add", 7, 8) in steps and not steps & held_out


@pytest.mark.parametrize("kind", ["facts", "lists", "extraction"])
def test_no_held_out_prompt_is_a_training_prompt(kind: str) -> None:
    assert not {prompt(sample) for sample in samples(kind)} & {prompt(sample) for sample in samples(kind, True)}


def test_every_fact_is_seen_in_training() -> None:
    for column, entity, _ in fact_table.FACTS:
        wordings = range(len(fact_table.FACT_COLUMNS[column][1]))
        assert not all(is_held_out(("facts", column, entity, wording)) for wording in wordings)


@pytest.mark.parametrize("held_out", [False, True])
def test_arithmetic(held_out: bool) -> None:
    for sample in samples("arithmetic", held_out):
        operands = numbers(prompt(sample))
        assert max(operands) <= 99
        assert sample.key == ("arithmetic", "step") or sorted(operands) == sorted(map(int, sample.key[2:]))
        if relation := re.fullmatch(r"(\d+) is (larger than|less than|equal to) (\d+)\.", answer(sample)):
            a, b = int(relation[1]), int(relation[3])
            assert {"larger than": a > b, "less than": a < b, "equal to": a == b}[relation[2]]
        else:
            steps = re.split(r"[,:] ", answer(sample))
            assert all(eval(step.replace("=", "==")) for step in steps if "=" in step)
            assert set(numbers(steps[-1])) >= set(operands) and len(steps) == (1 if max(operands) < 10 else 4)


def test_extraction_copies_every_value_from_the_sentence() -> None:
    for sample in samples("extraction"):
        values = json.loads(answer(sample))
        assert values and all(str(value) in prompt(sample) for value in values.values())
        asked = re.search(r"(?:keys?|[Ee]xtract(?: the)?|me|with) ((?:\w+, )*\w+ and \w+)", prompt(sample))
        if asked and "fields" not in prompt(sample):
            assert re.split(r", | and ", asked[1]) == list(values)


def test_lists() -> None:
    for sample in samples("lists"):
        text = answer(sample)
        operation, given = sample.key[1], [str(item) for item in sample.key[3:]]
        assert all(item in prompt(sample) for item in given)
        found = text.split(", ")
        if operation in ("ascending", "descending"):
            order = [int(item) for item in found]
            step = 1 if operation == "ascending" else -1
            assert all((later - earlier) * step >= 0 for earlier, later in itertools.pairwise(order))
        elif operation == "alphabetical":
            assert all(earlier <= later for earlier, later in itertools.pairwise(found))
        elif operation == "count":
            assert numbers(text) == [prompt(sample).count(",") + 1]
        elif operation == "occurrences":
            assert numbers(text) == [len(re.findall(rf"\b{sample.key[2]}\b", prompt(sample))) - 1]
        else:
            assert numbers(text) == [max(map(int, given)) if operation == "largest" else min(map(int, given))]
        if operation in ("ascending", "descending", "alphabetical"):
            assert sorted(found) == sorted(given)


def test_facts_answer_with_the_row_of_the_table() -> None:
    rows = [
        row.split("|")
        for row in (fact_table.COUNTRY_ROWS + fact_table.ELEMENT_ROWS + fact_table.PLANET_ROWS).split("\n")
        if row
    ]
    for sample in samples("facts"):
        (row,) = (row for row in rows if row[0] == sample.key[2])
        assert any(value in answer(sample) for value in row[1:]) and row[0].lower() in answer(sample).lower()


def test_stories_name_the_hero_and_the_place() -> None:
    for sample in samples("stories"):
        _, animal, name, place, _ = sample.key
        assert all(str(word) in answer(sample) for word in (animal, name, place))
        assert answer(sample).endswith("The end.") and "{" not in answer(sample)


def test_a_tool_call_fits_a_tool_that_is_offered() -> None:
    called = [sample for sample in samples("tools") if "tool_calls" in sample.answer]
    assert len(called) > COUNT // 4
    for sample in called:
        function = sample.answer["tool_calls"][0]["function"]
        (tool,) = (tool["function"] for tool in sample.tools if tool["function"]["name"] == function["name"])
        assert list(function["arguments"]) == tool["parameters"]["required"]
        for name, value in function["arguments"].items():
            expected = str if tool["parameters"]["properties"][name]["type"] == "string" else int
            assert isinstance(value, expected) and str(value).lower() in prompt(sample).lower()


def test_the_answer_after_a_tool_result_quotes_it() -> None:
    for sample in samples("tools"):
        if sample.messages[-1]["role"] == "tool":
            values = [str(value) for value in json.loads(prompt(sample)).values()]
            assert values in (["ok"], ["sent"]) or all(value in answer(sample) for value in values)


def test_turns_of_a_conversation_are_on_the_asked_side() -> None:
    for held_out in (False, True):
        for sample in samples(MULTI_TURN, held_out):
            roles = [message["role"] for message in sample.messages]
            assert is_held_out(sample.key) == held_out and roles == (["user", "assistant"] * len(roles))[: len(roles)]


def test_answers_are_judged() -> None:
    for kind in KINDS:
        for sample in samples(kind)[:30]:
            text = answer(sample)
            if calls := sample.answer.get("tool_calls"):
                text = f"<tool_call>\n{json.dumps(calls[0]['function'])}\n</tool_call>"
            assert is_correct(sample, text)
            assert not is_correct(sample, text[:-1]) and not is_correct(sample, "") and not is_correct(sample, "{}")
