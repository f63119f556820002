"""The buckets of distances are those of transformers' MPNet."""

from __future__ import annotations

import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from inflight.config.mixers import PositionBiasSpec
from inflight.layers.position_bias import buckets


def test_buckets_are_those_of_transformers() -> None:
    distances = torch.arange(-600, 601)
    for num_buckets, max_distance in ((32, 128), (16, 64)):
        spec = PositionBiasSpec(name="x", num_buckets=num_buckets, max_distance=max_distance, radius=600)
        expected = MPNetEncoder.relative_position_bucket(distances, num_buckets, max_distance)
        assert torch.equal(buckets(distances, spec), expected)
        assert set(expected.tolist()) == set(range(num_buckets)) - {num_buckets // 2}
