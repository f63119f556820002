"""The vectors that each layer of Gemma 4's small models gets for each token are those of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.model_zoo import VOCAB_SIZE
from tests.unit.layers.zoo_layers import HIDDEN_SIZE, assert_equal, both_models, drawn

NUM_TOKENS = 12


@torch.inference_mode()
def test_the_vectors_and_what_a_layer_adds_for_them(tmp_path: Path) -> None:
    ours, theirs = both_models("gemma4", 0, tmp_path / "model")
    ids, embedded = torch.arange(NUM_TOKENS) * 7 % VOCAB_SIZE, drawn(NUM_TOKENS, HIDDEN_SIZE)
    assert ours.token_inputs is not None
    truth = theirs.project_per_layer_inputs(embedded[None], theirs.get_per_layer_inputs(ids[None], embedded[None]))[0]
    before = embedded.clone()
    vectors = ours.token_inputs(ids, embedded, None)
    assert_equal(vectors, truth)
    assert torch.equal(embedded, before)  # it is the residual, too
    of_images = torch.tensor([2, 3, 7])
    padded = ids.index_fill(0, of_images, ours.token_inputs.padding_id)
    assert_equal(
        ours.token_inputs(ids, embedded, of_images),
        theirs.project_per_layer_inputs(embedded[None], theirs.get_per_layer_inputs(padded[None], embedded[None]))[0],
    )

    hidden = drawn(NUM_TOKENS, HIDDEN_SIZE, seed=8)
    for index, (layer, other) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        gate = other.act_fn(other.per_layer_input_gate(hidden))
        added = other.post_per_layer_input_norm(other.per_layer_projection(gate * truth[:, index]))
        assert layer.token_input is not None
        assert_equal(layer.token_input(hidden, vectors[:, index]), added)
