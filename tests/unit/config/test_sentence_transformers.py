"""Folders of sentence-transformers: both forms of a pooling's configuration; what is not understood is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.config.pooler import CLS, IDENTITY, LAST, MAX, MEAN, NORMALIZE, SIGMOID
from inflight.config.sentence_transformers import read_logit_score, read_modules
from inflight.errors import UnsupportedModelError

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.base.modules."


def write(folder: Path, modules: list[tuple[str, str]], configs: dict[str, dict[str, Any]], begin: str = OLD) -> Path:
    entries = [{"idx": i, "name": str(i), "path": path, "type": begin + kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path, config in configs.items():
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, MEAN),
        ({"pooling_mode_cls_token": True}, CLS),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, LAST),
        ({"pooling_mode": "mean"}, MEAN),
        ({"pooling_mode_max_tokens": True}, MAX),
        ({"pooling_mode": "lasttoken"}, LAST),
        ({"pooling_mode": ["cls"]}, CLS),
    ],
)
@pytest.mark.parametrize("begin", [OLD, NEW])
def test_poolings(tmp_path: Path, config: dict[str, Any], expected: str, begin: str) -> None:
    write(tmp_path, [("Transformer", ""), ("Pooling", "1_Pooling")], {"1_Pooling": config}, begin)
    spec = read_modules(tmp_path, 8)
    assert (spec.pooling_type, spec.activation, spec.head) == (expected, IDENTITY, ())


def test_dense_layers_prompts_and_lengths(tmp_path: Path) -> None:
    modules = [
        ("Transformer", ""),
        ("Pooling", "p"),
        ("Dense", "a"),
        ("Dropout", "d"),
        ("Dense", "b"),
        ("Normalize", "n"),
    ]
    first = {
        "in_features": 8,
        "out_features": 6,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    second = {"in_features": 6, "out_features": 4}
    write(tmp_path, modules, {"p": {"pooling_mode": "mean"}, "a": first, "b": second})
    prompts = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    spec = read_modules(tmp_path, 8)
    assert [(each.file, each.bias, each.activation) for each in spec.head] == [
        ("a/model.safetensors", False, "identity"),
        ("b/model.safetensors", True, "tanh"),
    ]
    assert (spec.size(8), spec.activation, spec.default_prompt) == (4, NORMALIZE, "query")
    assert dict(spec.prompts)["query"] == "find: "
    assert spec.max_length == 256


POOLING = [("Transformer", ""), ("Pooling", "p")]
MEAN_TOKENS = {"p": {"pooling_mode": "mean"}}


@pytest.mark.parametrize(
    ("modules", "configs", "text"),
    [
        ([("Transformer", ""), ("WordWeights", "w")], {}, "Transformer, WordWeights is not supported"),
        ([("Transformer", ""), ("Normalize", "")], {}, "Transformer, Normalize is not supported"),
        ([("Transformer", "")], {}, "Transformer is not supported"),
        ([], {}, "an empty list is not supported"),
        ([("Pooling", "p"), ("Transformer", "")], MEAN_TOKENS, "Pooling, Transformer is not"),
        ([*POOLING, ("Pooling", "p")], MEAN_TOKENS, "Pooling, Pooling is not"),
        ([*POOLING, ("Normalize", "n"), ("Dense", "a")], MEAN_TOKENS, "Normalize, Dense is not"),
        ([*POOLING, ("Dense", "a"), ("Pooling", "p")], MEAN_TOKENS, "Dense, Pooling is not"),
        ([("MLMTransformer", ""), ("SpladePooling", "s"), ("Dense", "a")], {}, "Dense is not"),
        (
            [*POOLING, ("Dense", "a")],
            {**MEAN_TOKENS, "a": {"in_features": 8, "out_features": 2, "module_input_name": "token_embeddings"}},
            "module_input_name='token_embeddings'",
        ),
        (POOLING, {"p": {"pooling_mode_weightedmean_tokens": True}}, "the pooling weightedmean is not supported"),
        (
            [("MLMTransformer", ""), ("SpladePooling", "s")],
            {"s": {"pooling_strategy": "sum"}},
            "pooling_strategy='sum'",
        ),
        (POOLING, {"p": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, "cls and mean"),
        (POOLING, {"p": {}}, "the pooling of no kind"),
        (POOLING, {"p": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt=false"),
        ([*POOLING, ("Dense", "a")], {**MEAN_TOKENS, "a": {"in_features": 5, "out_features": 2}}, "in_features=5, but"),
        (
            [*POOLING, ("Dense", "a")],
            {**MEAN_TOKENS, "a": {"in_features": 8, "out_features": 2, "activation_function": "x.Softsign"}},
            "activation_function='Softsign' is not supported",
        ),
        ([("Transformer", ""), ("Pooling", "../p")], {}, "outside of the model's folder"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, modules: list[tuple[str, str]], configs: dict[str, dict[str, Any]], text: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UnsupportedModelError, match=text):
        read_modules(write(folder, modules, configs), 8)


def test_what_changes_texts_or_is_code_of_others_is_refused(tmp_path: Path) -> None:
    write(tmp_path, POOLING, MEAN_TOKENS)
    read_modules(tmp_path, 8)
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "a", "document": null}}')
    with pytest.raises(UnsupportedModelError, match="the prompt 'document' is None"):
        read_modules(tmp_path, 8)
    write(tmp_path, POOLING, MEAN_TOKENS, "custom_st.")
    with pytest.raises(
        UnsupportedModelError, match=r"'custom_st\.Transformer' is not a module of sentence-transformers"
    ):
        read_modules(tmp_path, 8)


def test_older_weights_of_a_dense_layer_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [*POOLING, ("Dense", "a")], {**MEAN_TOKENS, "a": {"in_features": 8, "out_features": 2}})
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin, which is not read"):
        read_modules(tmp_path, 8)
    (tmp_path / "a" / "model.safetensors").write_bytes(b"")
    assert read_modules(tmp_path, 8).size(8) == 2


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"modules\.json cannot be read as JSON"):
        read_modules(tmp_path, 8)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="holds a dict, not a JSON list"):
        read_modules(tmp_path, 8)


def test_a_logit_score(tmp_path: Path) -> None:
    assert read_logit_score(tmp_path) is None
    modules = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    write(tmp_path, modules, {"1_LogitScore": {"true_token_id": 9, "false_token_id": 0}}, NEW)
    found = read_logit_score(tmp_path)
    assert found is not None and (found.true_token, found.false_token, found.activation) == (9, 0, "")
    settings = {
        "activation_fn": "torch.nn.modules.activation.Sigmoid",
        "prompts": {"a": "b"},
        "default_prompt_name": "a",
    }
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    found = read_logit_score(tmp_path)
    assert found is not None and (found.activation, found.default_prompt) == (SIGMOID, "a")
    write(tmp_path, [*modules, ("Dense", "2_Dense")], {})
    with pytest.raises(UnsupportedModelError, match="beside LogitScore only Transformer"):
        read_logit_score(tmp_path)
