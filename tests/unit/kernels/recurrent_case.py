"""Sequences that a C++ kernel of recurrent layers computes in steps, with states in scattered blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inflight.interface.request import Int32Array
from inflight.kernels.cpu.functions import AttentionStep
from inflight.layers.recurrent_mixer import RecurrentKernel

BLOCK_SIZE, NUM_BLOCKS, WIDTH = 16, 40, 8
TOLERANCE = {torch.float32: 4e-5, torch.bfloat16: 2**-7}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    scale = wanted.abs().mean(-1, keepdim=True) + wanted.abs()
    difference = ((ours.double().view(wanted.shape) - wanted).abs() / scale).max()
    assert difference < TOLERANCE[ours.dtype], difference


class Sequences:
    """A few sequences of one layer, whose blocks are scattered over an arena that is full of NaN."""

    def __init__(
        self,
        kernel: RecurrentKernel,
        truth: Callable[[Tensor], Tensor],
        *,
        width: int,
        offsets: list[int],
        dtype: torch.dtype,
        num_sequences: int,
        num_states: int = 1,
    ) -> None:
        """`truth` computes the rows of a whole sequence. `offsets`: of the tensors of a state, and the end of the last one."""
        self.kernel, self.truth, self.offsets = kernel, truth, offsets
        self.num_states = num_states
        self.arena = torch.full((NUM_BLOCKS, num_states * offsets[-1] + 64), 255, dtype=torch.uint8)
        self.free = list(np.random.default_rng(3).permutation(np.arange(1, NUM_BLOCKS)))
        self.tables = np.zeros((num_sequences, WIDTH), dtype=np.int32)
        self.rows = [drawn(9 + i, BLOCK_SIZE * WIDTH, width).to(dtype) for i in range(num_sequences)]
        self.lengths = np.zeros(num_sequences, dtype=np.int32)
        self.results: list[list[Tensor]] = [[] for _ in range(num_sequences)]

    def step(self, counts: Int32Array, snapshots: list[int]) -> None:
        """`counts`: the tokens of each sequence. `snapshots`: which blocks keep a state, besides the last one of a step."""
        ends = self.lengths + counts
        for sequence, (start, end) in enumerate(zip(self.lengths, ends, strict=True)):
            for index in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                is_last = index == (end - 1) // BLOCK_SIZE
                if (is_last or index in snapshots) and not self.tables[sequence, index]:
                    self.tables[sequence, index] = self.free.pop()
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        arrays = starts, ends.astype(np.int32), self.lengths.copy(), self.tables.copy()
        pointers = (array.ctypes.data for array in arrays)
        step = AttentionStep(len(counts), BLOCK_SIZE, 2, WIDTH, *pointers, self.offsets[-1], self.num_states)
        spans = list(zip(self.rows, self.lengths, ends, strict=True))
        rows = torch.cat([rows[start:end] for rows, start, end in spans])
        before = rows.clone()
        out = self.kernel(rows, self.arena[:, :-64], self.offsets, step)
        assert torch.equal(rows, before)
        for results, piece in zip(self.results, torch.split(out, counts.tolist()), strict=True):
            results.append(piece)
        self.lengths = ends.astype(np.int32)

    def step_with_drafts(self, counts: Int32Array, accepted: Int32Array) -> None:
        """Of the `counts` tokens of each sequence, all after the first `accepted` ones are wrong drafts."""
        starts, ends = self.lengths, self.lengths + accepted
        right = [rows.clone() for rows in self.rows]
        for rows, end, stop in zip(self.rows, ends, starts + counts, strict=True):
            rows[end:stop] = -2 * rows[end:stop]
        self.step(counts, [])
        self.rows, self.lengths = right, ends.astype(np.int32)
        for results, count in zip(self.results, accepted, strict=True):
            results[-1] = results[-1][:count]

    def check(self) -> None:
        for rows, length, results in zip(self.rows, self.lengths, self.results, strict=True):
            assert_close(torch.cat(results), self.truth(rows[:length]))
        assert (self.arena[:, -64:] == 255).all(), "written behind a block"
        assert (self.arena[0] == 255).all(), "written to the dummy block"


def check_drafts(sequences: Sequences) -> None:
    """Three sequences with prompts, decodes, and drafts that cross the ends of blocks. A block has four states."""
    sequences.step(np.array([5, 14, 30], dtype=np.int32), [0])
    for accepted in ((1, 4, 2), (4, 1, 3), (2, 2, 2), (1, 3, 4), (4, 4, 1)):
        sequences.step_with_drafts(np.array([4, 4, 4], dtype=np.int32), np.array(accepted, dtype=np.int32))
    sequences.step(np.array([1, 3, 20], dtype=np.int32), [])
    sequences.step_with_drafts(np.array([2, 4, 3], dtype=np.int32), np.array([1, 2, 1], dtype=np.int32))
    sequences.step(np.array([7, 1, 1], dtype=np.int32), [])
    sequences.check()
