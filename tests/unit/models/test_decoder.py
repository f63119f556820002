"""The logits of a decoder are those of transformers: a small model for each thing that families do in different ways."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.models.causal_lm import ModelStep
from inflight.models.decoder import DecoderForCausalLM
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.full_context_attention import bind_caches, load, run_prompt
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

NUM_TOKENS = 37  # longer than the windows


@pytest.mark.parametrize(
    ("family", "index"),
    [
        ("llama", 6),  # biases everywhere
        ("mistral", 1),  # a window
        ("qwen3", 4),  # norms of heads, windows in some layers, a tied head
        ("qwen3_5", 0),  # recurrent layers, gates of heads, norms with an offset
        ("ministral3", 0),  # scaled queries
        ("gemma2", 0),  # four norms in a layer, caps of scores and logits, scaled embeddings
        ("gemma2", 1),
        ("gemma3", 0),  # two rotary embeddings
        ("gemma4", 0),  # keys and values of earlier layers, vectors of the tokens, a scalar
        ("gemma4", 1),  # values that are keys
        ("phi3", 2),  # fused projections, a part of each head is rotated
        ("olmo2", 1),  # norms of all heads together, and behind each block
        ("granite", 0),  # scaled scores and logits
        ("granite", 1),  # scaled embeddings and outputs
        ("smollm3", 1),  # layers without rotation
        ("glm4", 0),  # interleaved pairs
        ("deepseek_v2", 0),  # latent attention
        ("minicpm3", 0),
        ("lfm2", 1),
    ],
)
@torch.inference_mode()
def test_logits(family: str, index: int, tmp_path: Path) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=index)
    prompt = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(7))
    truth = reference_model(folder)(prompt[None]).logits[0]
    found = run_prompt(load(folder), prompt)
    assert relative_difference(found, truth) < FLOAT32_TOLERANCE
    assert truth.std() > 0.5, "logits that are all alike would agree whatever the model does"


@pytest.mark.parametrize(("family", "index"), [("gemma4", 0), ("qwen3", 4), ("deepseek_v2", 0), ("olmo2", 0)])
@torch.inference_mode()
def test_selected_rows_and_selected_layers(family: str, index: int, tmp_path: Path) -> None:
    """Only the last stage selects rows, after its last attention. All layers by their numbers are all layers."""
    model = load(write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=index))
    bind_caches(model, NUM_TOKENS)
    ids, positions = torch.arange(NUM_TOKENS) + 5, torch.arange(NUM_TOKENS)
    metadata: Any = (None,)  # Any: the backend reads none
    rows = torch.tensor([4, 20, NUM_TOKENS - 1])
    whole = model(ModelStep(ids, positions, metadata))
    assert isinstance(model, DecoderForCausalLM) and isinstance(whole, torch.Tensor)
    torch.testing.assert_close(model(ModelStep(ids, positions, metadata, rows)), whole[rows], rtol=1e-5, atol=1e-5)
    every = range(len(model.layers))
    torch.testing.assert_close(model(ModelStep(ids, positions, metadata, None, every)), whole, rtol=1e-5, atol=1e-5)
    first = model(ModelStep(ids, positions, metadata, None, [0]))
    del model.layers[1:]
    torch.testing.assert_close(first, model(ModelStep(ids, positions, metadata)), rtol=1e-5, atol=1e-5)


def test_parts_for_images_are_left_unread_also_in_a_checkpoint_of_the_decoder_alone() -> None:
    """Its names lack the prefix "model."."""
    decoder: Any = SimpleNamespace(unread=("model.visual.", "mtp."), tower=None)
    names = "model.visual.a", "visual.a", "mtp.a", "model.layers.0.a", "layers.0.visual.a"
    found = [name for name in names if DecoderForCausalLM.leaves_unread(decoder, name)]
    assert found == ["model.visual.a", "visual.a", "mtp.a"]
