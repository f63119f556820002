"""Tags around the answer: left out at its two ends, kept elsewhere, the same however the text is split."""

from __future__ import annotations

import random

import pytest

from inflight.parsers.answer_tags import AnswerTags

CASES = {
    "": "",
    "a": "a",
    "<r>a</r>": "a",
    " \n<r>\na\n</r>\n": "\na",
    "<r><c>a</r>": "a",
    "a<r>b</r>c": "a<r>b</r>c",
    "<r>a</r> b</r>": "a</r> b",
    "<r>a</": "a</",
    "<": "<",
    "<r": "<r",
    "<r>": "",
    "</r>": "",
    "<r>a  \n b \n": "a  \n b \n",
    " " * 600 + "<r>a</r>": " " * 600 + "<r>a",
}


@pytest.mark.parametrize("text", CASES)
def test_tags_are_left_out_at_the_ends_only(text: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        tags = AnswerTags(("<r>", "<c>"), ("</r>",))
        pieces = []
        rest = text
        while rest:
            at = rng.randint(1, 4)
            pieces.append(tags.write(rest[:at]))
            rest = rest[at:]
        assert "".join(pieces) + tags.release() == CASES[text], pieces


def test_of_several_closing_tags_the_one_that_begins_first_counts() -> None:
    for text, shown in {"a</r></m>": "a", "a</m>": "a", "a</r> b</m>": "a</r> b", "a</r></m": "a</r></m"}.items():
        tags = AnswerTags((), ("</r></m>", "</r>", "</m>"))
        assert "".join(map(tags.write, text)) + tags.release() == shown


def test_little_is_held() -> None:
    tags = AnswerTags((), ("</r>",))
    shown = sum(len(tags.write(" ")) for _ in range(10_000))
    assert shown > 9_000
