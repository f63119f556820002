"""What drafts cost, from measured times, and how often they must be right to pay."""

from __future__ import annotations

import pytest

from inflight.config.parse_architecture import parse_architecture
from inflight.spec_decode.adaptive import fewest_right
from inflight.spec_decode.draft_costs import DraftCosts, num_weights_read


@pytest.mark.parametrize(
    ("one", "more", "draft", "free", "share"),
    [
        (17.0, 21.0, 3.4, 16.0, 0.2),
        (10.0, 50.0, 0.0, 1.0, 0.0),  # each token costs as much as the first: less than the bound
        (10.0, 9.0, 1.0, 1000.0, 0.1),  # noise: more tokens took less time
    ],
)
def test_costs_of_measured_times(one: float, more: float, draft: float, free: float, share: float) -> None:
    costs = DraftCosts.of_seconds(one, more, 5, draft)
    assert costs.free_tokens == pytest.approx(free)
    assert costs.share_of_step == pytest.approx(share)


def test_dearer_drafts_must_be_right_more_often() -> None:
    found = [fewest_right(4, DraftCosts(16.0, share)) for share in (0.0, 0.2, 0.5)]
    assert all(share is not None for share in found)
    assert found == sorted(found, key=lambda share: share or 1.0) and found[0] != found[-1]
    assert fewest_right(4, DraftCosts(16.0, 1.0)) is None
    assert fewest_right(4, DraftCosts(1.0, 0.5)) is None


def test_weights_that_a_step_reads() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert num_weights_read(parse_architecture(config)) == 32 * (100 + 3 * (4 * 32 + 3 * 64))
