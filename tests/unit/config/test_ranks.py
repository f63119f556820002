"""Global ranks and what they are in their groups."""

from __future__ import annotations

from dataclasses import replace

from inflight.config.engine import ParallelConfig
from inflight.config.ranks import RankLayout, places_on


def test_the_ranks_of_a_stage_are_neighbours() -> None:
    layout = RankLayout(tensor_parallel_size=3, pipeline_parallel_size=2)
    assert layout.world_size == 6
    assert [(layout.pp_rank(rank), layout.tp_rank(rank)) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert [layout.rank(layout.tp_rank(rank), layout.pp_rank(rank)) for rank in range(6)] == list(range(6))


def test_a_rank_calls_the_later_ranks_of_its_stage_and_the_stages_to_which_it_has_links() -> None:
    layout = RankLayout(tensor_parallel_size=2, pipeline_parallel_size=4)
    calls = {rank: layout.called_by(rank, has_drafts=False) for rank in range(8)}
    assert calls == {0: (1, 2, 6), 1: (3, 7), 2: (3, 4), 3: (5,), 4: (5, 6), 5: (7,), 6: (7,), 7: ()}
    assert layout.called_by(2, has_drafts=True) == (3, 4, 6)
    assert RankLayout(3, 1).called_by(0, has_drafts=True) == (1, 2)
    assert RankLayout(1, 2).called_by(0, has_drafts=False) == (1,)


def test_ranks_of_replicas_have_places_of_their_own() -> None:
    """So each has cores and a GPU of its own, also if other servers have the replicas before it."""
    places = []
    for replica in range(3):
        parallel = ParallelConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            pipeline_layer_partition=(1, 1),
            distributed_executor_backend="mp",
            replicas=(5, 6, 7),
            replica_index=replica,
        )
        assert replace(parallel, pipeline_parallel_size=3).layout == RankLayout(2, 3)
        assert {place.num_local_ranks for place in parallel.places} == {12}
        assert {place.num_engine_ranks for place in parallel.places} == {4}
        places += [place.local_rank for place in parallel.places]
    assert places == list(range(12))


def test_ranks_may_be_on_any_machines() -> None:
    places = places_on([1, 0, 1, 1])
    assert [(place.rank, place.machine, place.local_rank, place.num_local_ranks) for place in places] == [
        (0, 1, 0, 3), (1, 0, 0, 1), (2, 1, 1, 3), (3, 1, 2, 3),
    ]  # fmt: skip
