"""`TowerHead`: what the tower learns to say about a drawing before the decoder learns to answer questions.

Few tokens of a conversation say something about its drawing, so a tower learns slowly from conversations alone. In the first
part of the training a linear layer on the mean of the image's embeddings predicts the number and the colour of each form, and
the digit. It is no part of the trained model.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.demo.vision.drawings import COLOURS, DIGITS, MAX_FIGURES, SHAPES, Drawing

_COLOUR_NAMES = list(COLOURS)
_FORMS = (*SHAPES, "digit")
_NUM_COUNTS = MAX_FIGURES + 1
_NUM_COLOURS = len(COLOURS) + 1  # and none
_NUM_DIGITS = len(DIGITS) + 1  # and none
_SIZES = [len(SHAPES) * _NUM_COUNTS, len(_FORMS) * _NUM_COLOURS, _NUM_DIGITS]
_UNKNOWN = -100


class TowerHead(nn.Module):
    def __init__(self, size: int) -> None:
        """`size`: of an embedding."""
        super().__init__()
        self.linear = nn.Linear(size, sum(_SIZES))

    def loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings [batch, num_image_tokens, size], labels [batch, num_labels] -> the mean cross entropy of a drawing."""
        counts, colours, digits = self.linear(embeddings.float().mean(1)).split(_SIZES, dim=1)
        logits = (
            counts.unflatten(1, (len(SHAPES), _NUM_COUNTS)),
            colours.unflatten(1, (len(_FORMS), _NUM_COLOURS)),
            digits[:, None],
        )
        parts = labels.split([each.shape[1] for each in logits], dim=1)  # type: ignore[no-untyped-call]
        losses = [
            F.cross_entropy(each.flatten(0, 1), part.flatten(), ignore_index=_UNKNOWN, reduction="sum")
            for each, part in zip(logits, parts, strict=True)
        ]
        return torch.stack(losses).sum() / len(labels)


def labels_of(drawing: Drawing) -> list[int]:
    """The number of each shape; the colour of each of _FORMS, counted from 1, if there is one figure of it, 0 if there is none,
    _UNKNOWN if there are several; the digit, counted from 1, or 0."""
    forms = ["digit" if figure.form in DIGITS else figure.form for figure in drawing.figures]
    counts = Counter(forms)
    colours = {
        form: 1 + _COLOUR_NAMES.index(figure.colour) for form, figure in zip(forms, drawing.figures, strict=True)
    }
    first = drawing.figures[0].form
    return [
        *(counts[form] for form in SHAPES),
        *(_UNKNOWN if counts[form] > 1 else colours.get(form, 0) for form in _FORMS),
        1 + DIGITS.index(first) if first in DIGITS else 0,
    ]
