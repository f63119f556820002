"""An EAGLE head in a folder of its own: what the engine's configuration becomes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.engine.start.eagle_head import kind_of_model
from inflight.engine.start.model_files import resolve_config
from inflight.errors import ConfigError
from tests.support.eagle_models import served_config, write_head
from tests.support.model_zoo import FALLBACK_CONFIGS, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    served = write_model(served_config(), root / "served", seed=0)
    return served, write_head(served, root / "head", "eagle3", seed=1, head_size=60)


def resolved(served: Path, head: Path, **more: Any) -> EngineConfig:
    args = EngineArgs(
        model=str(served),
        device="cpu",
        max_model_len=64,
        skip_tokenizer_init=True,
        speculative_config={"model": str(head), **more},
    )
    return resolve_config(args)


def test_the_served_model_shows_what_the_head_reads(folders: tuple[Path, Path]) -> None:
    """The method is told by the head's config.json."""
    config = resolved(*folders)
    alone = resolve_config(EngineArgs(model=str(folders[0]), device="cpu", max_model_len=64, skip_tokenizer_init=True))
    assert config.speculative is not None and config.draft_model is not None
    assert config.speculative.method == "eagle3"
    assert config.model.architecture.captured == (2, 3, 4)
    assert (config.draft_model.folder, config.draft_model.dtype) == (folders[1], config.model.dtype)
    assert config.model.fingerprint != alone.model.fingerprint  # its blocks have the head's keys, too
    assert alone.model.architecture.captured == ()


def test_a_shorter_head(folders: tuple[Path, Path], tmp_path: Path) -> None:
    head = write_head(folders[0], tmp_path / "head", "eagle3", seed=1, fields={"max_position_embeddings": 48})
    config = resolved(folders[0], head)
    assert config.draft_model is not None
    assert (config.model.max_model_len, config.draft_model.max_model_len) == (64, 48)


def test_models_without_such_states(folders: tuple[Path, Path], tmp_path: Path) -> None:
    of_transformers = write_model(FALLBACK_CONFIGS["gpt2"][0], tmp_path / "served", seed=0)
    with pytest.raises(ConfigError, match="is computed by transformers' code"):
        resolved(of_transformers, folders[1])
    file = tmp_path / "head.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"from safetensors, and .* is a GGUF file"):
        resolved(folders[0], file, method="eagle")


def test_kind_of_a_whole_model(folders: tuple[Path, Path]) -> None:
    assert kind_of_model(EngineArgs(model=str(folders[0]))) is None
    assert kind_of_model(EngineArgs(model=str(folders[1]))) == "eagle3"
    config = json.loads((folders[1] / "config.json").read_text())
    assert config["draft_vocab_size"] == 60
