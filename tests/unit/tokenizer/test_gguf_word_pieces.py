"""The tokenizer of BERT from a GGUF file, against the tokenizers library with BERT's own vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from tokenizers import BertWordPieceTokenizer
from tokenizers import Tokenizer as Backend

from inflight.config.gguf_parts import read_gguf
from inflight.errors import TokenizerError
from inflight.tokenizer.gguf_tokenizer import gguf_tokenizer

SPECIAL = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = """
    the a quick brown fox jump ##s ##ed over lazy dog ! , . [ ] 1 2 ##3 ##\u00e9 cafe ##ter un ##want ##able
    \u4e2d
""".split()
TEXTS = [
    "The quick brown fox jumps over the lazy dog!",
    "Unwantable caf\u00e9, [1] 123 23.",
    "\u4e2d\u4e2d the\u00a0dog\tjumped [MASK] xyz",
    "",
    "[SEP] [unused0] [a]",
]


def converted(token: str) -> str:
    """As llama.cpp's converter writes a token of BERT's vocabulary."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token


def write(path: Path, tokens: list[str], *, separator: int | None = 4, first: str = "bos") -> Path:
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list([converted(token) for token in tokens])
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL and "unused" not in token else 1 for token in tokens]
    writer.add_token_types(kinds)
    writer.add_unk_token_id(2)
    if separator is not None:
        writer.add_sep_token_id(separator)
    writer.add_pad_token_id(0)
    writer.add_uint32(f"tokenizer.ggml.{first}_token_id", 3)
    writer.add_mask_token_id(5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("capitals", "first"), [([], "bos"), (["Paris", "##X"], "cls")])
def test_equals_the_library(tmp_path: Path, capitals: list[str], first: str) -> None:
    """A vocabulary with capitals is for texts with capitals. Old files have a key for [CLS]."""
    tokens = [*SPECIAL, *PIECES, *capitals]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    truth = BertWordPieceTokenizer(vocabulary, lowercase=not capitals)
    truth.add_special_tokens([token for token in SPECIAL if "unused" not in token])
    found = gguf_tokenizer(read_gguf(write(tmp_path / "model.gguf", tokens, first=first)))
    for text in [*TEXTS, "ParisX Paris"]:
        assert found.encode(text) == truth.encode(text).ids, text
        pair = Backend.from_str(found.to_json()).encode(text, TEXTS[0])
        expected = truth.encode(text, TEXTS[0])
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)
        assert found.decode(found.encode(text), skip_special_tokens=True) == truth.decode(truth.encode(text).ids)


def test_a_file_without_a_separator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="seperator_token_id is missing"):
        gguf_tokenizer(read_gguf(write(tmp_path / "model.gguf", [*SPECIAL, *PIECES], separator=None)))
