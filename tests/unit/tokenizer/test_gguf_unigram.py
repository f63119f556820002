"""The Unigram tokenizer from a GGUF file, as llama.cpp's converter writes that of XLM-RoBERTa, against transformers' tokenizer
of the same sentencepiece model, and sentencepiece itself."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from transformers import XLMRobertaTokenizer

from inflight.config.gguf_parts import read_gguf
from inflight.errors import TokenizerError
from inflight.tokenizer.gguf_tokenizer import gguf_tokenizer
from tests.unit.tokenizer.test_gguf_tokenizer import CORPUS

_TYPE = gguf.TokenType
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces, \t a tab,\r\n lines\n\n\n and an end   ",
    "\u3000wide\u3000spaces\u00a0and\u200bothers\u2009",
    "ﬁne ligatures, Ｆｕｌｌｗｉｄｔｈ, ½ ① ㎏ ﷺ",
    "e\u0301 is é, a\u0308 is ä; \u0e33 \u1112\u1161\u11ab 한글",
    "\u2581already\u2581there",
    "unknown: \U00010348\U0001f9ff \u13a0\u13a0 x",
    "</s> in a text <s> and <unk> <pad>",
    "\x00\x07 control \ufeff characters \ufffd",
    "[PAD5] [PAD12]",
    "مرحبا بالعالم 🙂‍👩‍👧 ไทย ✌🏽",
]


@cache
def trained() -> bytes:
    """A sentencepiece model with the rules of XLM-RoBERTa for normalisation (NFKC and spaces)."""
    stream = io.BytesIO()
    words = " ".join(TEXTS[: len(CORPUS)]).split()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([*CORPUS, *words * 3]),
        model_writer=stream,
        vocab_size=200,
        model_type="unigram",
        character_coverage=0.98,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    return stream.getvalue()


def realigned() -> tuple[list[str], list[float], list[int], bytes]:
    """Tokens, scores, types and rules, as the converter writes them: with the four tokens of XLM-RoBERTa in front, and one that
    is not in use at the end, where the model has <mask>."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()  # Any: made by protobuf
    proto.ParseFromString(trained())
    pieces = list(proto.pieces)[3:]
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *(piece.piece for piece in pieces), "[PAD12]"]
    scores = [0.0] * 4 + [piece.score for piece in pieces] + [-10000.0]
    types = [_TYPE.CONTROL] * 3 + [_TYPE.UNKNOWN] + [_TYPE.NORMAL] * len(pieces) + [_TYPE.UNUSED]
    return tokens, scores, types, proto.normalizer_spec.precompiled_charsmap


def write(path: Path, *, no_unknown: bool = False, charsmap: bytes | None = None, removes: bool = True) -> Path:
    tokens, scores, usual, rules = realigned()
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([1] * len(usual) if no_unknown else usual)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(removes)
    writer.add_precompiled_charsmap(rules if charsmap is None else charsmap)
    for name, token_id in (("bos", 0), ("eos", 2), ("unk", 3), ("sep", 2), ("pad", 1), ("mask", len(tokens) - 1)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def truth_of(folder: Path) -> Backend:
    (folder / "sentencepiece.bpe.model").write_bytes(trained())
    slow = XLMRobertaTokenizer.from_pretrained(folder)
    backend: Backend = slow.backend_tokenizer
    return backend


@pytest.mark.parametrize("removes", [True, False])
def test_equals_that_of_transformers(tmp_path: Path, removes: bool) -> None:
    """New converters write another setting as remove_extra_whitespaces, which changes nothing."""
    truth = truth_of(tmp_path)
    found = gguf_tokenizer(read_gguf(write(tmp_path / "model.gguf", removes=removes)))
    backend = Backend.from_str(found.to_json())
    for text in TEXTS:
        assert found.encode(text) == truth.encode(text).ids, text
        pair = backend.encode(text, TEXTS[0])
        expected = truth.encode(text, TEXTS[0])
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids), text


def test_the_scores_of_sentencepiece(tmp_path: Path) -> None:
    """Without the tokens around a text, and moved by one, the pieces are those of sentencepiece."""
    pieces = sentencepiece.SentencePieceProcessor(model_proto=trained())
    found = gguf_tokenizer(read_gguf(write(tmp_path / "model.gguf")))
    for text in TEXTS:
        if "<" in text or "[PAD" in text:
            continue  # special tokens, which sentencepiece does not look for
        expected = [piece + 1 if piece else 3 for piece in pieces.EncodeAsIds(text)]
        assert found.encode(text)[1:-1] == expected, text


@pytest.mark.parametrize(
    ("change", "words"), [({"no_unknown": True}, "unknown token"), ({"charsmap": b"\x01\x02"}, r"model\.gguf")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        gguf_tokenizer(read_gguf(write(tmp_path / "model.gguf", **change)))
