"""An EAGLE-3 head and an MTP layer learn what the embedded model writes, and their folders are what the engine reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config
from inflight.hub import EMBEDDED_MODEL
from scripts.demo.drafting import CAPTURED, EAGLE3, MTP, DraftingTrainer, export, train
from tests.support.eagle_models import EagleTruth


@pytest.mark.parametrize("kind", [EAGLE3, MTP])
def test_what_is_trained_is_read(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    trainer = DraftingTrainer(kind, tokenizer)
    losses = []
    for _ in range(4):
        trainer.step_index = 60  # the same documents, and the full learning rate
        losses.append(trainer.step(0.0, num_tokens=64)[0])
    assert losses[-1] < losses[0]
    lines: list[str] = []
    train(trainer, 0.0, lines.append)  # no time is left
    assert trainer.step_index == 61 and lines == []

    export(trainer, kind, tmp_path)
    given = {"method": kind} if kind == MTP else {"method": kind, "model": str(tmp_path)}
    served = str(tmp_path if kind == MTP else EMBEDDED_MODEL)
    config = resolve_config(EngineArgs(model=served, device="cpu", speculative_config=given))
    assert config.draft_model is not None
    assert config.model.architecture.captured == (() if kind == MTP else CAPTURED)


@torch.no_grad()
def test_training_computes_what_serving_does(tmp_path: Path) -> None:
    """The first draft behind each token: the truth is the published architecture with the weights that were written."""
    trainer = DraftingTrainer(EAGLE3, Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json")))
    export(trainer, EAGLE3, tmp_path)
    truth = EagleTruth(EMBEDDED_MODEL, tmp_path, list(CAPTURED))
    tokens = torch.arange(20, 40)
    teacher, drafter = trainer.teacher, trainer.drafter
    hidden, *_ = drafter.drafts(
        torch.nn.functional.embedding(tokens[None], teacher.embedding), teacher.states(tokens[None])
    )
    found = drafter.logits(hidden)[0, -1]
    known = tokens[: hidden.shape[1] + 1].tolist()
    expected = truth.logits(known, [])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.05  # the weights were rounded to bfloat16
