"""`TowerHead`: what the tower learns to say about a drawing before the decoder learns to answer questions.

Few tokens of a conversation say something about its drawing, so a tower learns slowly from conversations alone. In the first
part of the training, linear layers on each embedding of the image predict what is at the place of the drawing that the
embedding stands for: form, colour and digit of the figure there, and whether its centre is there. So one embedding holds form
and colour of a figure together, and figures can be counted. The head is no part of the trained model.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.demo.vision.drawings import COLOURS, DIGITS, SHAPES, SIDE, Drawing, Figure

_COLOUR_NAMES = list(COLOURS)
_FORMS = [*SHAPES, "digit"]
_SIZES = [1 + len(_FORMS), 1 + len(_COLOUR_NAMES), 1 + len(DIGITS), 2]  # 1: nothing is there


class TowerHead(nn.Module):
    def __init__(self, size: int) -> None:
        """`size`: of an embedding."""
        super().__init__()
        self.linear = nn.Linear(size, sum(_SIZES))

    def forward(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """embeddings [batch, num_places, size] -> logits [batch, num_places, number of classes] for each label."""
        logits: Tensor = self.linear(embeddings.float())
        return logits.split(_SIZES, dim=-1)  # type: ignore[no-untyped-call, no-any-return]

    def loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings [batch, num_places, size], labels [batch, num_places, 4] -> the cross entropy of a place's labels, which
        is their sum, averaged over the places."""
        pairs = zip(self(embeddings), labels.unbind(-1), strict=True)
        return torch.stack([F.cross_entropy(logits.flatten(0, 1), label.flatten()) for logits, label in pairs]).sum()


def labels_of(drawing: Drawing, places_a_side: int) -> list[list[int]]:
    """For each place, row by row: form, colour and digit of the nearest figure, counted from 1, and 0 if none reaches the
    place, or if the figure is no digit; 1 if the centre of a figure is there."""
    width = SIDE / places_a_side
    return [
        _labels_of_place(drawing, (column * width, row * width), width)
        for row in range(places_a_side)
        for column in range(places_a_side)
    ]


def _labels_of_place(drawing: Drawing, corner: tuple[float, float], width: float) -> list[int]:
    left, top = corner

    def distance(figure: Figure) -> float:
        """From the middle of the place to the circle around the figure; below 0 within it."""
        return math.dist((figure.x, figure.y), (left + width / 2, top + width / 2)) - figure.radius

    has_centre = [left <= each.x < left + width and top <= each.y < top + width for each in drawing.figures]
    figure = min(drawing.figures, key=distance)
    if any(has_centre):
        figure = drawing.figures[has_centre.index(True)]
    elif distance(figure) > width / 2:
        return [0, 0, 0, 0]
    is_digit = figure.form in DIGITS
    return [
        1 + _FORMS.index("digit" if is_digit else figure.form),
        1 + _COLOUR_NAMES.index(figure.colour),
        1 + DIGITS.index(figure.form) if is_digit else 0,
        int(any(has_centre)),
    ]
