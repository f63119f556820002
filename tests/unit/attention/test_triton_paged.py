"""The Triton attention kernels against the float64 reference, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from inflight.attention.backend import AttentionParams, LayerCache, Rotation
from inflight.attention.selector import get_backend
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.attention.triton_paged import TritonPagedBackend, TritonPagedMetadata
from inflight.errors import ConfigError
from inflight.kernels.layer_ops import TorchLayerOps
from inflight.kernels.triton.attention_decode import DecodeScratch, Splits, attention_decode, max_partials, num_splits
from inflight.kernels.triton.attention_mixed import attention_mixed
from inflight.layers.qk_norm import QKNorm
from tests.conftest import FULL_GPU
from tests.support.covering_array import covering_array
from tests.unit.attention.paged_case import Case, World
from tests.unit.layers.contexts import layer_context

CPU = torch.device("cpu")
FLOAT8 = torch.float8_e4m3fn
FEW_EXAMPLES = hypothesis.settings(  # each takes the interpreter about a second; to shrink one, minutes
    max_examples=66, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
CASE = Case(
    num_kv_heads=2,
    per_head=3,
    head_dim=16,
    block_size=4,
    window=None,
    num_layers=1,
    padding=0,
    steps=((5, 9, 40), (1, 20, 1)),
    seed=0,
)


FEATURES: dict[str, list[Any]] = {
    "num_kv_heads": [1, 2],
    "per_head": [1, 3],
    "head_dim": [16, 20],
    "block_size": [3, 16],
    "padding": [0, 100],
    "kv_cache_dtype": [None, FLOAT8],
    "soft_cap": [None, 0.7],
    "has_sinks": [False, True],
    "is_causal": [True, False],
    "has_images": [False, True],
}


def covered(**factors: list[Any]) -> pytest.MarkDecorator:
    """All pairs of `FEATURES` and these factors; all triples with full counts."""
    rows = covering_array({**FEATURES, **factors}, 3 if FULL_GPU else 2)
    return pytest.mark.parametrize("row", rows, ids=lambda row: "-".join(map(str, row.values())))


def case_of(row: dict[str, Any], **more: Any) -> Case:
    return dataclasses.replace(CASE, **{name: row[name] for name in (*FEATURES, "window")}, **more)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits have at least 32 keys, a tile of the interpreter's type, and 64 are long."""
    for name, value in (("LONG_SPLIT_TOKENS", 64), ("MIN_SPLIT_TOKENS", 32)):
        monkeypatch.setattr(f"inflight.kernels.triton.attention_decode.{name}", value)


def triton_backend(num_multiprocessors: int = 8) -> TritonPagedBackend:
    return TritonPagedBackend(CPU, num_multiprocessors=num_multiprocessors)


@st.composite
def shapes(draw: st.DrawFn) -> Case:
    return dataclasses.replace(
        CASE,
        num_kv_heads=draw(st.integers(1, 2)),
        per_head=draw(st.sampled_from([1, 2, 3, 4, 7])),
        head_dim=draw(st.sampled_from([8, 16, 20, 64, 80])),
        block_size=draw(st.sampled_from([1, 3, 7, 16, 32])),
        window=draw(st.one_of(st.none(), st.integers(1, 50), st.integers(100, 200))),
        padding=draw(st.sampled_from([0, 4, 100])),
        kv_cache_dtype=draw(st.sampled_from([None, FLOAT8])),
        seed=draw(st.integers(0, 2**31)),
        soft_cap=draw(st.sampled_from([None, 0.7, 50.0])),
        has_sinks=draw(st.booleans()),
        is_causal=draw(st.booleans()),
        has_images=draw(st.booleans()),
    )


