"""Questions about drawings, each with its one right answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from scripts.demo.vision.drawings import (
    DIGITS,
    SHAPES,
    Drawing,
    Figure,
    different_shapes,
    equal_shapes,
    one_digit,
    one_shape,
)

KINDS = ("shape", "colour", "count", "digit")
MAX_TURNS = 4

_WHAT = ("What is this?", "What do you see?", "What is shown?", "What is in the picture?", "Describe the picture.")
_COLOUR = ("What colour is the {form}?", "What color is the {form}?", "Which colour does the {form} have?")
_WHICH = ("Which shape is {colour}?", "What is {colour}?")
_COUNT = ("How many {forms} are there?", "How many {forms} do you see?", "Count the {forms}.")
_DIGIT = ("Which digit is shown?", "Which digit is this?", "What digit is it?", "What number is this?")

_DRAWINGS: tuple[tuple[Callable[[Random], Drawing], int], ...] = (  # and how often each is drawn
    (one_shape, 3),
    (different_shapes, 3),
    (equal_shapes, 6),
    (one_digit, 4),
)


@dataclass(frozen=True)
class Question:
    """`kind`: one of KINDS."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Questions about one drawing, in the order in which they are asked."""

    drawing: Drawing
    questions: tuple[Question, ...]


def draw_drawing(rng: Random, *, held_out: bool) -> Drawing:
    """A drawing of the given side of the split."""
    draw = rng.choices([draw for draw, _ in _DRAWINGS], [weight for _, weight in _DRAWINGS])[0]
    while (drawing := draw(rng)).is_held_out != held_out:
        pass
    return drawing


def draw_conversation(rng: Random, *, held_out: bool, max_turns: int = MAX_TURNS) -> Conversation:
    """A drawing of the given side of the split, and one to `max_turns` questions about it."""
    drawing = draw_drawing(rng, held_out=held_out)
    questions = list(_questions(drawing, rng))
    rng.shuffle(questions)
    return Conversation(drawing, tuple(questions[: rng.randint(1, max_turns)]))


def draw_question(kind: str, rng: Random, *, held_out: bool) -> Conversation:
    """A drawing, and one question of this kind."""
    while True:
        drawing = draw_drawing(rng, held_out=held_out)
        if questions := [question for question in _questions(drawing, rng) if question.kind == kind]:
            return Conversation(drawing, (rng.choice(questions),))


def held_out(kind: str, count: int) -> list[Conversation]:
    """`count` conversations of one question about different held-out drawings, the same ones in every run."""
    rng = Random(f"evaluate {kind}")
    found: dict[Drawing, Conversation] = {}
    while len(found) < count:
        conversation = draw_question(kind, rng, held_out=True)
        found.setdefault(conversation.drawing, conversation)
    return list(found.values())


def _questions(drawing: Drawing, rng: Random) -> Iterator[Question]:
    """Everything that can be asked about the drawing, each in one wording."""
    figures = drawing.figures
    if figures[0].form in DIGITS:
        yield from _about_digit(figures[0], rng)
        return
    if len(figures) == 1:
        article = "An" if figures[0].colour[0] in "aeiou" else "A"
        yield _question("shape", rng.choice(_WHAT), f"{article} {figures[0].colour} {figures[0].form}.", rng)
    else:
        yield _question("count", rng.choice(_WHAT), _number("shape", len(figures)), rng)
    forms = Counter(figure.form for figure in figures)
    colours = Counter(figure.colour for figure in figures)
    for figure in figures:
        if forms[figure.form] == 1:
            text = rng.choice(_COLOUR).format(form=figure.form)
            yield _question("colour", text, f"The {figure.form} is {figure.colour}.", rng)
        if colours[figure.colour] == 1:
            text = rng.choice(_WHICH).format(colour=figure.colour)
            yield _question("shape", text, f"The {figure.form} is {figure.colour}.", rng)
    absent = rng.choice([form for form in SHAPES if form not in forms])
    for form in (*forms, "shape", absent):
        count = len(figures) if form == "shape" else forms[form]
        text = rng.choice(_COUNT).format(forms=_plural(form))
        yield _question("count", text, _number(form, count), rng)


def _about_digit(figure: Figure, rng: Random) -> Iterator[Question]:
    yield _question("digit", rng.choice(_DIGIT), f"The digit is {figure.form}.", rng)
    yield _question("digit", rng.choice(_WHAT), f"The digit {figure.form} in {figure.colour}.", rng)
    yield _question("colour", rng.choice(_COLOUR).format(form="digit"), f"The digit is {figure.colour}.", rng)


def _number(form: str, count: int) -> str:
    if count == 1:
        return f"There is 1 {form}."
    return f"There are {count or 'no'} {_plural(form)}."


def _plural(form: str) -> str:
    return f"{form}es" if form.endswith("s") else f"{form}s"


def _question(kind: str, text: str, answer: str, rng: Random) -> Question:
    """Now and then the text is as people type: no mark at the end, or no capital at the start."""
    if rng.random() < 0.15:
        text = text.rstrip("?.")
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return Question(kind, text, answer)
