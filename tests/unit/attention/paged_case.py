"""A drawn world for attention backends: sequences that grow step by step in a shuffled, poisoned arena.

Keys and values come from float64 sequences kept here; the truth is `tests/support/kernel_reference.py` over caches laid out
from them, so that nothing the backend writes or reads can reach it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from inflight.attention.backend import AttentionBackend, AttentionParams, LayerCache
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.interface.kv_cache import KVCacheSpec
from tests.support import kernel_reference as reference


@dataclass(frozen=True, kw_only=True)
class Case:
    """`steps[s][i]`: how many tokens sequence i computes in step s; 0: it is not in the step."""

    num_kv_heads: int
    per_head: int
    head_dim: int
    block_size: int
    window: int | None
    num_layers: int
    padding: int  # bytes at the end of a block
    steps: tuple[tuple[int, ...], ...]
    seed: int
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: torch.dtype | None = None  # None: `dtype`
    soft_cap: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None  # if given, values are the first so many elements of the keys
    is_causal: bool = True
    bias_radius: int | None = None  # up to which distance positions have biases of their own; None: there are none
    has_images: bool = False  # the layers see whole images, of which the steps have some

    @property
    def spec(self) -> KVCacheSpec:
        dtype = self.kv_cache_dtype or self.dtype
        return KVCacheSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize,
            scale_bytes=0 if dtype.is_floating_point else 4,
            has_values=self.value_dim is None,
            sliding_window=self.window,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_sequences = draw(st.integers(1, 6))
    lengths = st.one_of(st.just(0), st.just(1), st.integers(2, 20), st.integers(2, 70))
    return Case(
        num_kv_heads=draw(st.integers(1, 3)),
        per_head=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 16, 20, 24, 40, 64, 80])),
        block_size=draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 32])),
        window=draw(st.one_of(st.none(), st.integers(1, 40))),
        num_layers=draw(st.integers(1, 3)),
        padding=draw(st.sampled_from([0, 4, 64, 100])),
        steps=tuple(draw(st.lists(st.tuples(*[lengths] * num_sequences).filter(any), min_size=1, max_size=4))),
        seed=draw(st.integers(0, 2**31)),
        is_causal=draw(st.booleans()),
        has_images=draw(st.booleans()),
    )


class World:
    """Runs a case's steps through a backend; `step` returns the largest difference from the truth, over all layers."""

    def __init__(self, case: Case, backend: AttentionBackend) -> None:
        self.case, self.backend = case, backend
        self.sees_what_was_written = True  # else the truth is of the keys and values before they were quantised
        self.random = np.random.default_rng(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        # as large as the scores of many keys together
        num_heads = case.num_kv_heads * case.per_head
        sinks = (3 + 3 * self._draw(num_heads)).float() if case.has_sinks else None
        self.params = AttentionParams(
            1 / math.sqrt(case.head_dim),
            case.window,
            case.soft_cap,
            sinks,
            case.value_dim,
            case.is_causal or case.has_images,
            case.has_images,
            None if case.bias_radius is None else self._draw(num_heads, 2 * case.bias_radius + 1).float(),
        )
        totals = np.sum(case.steps, axis=0)
        self.computed = np.zeros(len(totals), dtype=np.int32)
        blocks_each = -(-totals // case.block_size)
        num_blocks = int(blocks_each.sum()) + 3
        ids = self.random.permutation(np.arange(1, num_blocks)).astype(np.int32)
        self.tables = np.split(ids[: blocks_each.sum()], np.cumsum(blocks_each)[:-1])
        block_bytes = case.num_layers * case.spec.block_bytes + case.padding
        self.arena = torch.full((num_blocks, block_bytes), 0xFF, dtype=torch.uint8)  # NaN in every floating dtype
        self.views = [backend.kv_cache_view(self.arena, case.spec, i) for i in range(case.num_layers)]
        shape = (case.num_layers, 2, int(totals.max()), case.num_kv_heads, case.head_dim)
        self.sequences = [self._draw(*shape) for _ in totals]
        if case.value_dim is not None:
            self.sequences = [sequence[:, :1].expand(-1, 2, -1, -1, -1) for sequence in self.sequences]
        if case.kv_cache_dtype == torch.float8_e4m3fn:
            self.sequences = [sequence.to(torch.float8_e4m3fn).double() for sequence in self.sequences]

    def _draw(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.case.dtype).double()

    def inputs(self, lengths: np.ndarray) -> AttentionInputs:
        """Rows in a shuffled order; every entry of the block table that no query can see is a stale id, or 0: all NaN."""
        case = self.case
        self.rows = self.random.permutation(np.flatnonzero(lengths))
        computed = self.computed[self.rows]
        seq_lens = (computed + lengths[self.rows]).astype(np.int32)
        width = max(len(table) for table in self.tables) + 2
        block_table = self.random.integers(0, len(self.arena), (len(self.rows), width)).astype(np.int32)
        block_table *= self.random.integers(0, 2, block_table.shape, dtype=np.int32)
        for i, row in enumerate(self.rows):
            first = 0 if case.window is None else max(0, int(computed[i]) - case.window + 1) // case.block_size
            end = -(-int(seq_lens[i]) // case.block_size)
            block_table[i, first:end] = self.tables[row][first:end]
        return AttentionInputs(
            query_start_loc=np.concatenate(([0], np.cumsum(lengths[self.rows]))).astype(np.int32),
            seq_lens=seq_lens,
            num_computed_tokens=computed,
            block_table=block_table,
        )

    def step(self, lengths: np.ndarray) -> float:
        worst = 0.0
        for output, truth in self.outputs(lengths):
            difference = (output.double() - truth).abs().max()
            assert not difference.isnan(), "the result depends on bytes that are no key or value of the row"
            worst = max(worst, float(difference))
        return worst

    def outputs(self, lengths: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's output of one step, and the truth in float64; rows are `self.rows`, in this order."""
        case, found = self.case, []
        inputs = self.inputs(lengths)
        metadata = self.backend.build_metadata(inputs, case.spec)
        self.ends: torch.Tensor | None = None
        if case.has_images:
            metadata = self._with_images(metadata, inputs)
        for layer, view in enumerate(self.views):
            query = self._draw(int(inputs.query_start_loc[-1]), case.num_kv_heads * case.per_head, case.head_dim)
            new = [self.sequences[row][layer, :, self.computed[row] :][:, : lengths[row]] for row in self.rows]
            # As a fused projection leaves them: slices of one tensor.
            heads = [case.num_kv_heads * case.per_head, case.num_kv_heads, case.num_kv_heads]
            packed = torch.cat((query, *torch.cat(new, dim=1)), dim=1).to(case.dtype)
            query_of_row, key, value = torch.split(packed, heads, dim=1)
            if case.value_dim is not None:
                value = value[:, :0]
            output = self.backend.forward(query_of_row, key, value, LayerCache(view, metadata, self.params))
            assert output.dtype == case.dtype
            assert output.is_contiguous()
            found.append((output, self._truth(query, inputs, layer)))
        self.computed += lengths.astype(np.int32)
        return found

    def _with_images(self, metadata: AttentionMetadata, inputs: AttentionInputs) -> AttentionMetadata:
        """Most rows have an image anywhere, and some have two."""
        starts = inputs.query_start_loc
        positions = np.concatenate(
            [np.arange(*each) for each in zip(inputs.num_computed_tokens, inputs.seq_lens, strict=True)]
        )
        ends = (positions + 1).astype(np.int32)
        for start, stop in itertools.pairwise(starts):
            for first, last in np.sort(self.random.integers(start, stop + 1, (self.random.integers(3), 2))):
                span = ends[first:last]
                if len(span) and (span == positions[first:last] + 1).all():  # it does not overlap the other one
                    span[:] = span[-1]
                    metadata = metadata.with_ends(int(first), torch.from_numpy(span.copy()))
        self.ends = torch.from_numpy(ends)
        return metadata

    def _truth(self, query: torch.Tensor, inputs: AttentionInputs, layer: int) -> torch.Tensor:
        """Each sequence is one long block of the reference's caches."""
        caches = torch.stack([self.sequences[row][layer] for row in self.rows], dim=1)
        if self.case.kv_cache_dtype == torch.int8 and self.sees_what_was_written:
            caches = reference.quantised(caches.float()).double()  # in float32 as the kernel: halves are the same ones
        return reference.paged_attention(
            query,
            caches[0],
            caches[1],
            torch.arange(len(self.rows))[:, None],
            torch.from_numpy(inputs.query_start_loc),
            torch.from_numpy(inputs.seq_lens),
            scale=self.params.scale,
            sliding_window=self.case.window,
            soft_cap=self.case.soft_cap,
            sinks=self.params.sinks,
            is_causal=self.case.is_causal,
            ends=self.ends,
            position_bias=self.params.position_bias,
        )[..., : self.case.value_dim]

    def run(self) -> float:
        return max(self.step(np.array(lengths)) for lengths in self.case.steps)
