"""An EAGLE-3 layer computes what the published architecture does, of what the served model copies out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.config.eagle import describe_eagle
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.models.captured_layers import CapturingDecoder, new_captured
from inflight.models.causal_lm import ModelStep
from inflight.models.eagle3_layer import Eagle3Drafter
from tests.support.eagle_models import EagleTruth, served_config, write_head
from tests.support.full_context_attention import bind_caches, load
from tests.support.model_zoo import VOCAB_SIZE, write_model

NUM_TOKENS = 13


@pytest.mark.parametrize(("replaces", "head_size"), [(False, 40), (True, None)])
@torch.inference_mode()
def test_one_pass(replaces: bool, head_size: int | None, tmp_path: Path) -> None:
    served_folder = write_model(served_config(), tmp_path / "served", seed=1)
    fields: dict[str, object] = {"norm_before_residual": replaces}
    folder = write_head(served_folder, tmp_path / "head", "eagle3", seed=2, head_size=head_size, fields=fields)
    plain = parse_architecture(read_model_config(served_folder))
    head = describe_eagle(read_model_config(folder), folder, plain, "eagle3", is_dummy=False)
    assert head.hidden_inputs is not None
    served = load(served_folder, architecture=replace(plain, captured=head.hidden_inputs.captured))
    drafter = load(folder, architecture=head, served=served)
    assert isinstance(served, CapturingDecoder) and isinstance(drafter, Eagle3Drafter)
    drafter.read_targets(folder)
    for model in (served, drafter):
        bind_caches(model, NUM_TOKENS)
    truth = EagleTruth(served_folder, folder)

    tokens = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7))
    positions, metadata = torch.arange(NUM_TOKENS), (None,)
    make = new_captured(replace(plain, captured=(2, 3, 4)), torch.float32)
    assert make is not None
    captured = make(tokens, None)
    step: Any = ModelStep(tokens, positions, metadata, captured=captured)  # type: ignore[arg-type]
    served(step)
    states = truth.model(tokens[None], output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in truth.layers], dim=1)
    torch.testing.assert_close(captured, expected.float(), atol=1e-4, rtol=1e-4)

    assert captured is not None
    hidden = drafter.read_hidden(captured)
    behind = drafter(ModelStep(tokens, positions, metadata, hidden=hidden))  # type: ignore[arg-type]
    passed = truth._layer(truth.embedding[tokens], torch.nn.functional.linear(expected, truth.weights["fc.weight"]))
    torch.testing.assert_close(behind, passed.float(), atol=1e-4, rtol=1e-4)
    logits = torch.stack([truth._logits(row) for row in passed]).float()
    torch.testing.assert_close(drafter.compute_logits(behind), logits, atol=1e-4, rtol=1e-4)


def test_nothing_is_captured_of_other_models() -> None:
    plain = parse_architecture(served_config().to_dict() | {"architectures": ["LlamaForCausalLM"]})
    assert new_captured(plain, torch.float32) is None
