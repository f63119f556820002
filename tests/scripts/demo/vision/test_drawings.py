"""Drawings show what the answers say, and held-out drawings are never trained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np
import pytest

from scripts.demo.vision.drawings import COLOURS, DIGITS, SHAPES, SIDE, Drawing, Figure, paint
from scripts.demo.vision.questions import KINDS, MAX_TURNS, draw_conversation, held_out

PLURALS = {"crosses": "cross", **{f"{form}s": form for form in ("shape", *SHAPES) if form != "cross"}}


def check_painted(drawing: Drawing) -> None:
    """Each figure has its colour, lies within the drawing, and touches no other."""
    pixels = np.asarray(paint(drawing), dtype=np.int64)
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    is_painted = (pixels != np.array(drawing.background)).any(axis=-1)
    for figure in drawing.figures:
        assert figure.radius < min(figure.x, figure.y) and max(figure.x, figure.y) < SIDE - figure.radius
        inside = (
            np.hypot(rows - figure.y, columns - figure.x) <= figure.radius * (1.3 if figure.form in DIGITS else 1) + 2
        )
        share = (inside & (pixels == np.array(figure.rgb)).all(axis=-1)).sum() / inside.sum()
        assert 0.08 < share < 1.0, figure
        assert min(COLOURS, key=lambda name: math.dist(COLOURS[name], figure.rgb)) == figure.colour
        is_painted &= ~inside
    assert not is_painted.any(), "something is painted outside of the figures"
    for one, other in combinations(drawing.figures, 2):
        assert math.dist((one.x, one.y), (other.x, other.y)) > one.radius + other.radius + 4


def right_answers(text: str, figures: Sequence[Figure]) -> list[str]:
    """`text`: a question in lower case."""
    if asked := re.search(r"(?:how many|count the) (\w+)", text):
        form = PLURALS[asked[1]]
        count = sum(form in ("shape", figure.form) for figure in figures)
        return [f"There is 1 {form}." if count == 1 else f"There are {count or 'no'} {asked[1]}."]
    if asked := re.search(r"colou?r (?:is|does) the (\w+)", text):
        return [f"The {asked[1]} is {figure.colour}." for figure in figures if asked[1] in (figure.form, "digit")]
    if (asked := re.fullmatch(r"(?:which shape|what) is (\w+)\??", text)) and asked[1] in COLOURS:
        return [f"The {figure.form} is {asked[1]}." for figure in figures if figure.colour == asked[1]]
    if figures[0].form in DIGITS:
        is_short = "digit" in text or "number" in text
        return [
            f"The digit is {figures[0].form}." if is_short else f"The digit {figures[0].form} in {figures[0].colour}."
        ]
    if len(figures) > 1:
        return [f"There are {len(figures)} shapes."]
    return [f"{article} {figures[0].colour} {figures[0].form}." for article in ("A", "An")]


def test_what_is_painted_is_what_the_answers_say() -> None:
    rng = Random(3)
    kinds = set()
    for _ in range(60):
        conversation = draw_conversation(rng, held_out=False)
        figures = conversation.drawing.figures
        check_painted(conversation.drawing)
        for question in conversation.questions:
            kinds.add(question.kind)
            assert question.answer in right_answers(question.text.lower(), figures)
    assert kinds == set(KINDS)


def test_held_out_drawings_are_never_trained() -> None:
    rng = Random(0)
    trained = [draw_conversation(rng, held_out=False) for _ in range(300)]
    assert not any(each.drawing.is_held_out for each in trained)
    assert {len(each.questions) for each in trained} == set(range(1, MAX_TURNS + 1))
    for kind in KINDS:
        asked = held_out(kind, 20)
        assert asked == held_out(kind, 20), "another run evaluates other drawings"
        assert len({each.drawing for each in asked}) == 20
        assert all(each.drawing.is_held_out and [q.kind for q in each.questions] == [kind] for each in asked)


@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_can_be_guessed(kind: str) -> None:
    """The model has to look: a question has several answers, and none of them is right for most drawings."""
    answers = [each.questions[0].answer for each in held_out(kind, 100)]
    assert len(set(answers)) >= 6
    assert max(map(answers.count, answers)) < 40
