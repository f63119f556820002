"""Fields of generation_config.json that have no effect are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from inflight.engine.start.unused_generation_fields import _NEUTRAL, warn_of_unused_fields


def warnings(folder: Path, caplog: pytest.LogCaptureFixture, **fields: Any) -> list[str]:
    caplog.clear()
    (folder / "generation_config.json").write_text(json.dumps(fields))
    warn_of_unused_fields(folder, vocab_size=100)
    return caplog.messages


def test_what_would_change_the_tokens_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warnings(tmp_path, caplog, temperature=0.5, suppress_tokens=[1, 2], num_beams=4, eos_token_id=[2])
    assert "num_beams=4, suppress_tokens=[1, 2];" in told and str(tmp_path) in told and "temperature" not in told
    assert len(warnings(tmp_path, caplog, stop_strings=["x" * 10**6])[0]) < 400


def test_neutral_values_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "sequence_bias": {}}
    assert warnings(tmp_path, caplog, **neutral, forced_bos_token_id=None, do_sample=True) == []
    assert warnings(tmp_path, caplog, **GenerationConfig().to_dict()) == []
    (tmp_path / "generation_config.json").unlink()
    warn_of_unused_fields(tmp_path, 100)
    assert caplog.messages == []


def test_the_fields_are_those_of_transformers() -> None:
    assert _NEUTRAL.keys() <= vars(GenerationConfig()).keys() | {"forced_decoder_ids"}  # the latter of Whisper


@pytest.mark.parametrize(
    ("ends", "is_told"), [(99, False), (100, True), ([2, 10**20], True), (None, False), ("x", False)]
)
def test_end_tokens_that_the_model_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Any, is_told: bool
) -> None:
    assert bool(warnings(tmp_path, caplog, eos_token_id=ends)) == is_told
