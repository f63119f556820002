"""The draft model must know the served model's tokens, by the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config
from inflight.errors import ConfigError
from tests.support.fakes_tokenizer import save_folder, trained
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.mtp_models import write_mtp_model


def model(folder: Path, vocab_size: int, change: dict[str, int] | None = None) -> Path:
    """A model with a tokenizer. `change`: token -> its other number."""
    config = FAMILY_CONFIGS["llama"][0].to_dict()
    write_model(type(FAMILY_CONFIGS["llama"][0])(**{**config, "vocab_size": vocab_size}), folder, seed=0)
    save_folder(folder, "byte_level")
    if change:
        file = folder / "tokenizer.json"
        text = json.loads(file.read_text())
        text["model"]["vocab"] |= change
        file.write_text(json.dumps(text))
    return folder


def arguments(served: Path, draft: Path) -> EngineArgs:
    return EngineArgs(
        model=str(served),
        device="cpu",
        max_model_len=64,
        speculative_config={"method": "draft_model", "model": str(draft)},
    )


def test_padding_of_the_vocabulary_may_differ(tmp_path: Path) -> None:
    size = trained("byte_level").get_vocab_size()
    served, draft = model(tmp_path / "served", size + 9), model(tmp_path / "draft", size + 2)
    config = resolve_config(arguments(served, draft))
    assert config.draft_model is not None
    assert (config.draft_model.folder, config.draft_model.dtype) == (draft, config.model.dtype)
    alone = resolve_config(EngineArgs(model=str(served), device="cpu", max_model_len=64))
    assert alone.model.fingerprint != config.model.fingerprint  # its blocks have no keys of a draft model
    assert alone.draft_model is None


def test_the_first_other_token_is_shown(tmp_path: Path) -> None:
    vocabulary = trained("byte_level").get_vocab()
    one, other = sorted(vocabulary, key=lambda token: vocabulary[token])[40:42]
    size = len(vocabulary)
    served = model(tmp_path / "served", size)
    draft = model(tmp_path / "draft", size, {one: vocabulary[other], other: vocabulary[one]})
    with pytest.raises(ConfigError) as error:
        resolve_config(arguments(served, draft))
    assert f"token {vocabulary[one]} is {one!r} in the served model, and {other!r} in the draft model" in str(
        error.value
    )


def test_a_model_that_has_fewer_tokens_than_its_tokenizer(tmp_path: Path) -> None:
    size = trained("byte_level").get_vocab_size()
    served, draft = model(tmp_path / "served", size), model(tmp_path / "draft", size - 3)
    with pytest.raises(ConfigError, match="another vocabulary") as error:
        resolve_config(arguments(served, draft))
    assert str(size - 3) in str(error.value)


def test_a_served_model_that_makes_vectors(tmp_path: Path) -> None:
    size = trained("byte_level").get_vocab_size()
    served, draft = model(tmp_path / "served", size), model(tmp_path / "draft", size)
    file = served / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(ConfigError, match="makes vectors or scores"):
        resolve_config(arguments(served, draft))


@pytest.mark.parametrize("has_layer", [True, False])
def test_auto_is_mtp_where_the_checkpoint_has_its_layer(
    tmp_path: Path, has_layer: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = FAMILY_CONFIGS["qwen3_5"][0]
    folder = tmp_path / "model"
    if has_layer:
        write_mtp_model(config, folder, seed=0)
    else:
        write_model(config, folder, seed=0)
    args = EngineArgs(
        model=str(folder),
        device="cpu",
        max_model_len=64,
        skip_tokenizer_init=True,
        speculative_config={"method": "auto"},
    )
    with caplog.at_level("INFO", "inflight.engine.start.draft_model"):
        found = resolve_config(args)
    assert len(caplog.records) == 1
    if has_layer:
        assert found.speculative is not None and found.draft_model is not None
        assert (found.speculative.method, found.draft_model.architecture.num_layers) == ("mtp", 1)
    else:
        assert (found.speculative, found.draft_model) == (None, None)
        assert "mtp.layers.0" in caplog.text


def test_drafters_of_gemma_4_and_ernie_are_refused(tmp_path: Path) -> None:
    """Gemma 4's assistants have no keys of their own, and no code tells what ERNIE's layer computes."""
    gemma = write_model(FAMILY_CONFIGS["gemma4"][0], tmp_path / "gemma", seed=0)
    assistant = tmp_path / "assistant"
    assistant.mkdir()
    fields = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}
    text = json.loads((gemma / "config.json").read_text())
    (assistant / "config.json").write_text(json.dumps({**fields, "text_config": text, "backbone_hidden_size": 64}))
    ernie = write_model(FAMILY_CONFIGS["ernie4_5_moe"][0], tmp_path / "ernie", seed=0)

    def refusal(served: Path, drafting: dict[str, str]) -> str:
        args = EngineArgs(
            model=str(served), device="cpu", max_model_len=64, skip_tokenizer_init=True, speculative_config=drafting
        )
        with pytest.raises(ConfigError) as error:
            resolve_config(args)
        return str(error.value)

    found = refusal(gemma, {"method": "draft_model", "model": str(assistant)})
    assert "Gemma4AssistantForCausalLM) reads the keys and values of the served model" in found
    assert "Ernie4_5_MoeForCausalLM is a family without such a layer" in refusal(ernie, {"method": "ernie_mtp"})
