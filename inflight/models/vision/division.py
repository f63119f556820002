"""`RowDivision`: which patches of an image each tensor-parallel rank computes.

Each rank has the weights of the whole tower, and computes an equal part of the patches of each slice. Only keys and values of
all patches are needed by all ranks, so a layer has one exchange. A rank's patches are neighbours within a slice, and so are not
neighbours within an image of several slices:

    slice     0: rank 0 | rank 1     1: rank 0 | rank 1     ...
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.distributed.tensor_parallel import TensorParallelGroup

# An image of fewer patches is computed whole by each rank: the ranks would wait longer for each other than they save.
FEWEST_PATCHES = 128


@dataclass(frozen=True, kw_only=True)
class RowDivision:
    """
    Attributes:
        own: int64 [num_own], the patches of this rank, in their order. All ranks have equally many: the last patch of a slice
            is computed several times if the slice cannot be divided evenly.
        source: int64 [num_patches], for each patch its place among those of all ranks, one rank behind the other.
    """

    group: TensorParallelGroup
    own: Tensor
    source: Tensor

    @classmethod
    def make(cls, group: TensorParallelGroup, num_patches: int, patches_of_slice: int) -> "RowDivision | None":
        """None: each rank computes the whole image."""
        if group.size == 1 or num_patches < FEWEST_PATCHES:
            return None
        of_rank = []
        for rank in range(group.size):
            parts = []
            for first in range(0, num_patches, patches_of_slice):
                last = min(first + patches_of_slice, num_patches)
                size = -(-(last - first) // group.size)
                begin = first + rank * size
                parts.append(torch.arange(begin, begin + size, dtype=torch.int64, device="cpu").clamp_(max=last - 1))
            of_rank.append(torch.cat(parts))
        _, first_places = np.unique(torch.cat(of_rank).numpy(), return_index=True)
        source = torch.from_numpy(first_places.astype(np.int64))
        return cls(group=group, own=of_rank[group.rank], source=source)

    def part(self, first: int, last: int) -> tuple[int, int]:
        """This rank's part of the slice with the patches [first, last). It may be empty."""
        size = -(-(last - first) // self.group.size)
        begin = min(first + self.group.rank * size, last)
        return begin, min(begin + size, last)

    def gather(self, own_rows: Tensor) -> Tensor:
        """Returns the rows of all patches, of which each rank gives its own: [num_patches, ...]. All ranks get the same."""
        return self.group.all_gather(own_rows.contiguous(), 0)[self.source]
