"""Global ranks and what they are in their groups."""

from __future__ import annotations

from inflight.config.ranks import RankLayout


def test_the_ranks_of_a_stage_are_neighbours() -> None:
    layout = RankLayout(tensor_parallel_size=3, pipeline_parallel_size=2)
    assert layout.world_size == 6
    assert [(layout.pp_rank(rank), layout.tp_rank(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert [layout.rank(layout.tp_rank(rank), layout.pp_rank(rank)) for rank in range(6)] == list(range(6))
