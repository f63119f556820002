"""`RankLayout`: which tensor- and pipeline-parallel rank a global rank is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankLayout:
    """Global rank = pp_rank * tensor_parallel_size + tp_rank: the ranks of one stage are neighbours."""

    tensor_parallel_size: int
    pipeline_parallel_size: int

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tensor_parallel_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.tensor_parallel_size

    def rank(self, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tensor_parallel_size + tp_rank
