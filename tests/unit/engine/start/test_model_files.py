"""What is logged about options that have no effect, and the end tokens of grammars."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.engine.start import model_files
from inflight.engine.start.model_files import make_grammars, resolve_config
from tests.conformance.configs import engine_config
from tests.support.model_zoo import FAMILY_CONFIGS


@pytest.mark.parametrize("name", ["llguidance", "guidance", "auto", "xgrammar", "outlines", "lm-format-enforcer"])
def test_another_library_of_structured_outputs_is_accepted_and_told_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_config(EngineArgs(structured_outputs_backend=name))
    told = [record.getMessage() for record in caplog.records if "structured_outputs_backend" in record.getMessage()]
    is_other = name in ("xgrammar", "outlines", "lm-format-enforcer")
    assert told == ([f"structured_outputs_backend={name!r}: llguidance serves instead"] if is_other else [])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"hf_overrides": {"no_such_field": 1, "rope_theta": 5.0}}, [r"hf_overrides: no_such_field .*nothing"]),
        ({"hf_overrides": {"rope_theta": 5.0}}, []),
        ({"override_generation_config": {"temperature": 0.5, "eos_token_id": 3}}, []),
        ({"override_generation_config": {"top_k": 4, "beams": 2}}, [r"override_generation_config: .*: 'beams'"]),
    ],
)
def test_names_that_change_nothing_are_told(
    overrides: dict[str, Any], told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FAMILY_CONFIGS["llama"][0].save_pretrained(tmp_path)
    config = resolve_config(EngineArgs(model=str(tmp_path), load_format="dummy", device="cpu", **overrides))
    assert config.model.folder == tmp_path
    found = [record.getMessage() for record in caplog.records if "overrid" in record.getMessage()]
    assert len(found) == len(told)
    assert all(re.match(pattern, text) for pattern, text in zip(told, found, strict=True))


@pytest.mark.parametrize(
    ("generation_config", "overrides", "eos"),
    [
        (None, {}, [2, 7]),
        ({"eos_token_id": [9, 3]}, {}, [2, 3, 7, 9]),
        ({"eos_token_id": 16}, {}, [2, 7]),
        ({"eos_token_id": 9}, {"eos_token_id": 5}, [2, 5, 7]),
    ],
)
def test_grammars_end_with_every_end_token(
    generation_config: dict[str, Any] | None,
    overrides: dict[str, Any],
    eos: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of config.json, the tokenizer and generation_config.json, as far as they are in the vocabulary. The tokenizer is read
    when the first grammar comes."""
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    config, reads = engine_config(), list[int]()
    architecture = replace(config.model.architecture, eos_token_ids=(2,))
    given = replace(config.model, folder=tmp_path, architecture=architecture, generation_overrides=overrides)
    config = replace(config, model=given, scheduler=replace(config.scheduler, depth=3))
    tokenizer: Any = SimpleNamespace(eos_token_id=7)
    monkeypatch.setattr(model_files, "StructuredOutputManager", lambda *args, **named: (*args, named))
    monkeypatch.setattr(model_files, "load_backend", lambda: lambda *args: args)

    def read() -> Any:
        reads.append(1)
        return tokenizer

    create, vocab_size, named = cast(Any, make_grammars(config, read))
    assert (vocab_size, named, reads) == (16, {"num_buffers": 6, "is_paced": True}, [])
    assert create() == (tokenizer, 16, eos)
