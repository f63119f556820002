"""What the end of a prompt says about the reasoning, and the frame of a constrained text."""

from __future__ import annotations

import pytest

from inflight.interface.request import AnswerFrame
from inflight.parsers.harmony import FRAME
from inflight.parsers.reasoning import Opening, ReasoningMarkup, answer_frame, find_opening
from inflight.parsers.selector import reasoning_markup

THINK = ReasoningMarkup("<think>", "</think>")
CUSTOM = ReasoningMarkup("", ";;")


@pytest.mark.parametrize(
    ("prompt", "begun", "found"),
    [
        ("<user>?</user><assistant><think>\n", None, Opening.OPEN),
        ("<user>what is <think>?</user><assistant>", None, Opening.NONE),
        ("<assistant><think>\n\n</think>\n\n", None, Opening.CLOSED),
        ("<assistant></think>", None, Opening.CLOSED),
        ("<user>is it </think>?</user><assistant>", None, Opening.NONE),
        # a message that the model continues
        ("<assistant><think>\nHm", "<think>\nHm", Opening.OPEN),
        ("<assistant><think>\nHm", "Hm", Opening.OPEN),
        ("<assistant><think>a</think>b", "<think>a</think>b", Opening.CLOSED),
        ("<assistant>b", "b", Opening.CLOSED),
        ("Let me", "<think>\nA long thought, of which the end alone is known. Let me", Opening.OPEN),
    ],
)
def test_what_the_prompt_says(prompt: str, begun: str | None, found: Opening) -> None:
    assert find_opening(THINK, prompt, begun) is found


def test_a_family_with_messages() -> None:
    harmony = reasoning_markup("openai_gptoss")
    assert harmony is not None
    assert find_opening(harmony, "<|start|>assistant") is Opening.NONE
    assert find_opening(harmony, "<|start|>assistant<|channel|>analysis<|message|>") is Opening.OPEN
    assert find_opening(harmony, "<|start|>assistant<|channel|>final<|message|>") is Opening.CLOSED
    assert answer_frame(harmony) == FRAME


def test_the_frame_of_a_constrained_text() -> None:
    assert answer_frame(THINK) == AnswerFrame(begin="<think>", end="</think>")
    assert answer_frame(THINK, Opening.OPEN) == AnswerFrame(begin="<think>", end="</think>", is_open=True)
    assert answer_frame(THINK, Opening.CLOSED) is answer_frame(None) is None
    calls = ("<tool_call>",)
    assert answer_frame(None, calls=calls) == AnswerFrame(begin="", end="", calls=calls)
    assert answer_frame(THINK, calls=calls) == AnswerFrame(begin="<think>", end="</think>", calls=calls)
    assert answer_frame(CUSTOM) == AnswerFrame(begin="", end=";;", is_open=True)
    assert answer_frame(CUSTOM, Opening.CLOSED) is None
