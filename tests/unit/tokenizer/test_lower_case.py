"""do_lower_case of sentence-transformers: tokens are those of `str.lower`, and only in folders of that library."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.errors import UnsupportedModelError
from inflight.tokenizer.source import read_tokenizer
from tests.support.fakes_tokenizer import save_folder

TEXTS = ("Hello WORLD", "\u039f\u0394\u039f\u03a3", "\u0130stanbul 12 \u212a", "", "all small")


def test_texts_become_small(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", "byte_level")
    plain = read_tokenizer(folder, None)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert read_tokenizer(folder, None).encode(TEXTS[0]) == plain.encode(TEXTS[0]) != plain.encode(TEXTS[0].lower())
    (folder / "modules.json").write_text("[]")
    small = read_tokenizer(folder, None)
    for text in TEXTS:
        assert small.encode(text) == plain.encode(text.lower())
        assert small.encode_cut(text, 5) == plain.encode_cut(text.lower(), 5)
        assert small.fewest_tokens(text) <= len(small.encode(text))
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": 1}')
    with pytest.raises(UnsupportedModelError, match="do_lower_case"):
        read_tokenizer(folder, None)
