"""The mean time between steps, and a model with a larger vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.overlap.hidden_control_plane import large_vocabulary, mean_period_ms
from inflight.timeline import Event


def test_the_mean_period_counts_stalls() -> None:
    ends = [1_000_000, 6_000_000, 31_000_000, 36_000_000]
    events = [Event(i, phase, end - 10, end) for i, end in enumerate(ends) for phase in ("forward", "sample")]
    assert mean_period_ms(events) == pytest.approx(35 / 3)


def test_a_larger_vocabulary_keeps_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 10, "hidden_size": 4}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    target = large_vocabulary(folder, 99, tmp_path / "large")
    assert json.loads((target / "config.json").read_text()) == {"vocab_size": 99, "hidden_size": 4}
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]
