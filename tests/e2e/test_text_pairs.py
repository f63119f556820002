"""Pairs of texts (cross-encoders): tokens are those of `tokenizers`, scores those of transformers, in any company."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, BertConfig, RobertaConfig

from inflight import LLM, InvalidRequestError, PoolingParams
from inflight.errors import ContextLengthExceededError
from inflight.tokenizer import text_pair
from inflight.tokenizer.cut_text import cut_encoding
from inflight.tokenizer.text_pair import PairLimits, TextPairs
from inflight.tokenizer.tokenizer import Tokenizer as OwnTokenizer
from tests.conftest import FULL
from tests.e2e.test_pooling import save

WORDS = "the fox tells anna a story about rivers and perhaps mountains in one day".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def backend(separators: int = 1) -> Tokenizer:
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    second = " ".join(["[SEP]:1"] * separators)
    pair = f"[CLS]:0 $A:0 [SEP]:0 $B:1 {second}" if separators == 1 else "[CLS] $A [SEP] [SEP] $B [SEP]"
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def text(rng: random.Random, length: int) -> str:
    return " ".join(rng.choice([*WORDS, "brook", "zebra"]) for _ in range(length))


@pytest.mark.parametrize("separators", [1, 2])
def test_tokens_are_those_of_the_library(separators: int) -> None:
    rng, truth = random.Random(4), backend(separators)
    pairs = TextPairs(OwnTokenizer(backend(separators)), 40)
    for _ in range(300 if FULL else 60):
        one, other = text(rng, rng.choice([0, 1, 3, 9, 30, 200])), text(rng, rng.choice([0, 1, 3, 9, 30, 200]))
        for most in (-1, 9, 20, 21):
            truth.no_truncation()
            lengths = [len(truth.encode(each, add_special_tokens=False).ids) for each in (one, other)]
            truth.enable_truncation(40 if most == -1 else most, strategy="longest_first")
            expected = truth.encode(one, other)
            found = pairs.encode(one, other, PairLimits(most))
            room = (40 if most == -1 else most) - truth.num_special_tokens_to_add(True)
            if room % 2 and min(lengths) > room:
                continue  # the odd token belongs to the longer text, and the end of a long text is not tokenised
            assert found.token_ids == expected.ids, (one, other, most)
            assert found.second == (expected.type_ids.index(1) if 1 in expected.type_ids else None)
    with pytest.raises(ContextLengthExceededError, match="maximum context length is 40"):
        pairs.encode(text(rng, 30), text(rng, 30), PairLimits())
    for most in (0, truth.num_special_tokens_to_add(True) + 1):
        with pytest.raises(InvalidRequestError) as refused:
            pairs.encode("a", "b", PairLimits(most))
        assert refused.value.param == "truncate_prompt_tokens"


def test_a_query_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(backend: Tokenizer, text: str, most: int) -> object:
        seen.append(text)
        return cut_encoding(backend, text, most)

    monkeypatch.setattr(text_pair, "cut_encoding", counted)
    pairs, rng = TextPairs(OwnTokenizer(backend()), 40), random.Random(5)
    documents = [text(rng, 3 + index) for index in range(20)]
    first = [pairs.encode("the fox in one day", document, PairLimits(-1)) for document in documents]
    assert seen.count("the fox in one day") == 1 and len(seen) == 21
    assert [
        TextPairs(OwnTokenizer(backend()), 40).encode("the fox in one day", each, PairLimits(-1)) for each in documents
    ] == first


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    config = (
        BertConfig(**SIZES, num_labels=1) if family == "bert" else RobertaConfig(**SIZES, num_labels=1, pad_token_id=0)
    )
    model = save(AutoModelForSequenceClassification, config, tmp_path)
    tokenizer = backend(1 if family == "bert" else 2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    rng = random.Random(6)
    query, documents = text(rng, 5), [text(rng, length) for length in (1, 4, 9, 30, 17, 300)]
    tokenizer.enable_truncation(100, strategy="longest_first")
    expected = []
    for document in documents:
        encoded = tokenizer.encode(query, document)
        inputs = {"input_ids": torch.tensor([encoded.ids])}
        if family == "bert":
            inputs["token_type_ids"] = torch.tensor([encoded.type_ids])
        with torch.no_grad():
            expected.append(float(torch.sigmoid(model(**inputs).logits[0, 0])))
    assert max(expected) - min(expected) > 1e-4, "the scores tell nothing"
    for arguments in ({}, {"max_num_seqs": 1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        fixed: dict[str, Any] = {"dtype": "float32", "distributed_executor_backend": "uni", "max_model_len": 100}
        with LLM(str(tmp_path), **fixed, **arguments) as llm:
            cut = PoolingParams(truncate_prompt_tokens=-1)
            found = [each.outputs.score for each in llm.score(query, documents, pooling_params=cut, use_tqdm=False)]
            assert found == pytest.approx(expected, abs=2e-6), arguments
            with pytest.raises(InvalidRequestError, match=r"data_2\[5\].*maximum context length is 100"):
                llm.score(query, documents, use_tqdm=False)
