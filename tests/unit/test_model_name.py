"""Names of models as people copy them: which model they mean, and which of them are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.errors import ConfigError, ModelNotFoundError
from inflight.model_name import read_model_name

HUBS = ("https://huggingface.co/", "http://huggingface.co/", "https://www.huggingface.co/", "huggingface.co/", "hf.co/")


@pytest.mark.parametrize("hub", [*HUBS, "https://hf.co/", "hf://", "HTTPS://HuggingFace.co/"])
@pytest.mark.parametrize(
    ("page", "model", "revision"),
    [
        ("org/name", "org/name", None),
        ("org/name/", "org/name", None),
        ("org/name?library=vllm", "org/name", None),
        ("org/name#usage", "org/name", None),
        ("org/name/tree/main", "org/name", None),
        ("org/name/tree/v1.0", "org/name", "v1.0"),
        ("org/name/tree/main/folder", "org/name", None),
        ("org/name/blob/main/config.json", "org/name", None),
        ("org/name/commit/0123abc", "org/name", "0123abc"),
        ("org/name/discussions/3", "org/name", None),
        ("org/name/blob/main/m-Q8_0.gguf", "org/name:m-Q8_0.gguf", None),
        ("org/name/resolve/v2/m-Q8_0.gguf?download=true", "org/name:m-Q8_0.gguf", "v2"),
        ("org/name/resolve/main/folder/m.gguf", "org/name:folder/m.gguf", None),
        ("org/name:Q4_K_M", "org/name:Q4_K_M", None),
    ],
)
def test_a_page_of_the_hub_is_its_model(hub: str, page: str, model: str, revision: str | None) -> None:
    assert read_model_name(hub + page) == (model, revision)
    args = EngineArgs(model=f" {hub}{page} ")
    assert (args.model, args.revision) == (model, revision)
    assert EngineArgs(model=hub + page, revision="mine").revision == "mine"
    assert EngineArgs(model=args.model, revision=args.revision) == args


@pytest.mark.parametrize("hub", HUBS)
@pytest.mark.parametrize("page", ["", "org", "datasets/org/name", "spaces/org/name", "docs/transformers/index"])
def test_other_pages_of_the_hub_are_refused(hub: str, page: str) -> None:
    for error in (ModelNotFoundError, ConfigError):
        with pytest.raises(error, match="no page of a model"):
            EngineArgs(model=hub + page)


@pytest.mark.parametrize("address", ["https://example.com/m.gguf", "s3://bucket/model", "http://localhost:8000/v1"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no address on the Hugging Face hub"):
        read_model_name(address)


@pytest.mark.parametrize("name", ["org/name", "./folder", "/a/b", "~/m", "gpt2", "qwen3:0.6b", "org/name:Q8_0", "a b"])
def test_all_other_names_stay(name: str) -> None:
    assert read_model_name(name) == (name, None)


def test_the_embedded_model_has_a_name_unless_a_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_model_name("embedded") == (None, None)
    assert EngineArgs(model="embedded") == EngineArgs()
    for name in ("embedded", "hf.co/org/name"):
        (tmp_path / name).mkdir(parents=True)
        assert read_model_name(name) == (name, None)


def test_a_hub_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example.com")
    assert read_model_name("https://hub.example.com/org/name").model == "org/name"
    assert read_model_name("file:///models/my%20model").model == "/models/my model"