def fill(world: World, lengths: tuple[int, ...]) -> None:
    """The first tokens of the sequences are in the cache, as if computed."""
    case = world.case
    for i, length in enumerate(lengths):
        positions = np.arange(length)
        blocks = torch.from_numpy(world.tables[i][positions // case.block_size]).long()
        for layer, view in enumerate(world.views):
            new = world.sequences[i][layer, :, :length].transpose(0, 1)  # [length, 2, num_kv_heads, head_dim]
            view.permute(0, 3, 1, 2, 4)[blocks, torch.from_numpy(positions % case.block_size)] = new.to(view.dtype)
    world.computed += np.array(lengths, dtype=np.int32)


@covered(
    window=[None, 7, 130],
    rows=[((0, 90, 130), (25, 1, 30)), ((31, 0, 200), (2, 33, 1)), ((95, 64, 1), (33, 0, 31))],
    rows_at_once=[2, 256],
)
def test_rows_of_several_lengths(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles with masked and unmasked keys, with a window's start, without tokens, and at the end of a row."""
    monkeypatch.setattr("inflight.kernels.triton.attention_mixed.ROWS_AT_ONCE", row["rows_at_once"])
    contexts, lengths = row["rows"]
    world = World(case_of(row, steps=row["rows"]), triton_backend())
    fill(world, contexts)
    assert world.step(np.array(lengths)) < 1e-5


@covered(window=[None, 7, 75], contexts=[(0, 230), (31, 64, 100), (128,)], num_multiprocessors=[1, 4, 30])
@pytest.mark.usefixtures("short_splits")
def test_single_tokens_in_splits(row: dict[str, Any]) -> None:
    contexts, once = row["contexts"], (1,) * len(row["contexts"])
    world = World(case_of(row, steps=(contexts, once, once)), triton_backend(row["num_multiprocessors"]))
    fill(world, contexts)
    assert world.step(np.array(once)) < 1e-5
    assert world.step(np.array(once)) < 1e-5  # with the counters that the first has left


@pytest.mark.full_gpu
@FEW_EXAMPLES
@hypothesis.given(
    case=shapes(),
    contexts=st.lists(st.sampled_from([0, 3, 31, 64, 130]), min_size=3, max_size=3),
    lengths=st.lists(st.sampled_from([0, 1, 2, 5, 33]), min_size=3, max_size=3).filter(any),
)
def test_rows_of_any_length(case: Case, contexts: list[int], lengths: list[int]) -> None:
    case = dataclasses.replace(case, steps=(tuple(contexts), tuple(lengths)))
    world = World(case, triton_backend())
    fill(world, tuple(contexts))
    assert world.step(np.array(lengths)) < 1e-5


@pytest.mark.full_gpu
@FEW_EXAMPLES
@hypothesis.given(
    case=shapes(),
    contexts=st.lists(st.sampled_from([0, 1, 31, 100, 128, 400, 900]), min_size=1, max_size=4),
    num_multiprocessors=st.sampled_from([1, 4, 30]),
)
def test_one_token_a_row(case: Case, contexts: list[int], num_multiprocessors: int) -> None:
    once = (1,) * len(contexts)
    case = dataclasses.replace(case, steps=(tuple(contexts), once, once))
    world = World(case, triton_backend(num_multiprocessors))
    fill(world, tuple(contexts))
    assert world.step(np.array(once)) < 1e-5
    assert world.step(np.array(once)) < 1e-5  # with the counters that the first has left


@pytest.mark.usefixtures("short_splits")
def test_more_splits_than_are_combined_at_once() -> None:
    contexts = (32 * 20 + 5, 75)
    world = World(dataclasses.replace(CASE, per_head=1, steps=(contexts, (1, 1)), has_sinks=True), triton_backend(1000))
    fill(world, contexts)
    assert num_splits(2, 2, max(contexts) + 1, 1000) == Splits(21, 21)
    assert world.step(np.array([1, 1])) < 1e-5


def test_splits_fill_the_device_and_no_more() -> None:
    for num_rows in (1, 3, 8, 49, 50, 64, 256, 1000):
        splits, pairs = num_splits(num_rows, 8, 1 << 20, 132), num_rows * 8
        assert splits.usual == 1 or pairs * splits.usual <= 3 * 132 < pairs * (splits.usual + 1)
        assert splits.most == 1 or pairs * splits.most <= max_partials(132)
    assert num_splits(1, 8, 100, 132) == Splits(1, 1)
    assert num_splits(1, 8, 1000, 132) == Splits(8, 8)
    assert num_splits(256, 8, 1000, 132) == Splits(1, 1)


@pytest.mark.parametrize(("num_rows", "most"), [(24, 4), (64, 4), (128, 4), (256, 2), (600, 1)])
def test_long_rows_are_split_where_short_ones_fill_the_device(num_rows: int, most: int) -> None:
    assert num_splits(num_rows, 8, 40960, 132) == Splits(2 if num_rows == 24 else 1, most)
    assert num_splits(num_rows, 8, 4095, 132).most == (2 if num_rows == 24 else 1)


@pytest.mark.usefixtures("short_splits")
def test_one_long_row_among_short_ones() -> None:
    """Three programs fill the device: the first row has four a head, the others one."""
    contexts, splits = (500, 60, 3), num_splits(3, 2, 504, 1)
    assert splits == Splits(1, 4)
    world = World(dataclasses.replace(CASE, steps=(contexts, (1, 1, 1))), triton_backend(1))
    scratch = DecodeScratch.allocate(1, 3, 16, CPU)
    world.backend._scratch = {(3, 16): scratch}
    scratch.partial_sums.fill_(torch.nan)
    fill(world, contexts)
    assert world.step(np.array([1, 1, 1])) < 1e-5
    is_split = scratch.partial_sums[: 3 * 2 * 4 * 3].view(3, 2 * 4 * 3).isfinite()
    assert is_split.sum(1).tolist() == [2 * 4 * 3 if row == 0 else 0 for row in world.rows]


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("lengths", [(20, 1, 0, 1), (1, 33, 1, 2), (1, 0, 40, 1)])
def test_a_long_row_beside_a_prompt_is_split(lengths: tuple[int, ...]) -> None:
    """Rows with one token are computed in splits, and only they: the prompt's tiles would hold up the others' tokens."""
    contexts = (500, 260, 0, 20)
    world = World(dataclasses.replace(CASE, steps=(contexts, lengths), has_sinks=True), triton_backend(4))
    scratch = DecodeScratch.allocate(4, 3, 16, CPU)
    scratch.partials.fill_(torch.nan)
    world.backend._scratch = {(3, 16): scratch}
    fill(world, contexts)
    assert world.step(np.array(lengths)) < 1e-5
    assert not scratch.counters.any()
    written = ~scratch.partials.view(-1, 3 * 16).isnan().all(1)
    most = num_splits(len(world.rows), 2, 501, 4).most
    rows = {int(world.rows[int(i) // (2 * most)]) for i in written.nonzero()[:, 0]}
    assert rows == {i for i, length in enumerate(lengths) if length == 1 and contexts[i] > 20}


def test_large_heads() -> None:
    case = dataclasses.replace(CASE, head_dim=512, steps=((5, 9, 40), (1, 20, 1), (1, 1, 1)))
    assert World(case, triton_backend()).run() < 1e-5


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 45])
def test_a_row_is_the_same_bit_for_bit_in_any_mixed_batch(window: int | None, is_causal: bool) -> None:
    """Whole, in chunks, and beside other rows, as long as it has several tokens. A row that is not causal is whole."""
    case = dataclasses.replace(
        CASE, window=window, head_dim=32, num_kv_heads=1, soft_cap=0.7, has_sinks=True, is_causal=is_causal
    )
    total = 100
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(total, 3, 32, generator=generator)
    keys, values = torch.randn(2, total, 1, 32, generator=generator)

    def outputs(chunks: list[int], others: tuple[int, ...]) -> Tensor:
        steps = tuple((size, *others) for size in chunks)
        world = World(dataclasses.replace(case, steps=steps), triton_backend())
        results, start = [], 0
        for lengths in map(np.array, steps):
            inputs, new = world.inputs(lengths), slice(start, start + lengths[0])
            at = int(inputs.query_start_loc[np.flatnonzero(world.rows == 0)[0]])
            parts = []
            for own in (queries, keys, values):
                rows = torch.randn(int(lengths.sum()), *own.shape[1:])
                rows[at : at + lengths[0]] = own[new]
                parts.append(rows)
            metadata = world.backend.build_metadata(inputs, case.spec)
            out = world.backend.forward(*parts, LayerCache(world.views[0], metadata, world.params))
            results.append(out[at : at + lengths[0]])
            world.computed += lengths.astype(np.int32)
            start += int(lengths[0])
        return torch.cat(results)

    truth = outputs([total], ())
    if not is_causal:
        assert torch.equal(outputs([total], (7, 2)), truth)
        return
    assert torch.equal(outputs([60, 2, 36, 2], (7, 1)), truth)
    assert torch.equal(outputs([3, 97], ()), truth)


def test_a_decode_row_does_not_depend_on_who_comes_last() -> None:
    """Splits are combined in their order: two runs are the same bit for bit, also where others are between."""
    contexts = (700, 350)
    world = World(dataclasses.replace(CASE, steps=(contexts, (1, 1))), triton_backend(64))
    fill(world, contexts)
    inputs = world.inputs(np.array([1, 1]))
    metadata = world.backend.build_metadata(inputs, CASE.spec)
    query, (key, value) = torch.randn(2, 6, 16), torch.randn(2, 2, 2, 16)
    first, again = (
        world.backend.forward(query, key, value, LayerCache(world.views[0], metadata, AttentionParams(0.2)))
        for _ in range(2)
    )
    assert torch.equal(first, again)


def _padded(metadata: TritonPagedMetadata, num_rows: int, num_tokens: int) -> TritonPagedMetadata:
    """As the runner pads: rows of a dummy slot, whose blocks are all the dummy block; in mixed batches one, then empty ones."""
    more, dummy = num_tokens - metadata.num_tokens, len(metadata.block_table)
    rows_more = num_rows - metadata.num_rows
    ends = torch.arange(1, rows_more + 1) if metadata.max_query_len == 1 else torch.full((rows_more,), more)
    own_positions = torch.zeros(more) if metadata.max_query_len == 1 else torch.arange(more)

    def extended(x: Tensor, values: Tensor) -> Tensor:
        return torch.cat((x, values.to(torch.int32)))

    return dataclasses.replace(
        metadata,
        num_tokens=num_tokens,
        num_rows=num_rows,
        query_start_loc=extended(metadata.query_start_loc, metadata.num_tokens + ends),
        seq_lens=extended(metadata.seq_lens, torch.full((rows_more,), more if metadata.max_query_len > 1 else 1)),
        slots=extended(metadata.slots, torch.full((rows_more,), dummy)),
        token_slots=extended(metadata.token_slots, torch.full((more,), dummy)),
        positions=extended(metadata.positions, own_positions),
        block_table=torch.cat((metadata.block_table, torch.zeros(1, metadata.block_table.shape[1], dtype=torch.int32))),
    )


@pytest.mark.parametrize(
    ("lengths", "num_rows", "num_tokens"), [((1, 1, 1), 5, 5), ((1, 9, 3), 6, 17), ((1, 2, 3), 3, 6)]
)
def test_padding_changes_nothing(lengths: tuple[int, ...], num_rows: int, num_tokens: int) -> None:
    contexts, results, arenas = (30, 4, 140), [], []
    heads = torch.randn(num_tokens, 6 + 4, 16)
    for pad in (False, True):
        world = World(dataclasses.replace(CASE, steps=(contexts, lengths)), triton_backend(32))
        fill(world, contexts)
        metadata = world.backend.build_metadata(world.inputs(np.array(lengths)), CASE.spec)
        assert isinstance(metadata, TritonPagedMetadata)
        count = metadata.num_tokens
        if pad:
            metadata = _padded(metadata, num_rows, num_tokens)
        parts = heads[: metadata.num_tokens].split((6, 2, 2), dim=1)
        out = world.backend.forward(*parts, LayerCache(world.views[0], metadata, AttentionParams(0.3)))
        results.append(out[:count])
        arenas.append(world.arena[1:])  # all but the dummy block
    if lengths != (1, 1, 1):  # with other numbers of rows, decode may be split in another way
        assert torch.equal(*results)
    torch.testing.assert_close(*results, atol=1e-5, rtol=0)
    assert torch.equal(*arenas)


class _Norm:
    def __init__(self, num_heads: int, head_dim: int) -> None:
        self.weight, self.eps = torch.rand(num_heads, head_dim) + 0.5, 1e-5


@pytest.mark.parametrize(
    ("has_norm", "lengths", "head_dim"),
    [(False, (1, 1, 1), 64), (True, (1, 1, 1), 20), (False, (7, 1, 9), 20), (True, (7, 1, 9), 64)],
)
def test_attend_is_norm_rotation_and_forward(has_norm: bool, lengths: tuple[int, ...], head_dim: int) -> None:
    """As the default `attend` of a backend that fuses nothing; also what is in the cache."""
    case = dataclasses.replace(CASE, head_dim=head_dim, window=25, steps=((5, 9, 30), lengths))
    num_tokens = sum(lengths)
    all_heads = torch.randn(num_tokens, 10, head_dim)
    norm = _Norm(8, head_dim) if has_norm else None
    angles = torch.randn(num_tokens, head_dim)
    rotation = Rotation(angles.cos(), angles.sin(), TorchLayerOps())
    results, caches = [], []
    for backend in (TorchSdpaBackend(), triton_backend()):
        world = World(case, backend)
        world.arena.zero_()  # caches are compared whole
        fill(world, (5, 9, 30))
        metadata = backend.build_metadata(world.inputs(np.array(lengths)), case.spec)
        results.append(
            backend.attend(
                *(all_heads.clone(), rotation, norm, LayerCache(world.views[0], metadata, AttentionParams(0.2, 25))),
                num_heads=6,
            )
        )
        caches.append(world.views[0])
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-5)


def test_the_models_norm_is_a_head_norm() -> None:
    norm = QKNorm(6, 2, 16, 1e-6, layer_context(torch.float32))
    assert norm.weight.shape == (8, 16)
    assert norm.eps == 1e-6


def test_float8_saturates() -> None:
    case = dataclasses.replace(CASE, kv_cache_dtype=FLOAT8, steps=((1, 1, 1),))
    world = World(case, triton_backend())
    inputs = world.inputs(np.array([1, 1, 1]))
    key, value = torch.full((3, 2, 16), 1e4), torch.full((3, 2, 16), -500.0)
    metadata = world.backend.build_metadata(inputs, case.spec)
    out = world.backend.forward(
        torch.ones(3, 6, 16), key, value, LayerCache(world.views[0], metadata, AttentionParams(0.1))
    )
    assert out.eq(-448).all()
    assert all(world.views[0][int(world.tables[row][0])][0, :, 0].float().eq(448).all() for row in range(3))


@pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["key", "value"])
def test_float8_keeps_what_is_not_finite(part: str, number: float) -> None:
    """It becomes NaN, which every query gets that sees it: in the step that writes it, and in split decode later."""
    case = dataclasses.replace(CASE, kv_cache_dtype=FLOAT8, steps=((300,), (1,)))
    world = World(case, triton_backend(30))
    fill(world, (290,))
    index = ["key", "value"].index(part)
    world.sequences[0][0, index, 292, 1, 7] = number  # the truth's float64, of which the kernel gets a copy in float32
    (chunk, _), *_ = world.outputs(np.array([10]))
    assert chunk[2:, 3:, 7].isnan().all() and not chunk[:, :3].isnan().any()
    assert (part == "value") or not chunk[:2].isnan().any()  # a value's NaN times a weight of zero, in one tile
    (decode, _), *_ = world.outputs(np.array([1]))
    assert decode[:, 3:, 7].isnan().all() and not decode[:, :3].isnan().any()


def test_more_tiles_than_a_second_axis_could_have(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *args, **constants: None

    monkeypatch.setattr("inflight.kernels.triton.attention_mixed.attention_mixed_kernel", Recorded())
    num_rows, meta = 70_000, torch.device("meta")
    table = torch.empty(num_rows, 1, dtype=torch.int32, device=meta)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=meta)
    cache, query = torch.empty(2, 2, 2, 16, 64, device=meta), torch.empty(num_rows, 4, 64, device=meta)
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device=meta)
    attention_mixed(
        *(query, cache, table, lengths, lengths, starts), scale=1.0, sliding_window=None, soft_cap=None, sinks=None
    )
    [grid] = grids
    assert grid[0] >= 2 * num_rows and all(size < 1 << 16 for size in grid[1:])


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Memory that is never touched is never there."""
    stride = 1_300_000_000
    cache = torch.empty(2 * stride + 512, dtype=FLOAT8).as_strided((3, 2, 1, 4, 16), (stride, 64, 64, 16, 1))
    cache[2].view(torch.uint8).fill_(0x38)  # 1.0
    out = attention_decode(
        torch.ones(1, 1, 16),
        cache,
        torch.tensor([[2]], dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        DecodeScratch.allocate(1, 1, 16, CPU),
        splits=Splits(1, 1),
        scale=1.0,
        sliding_window=None,
        soft_cap=None,
        sinks=None,
    )
    assert out.eq(1).all()


def test_the_view_aliases_its_layer_alone() -> None:
    spec = CASE.spec
    arena = torch.zeros(3, 2 * spec.block_bytes + 12, dtype=torch.uint8)
    view = triton_backend().kv_cache_view(arena, spec, 1)
    view.fill_(-1.0)
    assert not arena[:, : spec.block_bytes].any()
    assert arena[:, spec.block_bytes : 2 * spec.block_bytes].view(torch.float32).eq(-1).all()
    assert not arena[:, 2 * spec.block_bytes :].any()


def test_metadata_keeps_no_reference_to_its_inputs() -> None:
    world = World(CASE, triton_backend())
    inputs = world.inputs(np.array([5, 9, 40]))
    metadata = world.backend.build_metadata(inputs, CASE.spec)
    assert isinstance(metadata, TritonPagedMetadata)
    before = metadata.block_table.clone(), metadata.seq_lens.clone(), metadata.query_start_loc.clone()
    for array in (inputs.block_table, inputs.seq_lens, inputs.query_start_loc):
        array.fill(-1)
    after = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
    assert all(map(torch.equal, before, after))


def test_selection_on_a_gpu() -> None:
    backend = get_backend("cuda", [80], 16, torch.bfloat16, FLOAT8, num_multiprocessors=132)
    assert isinstance(backend, TritonPagedBackend)
    assert not backend.is_batch_invariant
    half = torch.float16
    assert isinstance(get_backend("cuda", [512], 16, half, half, num_multiprocessors=1), TritonPagedBackend)
    for match, head_dim, kv_cache_dtype in (
        ("kv_cache_dtype='int8' is not for device='cuda'", 64, torch.int8),
        ("head dimension is 21", 21, half),
        ("head dimension is 514", 514, half),
    ):
        with pytest.raises(ConfigError, match=match):
            get_backend("cuda", [head_dim], 16, half, kv_cache_dtype, num_multiprocessors=1)


def test_scratch_takes_what_is_told_of_it() -> None:
    scratch = DecodeScratch.allocate(3, 4, 64, CPU)
    num_bytes = sum(tensor.nbytes for tensor in (scratch.partials, scratch.partial_sums, scratch.counters))
    spec = dataclasses.replace(CASE, head_dim=64).spec
    assert triton_backend(3).scratch_bytes(spec, per_head=4, num_threads=1) == num_bytes
