"""Kernels compiled for the GPU that is here, on shapes of models, in every dtype; odd shapes: tests/unit/kernels/triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.metadata import AttentionInputs
from inflight.attention.triton_paged import TritonPagedBackend
from inflight.config.architecture import SILU
from inflight.device.base import TORCH_DTYPES
from inflight.interface.kv_cache import KVCacheSpec
from inflight.kernels.triton.rotary_kv import rotary_kv
from inflight.layers.gpu_linear import GpuLinear
from inflight.sample.device_sampler import DeviceSampler
from inflight.sampling_params import SamplingParams
from tests.support import kernel_reference as reference
from tests.unit.sample.batch import Row, tokens_of
from tests.unit.sample.device_batch import columns_of, is_close_call, positions_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
VOCAB_SIZE = 151936
BLOCK_SIZE = 16
# of the difference from float64, as a share of the result's own size: products of rounded numbers, summed in float32
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
HEADS = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (32, 8, 64), (8, 1, 80)], ids=str
)
# (query tokens, tokens in the cache after the step) of each row
DECODES = [(1, length) for length in (1, 2, 16, 17, 63, 500, 1024, 3000)]
MIXED = [(1, 700), (33, 33), (70, 300), (1, 1), (129, 2000), (16, 16)]


def difference(ours: Tensor, truth: Tensor) -> float:
    found = ours.double().cpu() - truth
    assert not found.isnan().any()
    return float(found.norm() / truth.norm())


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


class Arena:
    """Rows with keys and values of `seq_lens` tokens in shuffled blocks, of which the last are still to be written. Bytes that
    belong to no key or value are NaN."""

    def __init__(
        self, rows: Sequence[tuple[int, int]], num_kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
    ) -> None:
        lengths, seq_lens = (np.array(each, dtype=np.int32) for each in zip(*rows, strict=True))
        self.spec = KVCacheSpec(
            block_size=BLOCK_SIZE, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=str(dtype).removeprefix("torch."),
            itemsize=dtype.itemsize, scale_bytes=0, sliding_window=window,
        )  # fmt: skip
        blocks_each = -(-seq_lens // BLOCK_SIZE)
        ids = np.random.default_rng(0).permutation(np.arange(1, 1 + blocks_each.sum())).astype(np.int32)
        block_table = np.zeros((len(rows), int(blocks_each.max())), dtype=np.int32)
        for row, own in enumerate(np.split(ids, np.cumsum(blocks_each)[:-1])):
            block_table[row, : len(own)] = own
        self.inputs = AttentionInputs(
            query_start_loc=np.concatenate(([0], np.cumsum(lengths))).astype(np.int32),
            seq_lens=seq_lens,
            num_computed_tokens=seq_lens - lengths,
            block_table=block_table,
        )
        self.num_tokens = int(lengths.sum())
        self.bytes = torch.full((1 + len(ids), 2 * self.spec.block_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.dtype = dtype

    def write_the_past(self, view: Tensor) -> None:
        """`view` [num_blocks, 2, num_kv_heads, block_size, head_dim]: what earlier steps have left."""
        for row, computed in enumerate(self.inputs.num_computed_tokens.tolist()):
            positions = torch.arange(computed)
            blocks = torch.from_numpy(self.inputs.block_table[row])[positions // BLOCK_SIZE].long()
            values = drawn(computed, *view.shape[1:3], view.shape[4], dtype=torch.float32, seed=row)
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[
                view.itemsize
            ]  # not everything can index floats of 8 bits
            place = blocks.to(DEVICE), slice(None), slice(None), (positions % BLOCK_SIZE).to(DEVICE)
            view.view(bits)[place] = values.to(view.dtype).view(bits)

    def truth(self, query: Tensor, view: Tensor, params: AttentionParams) -> Tensor:
        """By what stands in the cache after the step."""
        keys, values = (view[:, i].transpose(1, 2).cpu().to(torch.float64).nan_to_num(0.0) for i in (0, 1))
        return reference.paged_attention(
            query.double().cpu(), keys, values, torch.from_numpy(self.inputs.block_table).long(),
            torch.from_numpy(self.inputs.query_start_loc), torch.from_numpy(self.inputs.seq_lens), scale=params.scale,
            sliding_window=params.sliding_window, soft_cap=params.soft_cap,
            sinks=None if params.sinks is None else params.sinks.cpu(), is_causal=params.is_causal,
        )  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> TritonPagedBackend:
    count = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 8
    return TritonPagedBackend(torch.device(DEVICE), num_multiprocessors=count)


def check_attention(
    backend: TritonPagedBackend,
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None = None,
    kv_cache_dtype: torch.dtype | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    arena = Arena(rows, num_kv_heads, head_dim, kv_cache_dtype or dtype, window)
    view = backend.kv_cache_view(arena.bytes, arena.spec, 1)  # of the second of two layers
    assert view.dtype == TORCH_DTYPES[arena.spec.dtype]
    arena.write_the_past(view)
    packed = drawn(arena.num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=99)
    query, key, value = packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    metadata = backend.build_metadata(arena.inputs, arena.spec)
    params = AttentionParams(1 / math.sqrt(head_dim), window, soft_cap, sinks, is_causal=is_causal)
    output = backend.forward(query, key, value, LayerCache(view, metadata, params))
    again = backend.forward(query, key, value, LayerCache(view, metadata, params))
    assert torch.equal(output, again), "the result depends on timing"
    tolerance = TOLERANCES[dtype] if kv_cache_dtype is None else 2 * TOLERANCES[dtype]
    assert difference(output, arena.truth(query, view, params)) < tolerance
    last = int(arena.inputs.seq_lens[-1]) - 1
    block = int(arena.inputs.block_table[-1, last // BLOCK_SIZE])
    for i, written in enumerate((key, value)):
        found, expected = view[block, i, :, last % BLOCK_SIZE].float(), written[-1].to(view.dtype).float()
        rounding = 0.0 if kv_cache_dtype is None else 2**-3  # of the last bit
        torch.testing.assert_close(found, expected, rtol=rounding, atol=0.0)


@DTYPES
@HEADS
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_paged_attention(
    backend: TritonPagedBackend, rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, head_dim: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    check_attention(backend, rows, (num_heads, num_kv_heads, head_dim), dtype)


@DTYPES
@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_soft_cap_sinks_and_large_heads(
    backend: TritonPagedBackend, rows: list[tuple[int, int]], head_dim: int, dtype: torch.dtype
) -> None:
    sinks = 3 + 3 * drawn(8, dtype=torch.float32, seed=5)
    check_attention(backend, rows, (8, 2, head_dim), dtype, window=1000, soft_cap=2.0, sinks=sinks)


@pytest.mark.parametrize("rows", [DECODES, MIXED, DECODES * 24], ids=["decodes", "mixed", "many decodes"])
@pytest.mark.parametrize("window", [1, 100, None])
def test_windows_and_many_rows(backend: TritonPagedBackend, rows: list[tuple[int, int]], window: int | None) -> None:
    check_attention(backend, rows, (16, 8, 128), torch.bfloat16, window=window)


@DTYPES
@pytest.mark.parametrize("window", [None, 64])
def test_both_directions(backend: TritonPagedBackend, window: int | None, dtype: torch.dtype) -> None:
    whole = [(300, 300), (1, 1), (17, 17), (700, 700)]
    check_attention(backend, whole, (12, 12, 64), dtype, window=window, is_causal=False)


@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_and_values_of_8_bits(
    backend: TritonPagedBackend, rows: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    check_attention(backend, rows, (32, 8, 128), dtype, kv_cache_dtype=torch.float8_e4m3fn)


@DTYPES
@HEADS
def test_norm_rotation_and_write(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    arena = Arena([(40, 300), (1, 17), (7, 7)], num_kv_heads, head_dim, dtype, None)
    view = arena.bytes.view(dtype).view(len(arena.bytes), 2, 2, num_kv_heads, BLOCK_SIZE, head_dim)[:, 0]
    heads = drawn(arena.num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=1)
    weight = drawn(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=2)
    cos, sin = (drawn(arena.num_tokens, head_dim, dtype=dtype, seed=seed) for seed in (3, 4))
    lengths = np.diff(arena.inputs.query_start_loc)
    slots = np.repeat(np.arange(3), lengths)
    positions = np.concatenate([np.arange(end - n, end) for n, end in zip(lengths, arena.inputs.seq_lens, strict=True)])
    to_device = [
        torch.from_numpy(each.astype(np.int32)).to(DEVICE) for each in (arena.inputs.block_table, slots, positions)
    ]
    query = rotary_kv(heads, weight, 1e-6, (cos, sin), view, *to_device, num_heads=num_heads)
    wide = heads.double().cpu()
    normed = reference.rms_norm(wide[:, : num_heads + num_kv_heads], weight.double().cpu(), 1e-6)[0]
    angles = [each.double().cpu()[:, None] for each in (cos, sin)]
    turned = normed * angles[0] + normed.roll(head_dim // 2, dims=-1) * angles[1]
    assert difference(query, turned[:, :num_heads]) < TOLERANCES[dtype]
    blocks = torch.from_numpy(arena.inputs.block_table)[slots, positions // BLOCK_SIZE].long().to(DEVICE)
    written = view[blocks, :, :, torch.from_numpy(positions % BLOCK_SIZE).to(DEVICE)]
    assert difference(written[:, 0], turned[:, num_heads:]) < TOLERANCES[dtype]
    assert torch.equal(written[:, 1], heads[:, num_heads + num_kv_heads :])


@pytest.mark.parametrize("quantization", [None, "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tuned_products(quantization: str | None, dtype: torch.dtype) -> None:
    """As the engine tunes and calls them. In few bits against the library's product, whose weights are rounded likewise, and in
    fp8 its rows too."""
    most = 0.03 if quantization == "fp8" else TOLERANCES[dtype]
    method = GpuLinear(torch.device(DEVICE), dtype, dtype, quantization=quantization, group_size=64)
    weight, bias = drawn(3072, 4096, dtype=dtype, seed=1), drawn(3072, dtype=dtype, seed=2)
    product, gated = method.prepare([weight], bias), method.prepare([weight], None, gate=SILU)
    rows = drawn(300, 4096, dtype=dtype, seed=3)
    untuned, untuned_gated = product(rows, dtype), gated(rows, dtype)
    choices = method.tune(64)
    print(*choices, sep="\n")
    for count in (1, 2, 8, 16, 17, 64, 65, 300):
        assert difference(product(rows[:count], dtype), untuned[:count].double().cpu()) < 2 * most
        assert difference(gated(rows[:count], dtype), untuned_gated[:count].double().cpu()) < 3 * most
    truth = rows.double().cpu() @ weight.double().cpu().T + bias.double().cpu()
    assert difference(untuned, truth) < (TOLERANCES[dtype] if quantization is None else 0.15)


def test_draws_are_those_of_the_cpu() -> None:
    """Of a vocabulary of 152,000 tokens; beside the columns of other rows, by a graph, and twice the same."""
    fields = [
        {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 50}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.02}, {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    ]  # fmt: skip
    rows = [Row(SamplingParams(**fields[i % len(fields)]), seed=i, position=1000 + i) for i in range(48)]
    logits = (drawn(len(rows), VOCAB_SIZE, dtype=torch.float32, seed=5) * 2.5).bfloat16().float()
    sampler = DeviceSampler(VOCAB_SIZE, len(rows), torch.device(DEVICE))
    columns, slots = (each.to(DEVICE) for each in columns_of(rows, VOCAB_SIZE))
    positions, tokens = positions_of(rows).to(DEVICE), torch.full_like(slots, -7)
    sampler.draw(logits, columns, slots, positions, tokens)
    drawn_tokens, expected = tokens.tolist(), tokens_of(logits.cpu(), rows)
    for i, (ours, theirs) in enumerate(zip(drawn_tokens, expected, strict=True)):
        assert ours == theirs or is_close_call(logits[i].cpu(), rows[i], ours, theirs), (
            f"{rows[i]}: {ours}, not {theirs}"
        )
    if DEVICE == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampler.draw(logits, columns, slots, positions, tokens)
        tokens.fill_(-7)
        graph.replay()
        assert tokens.tolist() == drawn_tokens
