"""Rerankers that score with the logits of tokens, against the logits of transformers on random weights, in their template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from inflight import LLM, ConfigError, InvalidRequestError, PoolingParams
from tests.e2e.openai_server import demo_args, running_server
from tests.e2e.test_pooling import qwen3, save

SPECIAL = ("<|im_start|>", "<|im_end|>")
QUERY = "Which planet is red?"
DOCUMENTS = ["Mars is called the red planet.", "no", "Berlin has\nmany lakes, and yes, many trees.", "", "é" * 40]
USUAL = "Given a web search query, retrieve relevant passages that answer the query"
RERANK = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
QWEN3_OVERRIDES = {**RERANK, "is_original_qwen3_reranker": True}
OF_PAIRS = (
    "{% for m in messages %}{% if m['role'] in ('system', 'query', 'document') %}[{{ m['role'] }}] {{ m['content'] }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


def in_template(query: str, document: str, instruction: str = USUAL) -> str:
    """The prompt of Qwen3-Reranker, as its page shows it."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        f'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def write_tokenizer(folder: Path, template: str = "") -> Tokenizer:
    """A token for each byte, and some for words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["no", "yes"]
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *alphabet, "n", "o", *words, "ye"])}
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(vocabulary))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("n", "o"), ("y", "e"), ("ye", "s")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[1], **({"chat_template": template} if template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@torch.no_grad()
def logits(model: PreTrainedModel, tokenizer: Tokenizer, text: str) -> np.ndarray[Any, Any]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return model(torch.tensor([ids])).logits[0, -1].double().numpy()  # type: ignore[no-any-return]


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def engine(folder: Path, **arguments: Any) -> LLM:
    fixed = {"dtype": "float32", "distributed_executor_backend": "uni", "max_model_len": 1024, "max_num_seqs": 8}
    return LLM(str(folder), **{**fixed, **arguments})


def scores(llm: LLM, *texts: Any, **arguments: Any) -> list[float]:
    return [each.outputs.score for each in llm.score(*texts, use_tqdm=False, **arguments)]


def make(folder: Path, *, tied: bool, template: str = "") -> tuple[PreTrainedModel, Tokenizer]:
    folder.mkdir(exist_ok=True)
    config = qwen3(tie_word_embeddings=tied, max_position_embeddings=2048)
    return save(AutoModelForCausalLM, config, folder), write_tokenizer(folder, template)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_reranker_as_vllms_users_start_it(tmp_path: Path, tied: bool) -> None:
    model, tokenizer = make(tmp_path / "model", tied=tied)
    yes, no = (tokenizer.token_to_id(each) for each in ("yes", "no"))

    def truth(document: str, instruction: str = USUAL) -> float:
        found = logits(model, tokenizer, in_template(QUERY, document, instruction))
        return sigmoid(found[yes] - found[no])

    expected = [truth(document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 1e-3, "the scores tell nothing"
    for arguments in ({}, {"max_num_batched_tokens": 32}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with engine(tmp_path / "model", hf_overrides=QWEN3_OVERRIDES, **arguments) as llm:
            assert scores(llm, QUERY, DOCUMENTS) == pytest.approx(expected, abs=2e-6), arguments
            asked = scores(llm, QUERY, DOCUMENTS, instruction="Find a planet.")
            assert asked == pytest.approx([truth(each, "Find a planet.") for each in DOCUMENTS], abs=2e-6)
            # texts that are in the template already
            whole = in_template("QUERY", "DOCUMENT")
            before, after = whole.split("<Document>: DOCUMENT")
            ready = [f"<Document>: {document}{after}" for document in DOCUMENTS]
            assert scores(llm, before.replace("QUERY", QUERY), ready) == pytest.approx(expected, abs=2e-6)
            raw = llm.score(
                QUERY, DOCUMENTS[0], pooling_params=PoolingParams(task="classify", use_activation=False), use_tqdm=False
            )
            assert sigmoid(raw[0].outputs.score) == pytest.approx(expected[0], abs=2e-6)


def test_a_qwen3_reranker_is_known_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    model, tokenizer = make(folder, tied=True)
    found = logits(model, tokenizer, in_template(QUERY, DOCUMENTS[0]))
    expected = sigmoid(found[tokenizer.token_to_id("yes")] - found[tokenizer.token_to_id("no")])
    with engine(folder) as llm:
        assert scores(llm, QUERY, DOCUMENTS[0]) == pytest.approx([expected], abs=2e-6)
        with pytest.raises(InvalidRequestError, match="generates no text"):
            llm.generate("a", use_tqdm=False)
    with engine(folder, runner="generate") as llm:
        assert llm.generate("a", use_tqdm=False)
    with engine(folder, convert="embed", runner="pooling") as llm:
        assert len(llm.embed("a", use_tqdm=False)[0].outputs.embedding) == 64


def test_a_converted_qwen3_reranker_has_the_template(tmp_path: Path) -> None:
    """Its layer `score` is in the checkpoint, and nothing but its name says how it was trained."""
    folder = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    folder.mkdir()
    model = save(AutoModelForSequenceClassification, qwen3(num_labels=1, max_position_embeddings=2048), folder)
    tokenizer = write_tokenizer(folder)
    ids = tokenizer.encode(in_template(QUERY, DOCUMENTS[0]), add_special_tokens=False).ids
    with torch.no_grad():
        expected = float(torch.sigmoid(model(torch.tensor([ids])).logits[0, 0]))
    with engine(folder) as llm:
        assert scores(llm, QUERY, DOCUMENTS[0]) == pytest.approx([expected], abs=2e-6)


@pytest.mark.parametrize("false_token", [None, "no"])
def test_a_logit_score_of_sentence_transformers(tmp_path: Path, false_token: str | None) -> None:
    """With its chat template for pairs, the variables of that template, and a prompt as the message "system"."""
    model, tokenizer = make(tmp_path / "model", tied=False, template=OF_PAIRS)
    write_modules(tmp_path / "model", tokenizer, false_token)
    expected = []
    for document in DOCUMENTS:
        text = f"[system] Judge it.\n[query] {QUERY}\n[document] {document}\nAnswer:"
        found = logits(model, tokenizer, text)
        expected.append(
            found[tokenizer.token_to_id("yes")] - (found[tokenizer.token_to_id("no")] if false_token else 0)
        )
    with engine(tmp_path / "model") as llm:
        assert scores(llm, QUERY, DOCUMENTS) == pytest.approx(expected, abs=2e-5)


def write_modules(folder: Path, tokenizer: Tokenizer, false_token: str | None) -> None:
    (folder / "1_LogitScore").mkdir()
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
        "1_LogitScore/config.json": {
            "true_token_id": tokenizer.token_to_id("yes"),
            "false_token_id": tokenizer.token_to_id(false_token) if false_token else None,
        },
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {
                "text": {"method": "forward", "method_output_name": "logits"},
                "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
            },
            "module_output_name": "causal_logits",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        "config_sentence_transformers.json": {
            "model_type": "CrossEncoder",
            "prompts": {"judge": "Judge it."},
            "default_prompt_name": "judge",
            "activation_fn": "torch.nn.modules.linear.Identity",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def test_each_token_may_be_a_class(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "model", tied=True)
    found = logits(model, tokenizer, "A text")
    tokens = ["no", "yes", "q"]
    of_tokens = np.exp([found[tokenizer.token_to_id(each)] for each in tokens])
    overrides = {**RERANK, "classifier_from_token": tokens, "method": "no_post_processing"}
    with engine(tmp_path / "model", hf_overrides=overrides) as llm:
        output = llm.classify("A text", use_tqdm=False)[0].outputs
        np.testing.assert_allclose(output.probs, of_tokens / of_tokens.sum(), atol=1e-6)
        with pytest.raises(InvalidRequestError, match="no score for a pair"):
            llm.score("a", "b", use_tqdm=False)
    one = {**RERANK, "classifier_from_token": ["yes"]}
    given = "{% for m in messages %}{% if m.role == 'query' or m.role == 'document' %}<{{ m.content }}>{% endif %}{% endfor %}"
    with engine(tmp_path / "model", hf_overrides=one, chat_template=given) as llm:
        found = logits(model, tokenizer, "<a><b>")
        assert scores(llm, "a", "b") == pytest.approx([sigmoid(found[tokenizer.token_to_id("yes")])], abs=2e-6)


def test_a_long_document_is_cut_and_the_templates_end_stays(tmp_path: Path) -> None:
    model, tokenizer = make(tmp_path / "model", tied=True)
    yes, no = (tokenizer.token_to_id(each) for each in ("yes", "no"))
    document = "yes no " * 5_000
    frame = len(tokenizer.encode(in_template(QUERY, ""), add_special_tokens=False).ids)
    with engine(tmp_path / "model", hf_overrides=QWEN3_OVERRIDES) as llm:
        cut = PoolingParams(truncate_prompt_tokens=frame + 21)
        [output] = llm.score(QUERY, document, pooling_params=cut, use_tqdm=False)
        kept = tokenizer.decode(tokenizer.encode(document, add_special_tokens=False).ids[:21])
        text = in_template(QUERY, kept)
        assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False).ids
        found = logits(model, tokenizer, text)
        assert output.outputs.score == pytest.approx(sigmoid(found[yes] - found[no]), abs=2e-6)
        [output] = llm.score(QUERY, document, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
        assert len(output.prompt_token_ids) == 1024
        with pytest.raises(InvalidRequestError, match=r"maximum context length is 1024 tokens.*truncate_prompt_tokens"):
            llm.score(QUERY, document, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="the query in the template"):
            llm.score(QUERY * 60, "a", pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({**RERANK, "classifier_from_token": ["no", "perhaps"]}, "has no token 'perhaps'"),
        ({**QWEN3_OVERRIDES, "classifier_from_token": ["yes"]}, "has 1 tokens"),
        ({**RERANK, "method": "sum"}, "method='sum' is not one of"),
        ({**RERANK, "classifier_from_token": "no"}, "not a list of tokens"),
    ],
)
def test_wrong_fields_are_refused(tmp_path: Path, overrides: dict[str, Any], text: str) -> None:
    make(tmp_path / "model", tied=True)
    with pytest.raises(ConfigError, match=text):
        engine(tmp_path / "model", hf_overrides=overrides)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, list[float], Path]]:
    folder = tmp_path_factory.mktemp("http") / "model"
    make(folder, tied=True)
    with engine(folder, hf_overrides=QWEN3_OVERRIDES) as llm:
        expected = scores(llm, QUERY, DOCUMENTS)
    args = demo_args(model=str(folder), hf_overrides=QWEN3_OVERRIDES, max_model_len=1024)
    with running_server(args) as server, httpx.Client(base_url=server.url, timeout=60) as made:
        yield made, expected, folder


def test_http_ranks_in_the_same_template(client: tuple[httpx.Client, list[float], Path]) -> None:
    http, expected, _ = client
    for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"), ("queries", "items")):
        answer = http.post("/score", json={names[0]: QUERY, names[1]: DOCUMENTS})
        assert [each["score"] for each in answer.json()["data"]] == pytest.approx(expected, abs=1e-6)
    ranked = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert {each["index"]: each["relevance_score"] for each in ranked} == pytest.approx(
        dict(enumerate(expected)), abs=1e-6
    )
    for name in ("instruction", "instruct"):
        other = http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, name: "Find a planet."}).json()
        assert [each["relevance_score"] for each in other["results"]] != [each["relevance_score"] for each in ranked]
    long = {"query": QUERY, "documents": ["yes no " * 400], "max_tokens_per_doc": 9}
    short = {"query": QUERY, "documents": ["yes no yes no yes no yes no y"]}
    counts = [http.post("/rerank", json=each).json()["usage"]["prompt_tokens"] for each in (long, short)]
    assert counts[0] <= counts[1]
