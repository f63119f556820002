"""Drawings of a few shapes, or of one digit: what the model of this folder is trained and measured on.

A `Drawing` is all that `paint` needs, so the same drawing always has the same pixels. A hash of it decides whether it is for
training or held out. Torch-free; needs Pillow.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

SIDE = 128  # pixels of a side
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 30),
    "orange": (245, 140, 20),
    "purple": (140, 50, 180),
    "pink": (250, 150, 190),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
DIGITS = "0123456789"
MAX_COUNT = 5  # of figures of one form
MAX_FIGURES = 6
HELD_OUT_ONE_IN = 10

_COLOUR_NOISE = 18  # how far a channel may be from that in COLOURS
_GAP = 6  # pixels between two figures, and between a figure and the border


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        form: one of SHAPES, or of DIGITS.
        colour: one of COLOURS.
        rgb: the colour that is drawn.
        radius: of a circle around the figure, in pixels. A digit is twice as high.
        angle: by how much the figure is turned, in degrees; 0 for digits.
    """

    form: str
    colour: str
    rgb: tuple[int, int, int]
    x: int
    y: int
    radius: int
    angle: int


@dataclass(frozen=True)
class Drawing:
    background: tuple[int, int, int]
    figures: tuple[Figure, ...]

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def one_shape(rng: Random) -> Drawing:
    return _drawing(rng, [(rng.choice(SHAPES), rng.choice(list(COLOURS)))])


def different_shapes(rng: Random) -> Drawing:
    """Two to four shapes. No two have the same form or the same colour."""
    count = rng.randint(2, 4)
    return _drawing(rng, list(zip(rng.sample(SHAPES, count), rng.sample(list(COLOURS), count), strict=True)))


def equal_shapes(rng: Random) -> Drawing:
    """One to MAX_COUNT shapes of one form, and in half of the drawings one or two of another; at most MAX_FIGURES in all."""
    form = rng.choice(SHAPES)
    others = [other for other in SHAPES if other != form]
    forms = [form] * rng.randint(1, MAX_COUNT)
    if rng.random() < 0.5:
        forms += [rng.choice(others)] * rng.randint(1, min(2, MAX_FIGURES - len(forms)))
    colours = rng.sample(list(COLOURS), rng.choice((1, 1, 2, 3)))
    return _drawing(rng, [(form, rng.choice(colours)) for form in forms])


def one_digit(rng: Random) -> Drawing:
    radius = rng.randint(24, 46)
    place = (rng.randint(radius + _GAP, SIDE - radius - _GAP), rng.randint(radius + _GAP, SIDE - radius - _GAP))
    colour = rng.choice(list(COLOURS))
    return Drawing(_background(rng), (Figure(rng.choice(DIGITS), colour, _rgb(rng, colour), *place, radius, angle=0),))


def _drawing(rng: Random, figures: Sequence[tuple[str, str]]) -> Drawing:
    """`figures`: form and colour of each."""
    smallest, largest = (16, 40) if len(figures) == 1 else (15, 26) if len(figures) <= 4 else (13, 18)
    while (circles := _circles(rng, len(figures), smallest, largest)) is None:
        pass
    return Drawing(
        _background(rng),
        tuple(
            Figure(form, colour, _rgb(rng, colour), *circle, angle=rng.randint(-12, 12))
            for (form, colour), circle in zip(figures, circles, strict=True)
        ),
    )


def _circles(rng: Random, count: int, smallest: int, largest: int) -> list[tuple[int, int, int]] | None:
    """Places and radii without overlap; None if a circle has found no place in 50 tries."""
    found = list[tuple[int, int, int]]()
    for _ in range(count * 50):
        radius = rng.randint(smallest, largest)
        x, y = (rng.randint(radius + _GAP, SIDE - radius - _GAP) for _ in range(2))
        if all(math.dist((x, y), other[:2]) >= radius + other[2] + _GAP for other in found):
            found.append((x, y, radius))
            if len(found) == count:
                return found
    return None


def _background(rng: Random) -> tuple[int, int, int]:
    """White or nearly white."""
    level = rng.randint(222, 255)
    red, green, blue = (min(255, level + rng.randint(-6, 6)) for _ in range(3))
    return red, green, blue


def _rgb(rng: Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (
        max(0, min(255, channel + rng.randint(-_COLOUR_NOISE, _COLOUR_NOISE))) for channel in COLOURS[colour]
    )
    return red, green, blue


def paint(drawing: Drawing) -> Image.Image:
    """The drawing in RGB, SIDE x SIDE pixels."""
    image = Image.new("RGB", (SIDE, SIDE), drawing.background)
    canvas = ImageDraw.Draw(image)
    for figure in drawing.figures:
        _paint_figure(canvas, figure)
    return image


def _paint_figure(canvas: ImageDraw.ImageDraw, figure: Figure) -> None:
    center, radius = (figure.x, figure.y), figure.radius
    if figure.form in DIGITS:
        # A digit of Pillow's font is about 0.72 of the font's size high.
        font = _font(round(2 * radius / 0.72))
        canvas.text(center, figure.form, fill=figure.rgb, font=font, anchor="mm")
    elif figure.form == "circle":
        canvas.circle(center, radius, fill=figure.rgb)
    elif figure.form == "ring":
        canvas.circle(center, radius, outline=figure.rgb, width=max(4, radius // 3))
    else:
        canvas.polygon(_corners(figure), fill=figure.rgb)


@lru_cache(maxsize=128)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "this Pillow was built without FreeType"
    return font


def _corners(figure: Figure) -> list[tuple[float, float]]:
    """The corners of a polygon, in pixels of the drawing."""
    return [
        (
            figure.x + figure.radius * length * math.sin(math.radians(figure.angle + degrees)),
            figure.y - figure.radius * length * math.cos(math.radians(figure.angle + degrees)),
        )
        for degrees, length in _POLYGONS[figure.form]
    ]


# Corners from the centre: clockwise degrees from the top, and the share of the radius.
_POLYGONS: dict[str, list[tuple[float, float]]] = {
    "square": [(45 + 90 * corner, 1.0) for corner in range(4)],
    "triangle": [(120 * corner, 1.0) for corner in range(3)],
    "star": [(36 * corner, 0.42 if corner % 2 else 1.0) for corner in range(10)],
    # an arm is 0.6 of the radius wide: atan(0.3 / 0.954) is 17.5 degrees
    "cross": [
        (90 * arm + degrees, length) for arm in range(4) for degrees, length in ((-17.5, 1), (17.5, 1), (45, 0.42))
    ],
}
