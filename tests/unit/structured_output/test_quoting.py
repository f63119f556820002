"""Which tags behind a text would be quotations."""

from __future__ import annotations

import random

import pytest

from inflight.structured_output.quoting import Quoting

QUOTED = {
    "": False,
    "So: ": False,
    "So: `": True,
    "`a` b ": False,
    "`a\n": False,
    "```": True,
    "```html\na": True,
    "```\na\n```\n": False,
    "```\na\n``` b": True,
    "  ```\n": True,
    "a ```\n": False,
    "He says “": True,
    "He says “a”: ": False,
    "'": True,
    "«": True,
    "é": False,
}


@pytest.mark.parametrize("text", QUOTED)
def test_code_and_text_behind_quotation_marks_is_quoted(text: str) -> None:
    written = text.encode()
    for seed in range(10):
        rng, quoting, rest = random.Random(seed), Quoting(), written
        while rest:
            at = rng.randint(0, 3)
            quoting, rest = quoting.after(rest[:at]), rest[at:]
        assert quoting == Quoting().after(written)
        assert quoting.is_quoted == QUOTED[text]


def test_little_is_kept() -> None:
    assert sum(map(len, (Quoting().after(b"a" * 5000).line, Quoting().after(b"a" * 5000).last))) < 32
