"""The C++ attention kernel against the float64 reference, for every instruction set that this processor has."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.cpu_paged import CpuPagedBackend
from inflight.attention.metadata import AttentionInputs
from inflight.attention.selector import get_backend
from inflight.attention.torch_sdpa import TorchSdpaBackend
from inflight.device.cpu import CpuDevice
from inflight.errors import ConfigError
from inflight.interface.kv_cache import KVCacheSpec
from tests.conftest import FULL
from tests.support.covering_array import covering_array
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE, ONE_SET_OR_ALL
from tests.unit.attention.paged_case import Case, World, cases

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")
# what the arithmetic adds; an int8 cache takes queries and weights to 16 bits
TOLERANCES = {
    (torch.float32, None): 1e-5,
    (torch.bfloat16, None): 4e-2,
    (torch.float32, torch.int8): 5e-4,
    (torch.bfloat16, torch.int8): 4e-2,
}
PARAMS = AttentionParams(0.2)
DTYPES = pytest.mark.parametrize(("dtype", "kv_cache_dtype"), TOLERANCES)


def covered(**factors: list[Any]) -> pytest.MarkDecorator:
    """All pairs of instruction set, types and these factors; all triples in `make test-full`."""
    rows = covering_array({"name": INSTRUCTION_SETS_HERE, "dtypes": list(TOLERANCES), **factors}, 3 if FULL else 2)
    return pytest.mark.parametrize("row", rows, ids=lambda row: "-".join(map(str, row.values())))


def bent(row: dict[str, Any]) -> dict[str, Any]:
    names = "soft_cap", "has_sinks", "value_dim", "is_causal", "has_images", "bias_radius"
    return {name: row[name] for name in names if name in row}


@pytest.fixture(params=INSTRUCTION_SETS_HERE)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", request.param)
    return str(request.param)


def world(case: Case) -> World:
    backend = get_backend("cpu", [case.head_dim], case.block_size, case.dtype, case.kv_cache_dtype or case.dtype)
    assert isinstance(backend, CpuPagedBackend)
    return World(case, backend)


@st.composite
def kernel_cases(draw: st.DrawFn) -> Case:
    head_dim = draw(st.sampled_from([16, 48, 64, 80, 128, 512]))
    return dataclasses.replace(
        draw(cases()),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([None, *range(16, head_dim, 16)])),
        block_size=draw(st.sampled_from([16, 32, 48, 256])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kv_cache_dtype=draw(st.sampled_from([None, torch.int8])),
        soft_cap=draw(st.sampled_from([None, 0.7, 50.0])),
        has_sinks=draw(st.booleans()),
        bias_radius=draw(st.sampled_from([None, 0, 5, 40, 400])),
    )


@hypothesis.settings(
    max_examples=400 if FULL else 30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(case=kernel_cases())
def test_equals_the_reference(instruction_set: str, case: Case) -> None:
    assert world(case).run() < TOLERANCES[case.dtype, case.kv_cache_dtype]


LONG = Case(
    num_kv_heads=2,
    per_head=3,
    head_dim=32,
    block_size=16,
    window=None,
    num_layers=1,
    padding=0,
    steps=((1100, 30), (1, 200), (40, 1), (1, 1)),
    seed=0,
)


@covered(
    window=[None, 130, 1500],
    num_threads=[1, 8],
    soft_cap=[None, 0.7],
    has_sinks=[False, True],
    value_dim=[None, 16],
    is_causal=[True, False],
    has_images=[False, True],
    bias_radius=[None, 60, 1400],
)
def test_contexts_of_several_splits(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight threads the few long rows are shared, and merged."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", row["name"])
    dtype, kv_cache_dtype = row["dtypes"]
    before = torch.get_num_threads()
    torch.set_num_threads(row["num_threads"])
    try:
        case = dataclasses.replace(LONG, dtype=dtype, kv_cache_dtype=kv_cache_dtype, window=row["window"], **bent(row))
        assert world(case).run() < TOLERANCES[dtype, kv_cache_dtype]
    finally:
        torch.set_num_threads(before)


def test_int8_stays_near_what_was_given(instruction_set: str) -> None:
    """Standard normal keys and values of 32 dimensions move by at most about 3 / 254 each."""
    case = dataclasses.replace(LONG, kv_cache_dtype=torch.int8)
    near = world(case)
    near.sees_what_was_written = False
    assert TOLERANCES[torch.float32, torch.int8] < near.run() < 3e-2


@covered(
    per_head=[1, 2, 8],
    soft_cap=[None, 0.7],
    has_sinks=[False, True],
    value_dim=[None, 16],
    is_causal=[True, False],
    has_images=[False, True],
    bias_radius=[None, 60, 1400],
)
def test_many_short_rows_and_heads_at_once(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of several heads; threads that take their next tile early."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", row["name"])
    (dtype, kv_cache_dtype), per_head = row["dtypes"], row["per_head"]
    prompts = (140,) * 12 if FULL else (140, 130, *(9,) * 10)  # more than a chunk of keys
    case = Case(
        num_kv_heads=5,
        per_head=per_head,
        head_dim=64,
        block_size=32,
        window=None,
        num_layers=1,
        padding=64,
        steps=(prompts, (1,) * 12, (2, 1, 3) * 4),
        seed=3,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        **bent(row),
    )
    assert world(case).run() < TOLERANCES[dtype, kv_cache_dtype]


@DTYPES
def test_few_tokens(instruction_set: str, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None) -> None:
    few = world(dataclasses.replace(LONG, steps=((20, 3), (1, 1)), dtype=dtype, kv_cache_dtype=kv_cache_dtype))
    assert few.run() < TOLERANCES[dtype, kv_cache_dtype]


def test_rows_of_zeros_in_int8(instruction_set: str) -> None:
    zeros = world(dataclasses.replace(LONG, steps=((20, 3), (1, 1)), kv_cache_dtype=torch.int8))
    for sequence in zeros.sequences:
        sequence[:, :, 1::2] = 0
    assert zeros.run() < TOLERANCES[torch.float32, torch.int8]


@pytest.mark.parametrize("part", ["key", "value"])
@DTYPES
def test_what_is_not_finite_reaches_every_query_that_sees_it(
    instruction_set: str, dtype: torch.dtype, kv_cache_dtype: torch.dtype | None, part: str
) -> None:
    """An 8-bit row with a number that is not finite is NaN as a whole. In the model's type only a NaN must make one: a key of
    infinity may make a score of minus infinity, which is a weight of zero."""
    numbers = [torch.nan] if kv_cache_dtype is None else [torch.nan, torch.inf, -torch.inf]
    for number in numbers:
        for place in (0, 31):
            case = dataclasses.replace(LONG, steps=((45, 20), (1, 1)), dtype=dtype, kv_cache_dtype=kv_cache_dtype)
            broken = world(case)
            broken.sequences[0][0, ["key", "value"].index(part), 40, 1, place] = number
            (prompt, truth), *_ = broken.outputs(np.array(case.steps[0]))
            assert truth.isnan().any()
            assert not (truth.isnan() & ~prompt.isnan()).any(), (number, place)
            assert not prompt[:, :3].isnan().any()  # the other key head
            (decode, truth), *_ = broken.outputs(np.array(case.steps[1]))
            assert torch.equal(decode.isnan(), truth.isnan()), (number, place)


@covered(num_threads=[1, 8], soft_cap=[None, 0.7], has_sinks=[False, True], value_dim=[None, 16])
def test_a_whole_chunk_or_split_of_nan_is_not_forgotten(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With no score that is a number, there is no largest one."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", row["name"])
    dtype, kv_cache_dtype = row["dtypes"]
    before = torch.get_num_threads()
    torch.set_num_threads(row["num_threads"])
    try:
        for first, end in ((0, 128), (128, 256), (0, 1024), (1024, 1101)):
            case = dataclasses.replace(
                LONG, steps=((1100,), (1,)), dtype=dtype, kv_cache_dtype=kv_cache_dtype, **bent(row)
            )
            broken = world(case)
            metadata = broken.backend.build_metadata(broken.inputs(np.array([1100])), case.spec)
            queries = torch.randn(1100, 6, 32).to(dtype)
            keys, values = broken.sequences[0][0].to(dtype)
            keys[first:end] = torch.nan
            broken.backend.forward(
                queries, keys[:1100], values[:1100], LayerCache(broken.views[0], metadata, broken.params)
            )
            broken.computed += 1100
            metadata = broken.backend.build_metadata(broken.inputs(np.array([1])), case.spec)
            last = broken.backend.forward(
                queries[:1], keys[1100:], values[1100:], LayerCache(broken.views[0], metadata, broken.params)
            )
            assert last.isnan().all(), (first, end)
    finally:
        torch.set_num_threads(before)


def test_a_query_that_is_not_finite_gives_nan(instruction_set: str) -> None:
    for kv_cache_dtype, number in itertools.product((None, torch.int8), (torch.nan, torch.inf)):
        case = dataclasses.replace(LONG, steps=((300,),), kv_cache_dtype=kv_cache_dtype)
        made = world(case)
        metadata = made.backend.build_metadata(made.inputs(np.array([300])), case.spec)
        queries = torch.randn(300, 6, 32)
        queries[200, 3, 5] = number
        keys, values = made.sequences[0][0].float()
        out = made.backend.forward(queries, keys, values, LayerCache(made.views[0], metadata, PARAMS))
        assert out[200, 3].isnan().all()
        out[200, 3] = 0
        assert not out.isnan().any()


@pytest.mark.parametrize("name", ONE_SET_OR_ALL)
def test_results_that_wait_to_be_merged_take_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tiles of 48 queries over 32 splits: a result of each would take 11 MB.

    The peak is the whole process's: what its other threads touch meanwhile, some hundred kilobytes, counts, too.
    """
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", name)
    num_queries, context = 336, 32768
    all_results = num_queries * 32 * 256 * 4  # float32
    spec = KVCacheSpec(block_size=16, num_kv_heads=1, head_dim=256, dtype="bfloat16", itemsize=2)
    backend = get_backend("cpu", [256], 16, torch.bfloat16, torch.bfloat16)
    view = backend.kv_cache_view(torch.zeros(64, spec.block_bytes, dtype=torch.uint8), spec, 0)
    inputs = AttentionInputs(
        query_start_loc=np.array([0, num_queries], dtype=np.int32),
        seq_lens=np.array([context], dtype=np.int32),
        num_computed_tokens=np.array([context - num_queries], dtype=np.int32),
        block_table=np.resize(np.arange(64, dtype=np.int32), (1, context // 16)),
    )
    metadata = backend.build_metadata(inputs, spec)
    rows = torch.randn(3, num_queries, 1, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    device, outputs = CpuDevice(), []

    def attend(num_threads: int) -> None:  # in a thread of its own: it begins without memory of its own
        def call() -> None:
            torch.set_num_threads(num_threads)
            outputs.append(backend.forward(*rows, LayerCache(view, metadata, PARAMS)))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    try:
        attend(1)
        taken = device.measure_peak_bytes(lambda: attend(2))
    finally:
        device.close()
    scratch = backend.scratch_bytes(spec, per_head=1, num_threads=2)
    assert scratch < 3 << 20
    assert taken < scratch + all_results // 2
    assert torch.equal(*outputs)


@covered(
    window=[None, 200],
    soft_cap=[None, 0.7],
    has_sinks=[False, True],
    value_dim=[None, 16],
    is_causal=[True, False],
    bias_radius=[None, 60, 1400],
)
def test_a_row_is_the_same_bit_for_bit_in_any_company(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in chunks, beside others, on one thread or eight."""
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", row["name"])
    (dtype, kv_cache_dtype), window, total = row["dtypes"], row["window"], 1300
    case = dataclasses.replace(
        LONG, dtype=dtype, kv_cache_dtype=kv_cache_dtype, window=window, steps=((total,),), **bent(row)
    )
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(total, 6, 32, generator=generator).to(dtype)
    keys, values = torch.randn(2, total, 2, 32, generator=generator).to(dtype)

    def outputs(chunks: list[int], others: int, num_threads: int) -> torch.Tensor:
        company = tuple(40 for _ in range(others))
        made = world(dataclasses.replace(case, steps=tuple((size, *company) for size in chunks)))
        before, results, start = torch.get_num_threads(), [], 0
        torch.set_num_threads(num_threads)
        try:
            for size in chunks:
                lengths = np.array([size, *company])
                inputs = made.inputs(lengths)
                at = int(inputs.query_start_loc[np.flatnonzero(made.rows == 0)[0]])
                new = slice(start, start + size)
                parts = []
                for own in (queries, keys, values):
                    rows = torch.randn(int(lengths.sum()), *own.shape[1:]).to(dtype)
                    rows[at : at + size] = own[new]
                    parts.append(rows)
                if case.value_dim is not None:
                    parts[2] = parts[2][:, :0]
                metadata = made.backend.build_metadata(inputs, case.spec)
                out = made.backend.forward(*parts, LayerCache(made.views[0], metadata, made.params))
                results.append(out[at : at + size].clone())
                made.computed += lengths.astype(np.int32)
                start += size
        finally:
            torch.set_num_threads(before)
        return torch.cat(results)

    truth = outputs([total], others=0, num_threads=1)
    assert torch.equal(outputs([total], others=0, num_threads=8), truth)
    assert torch.equal(outputs([total], others=3, num_threads=2), truth)
    if not case.is_causal:
        return  # its rows are never cut into chunks
    assert torch.equal(outputs([500, 1, 99, 640, 1, 1, 58], others=0, num_threads=8), truth)
    assert torch.equal(outputs([37, 1200, 1, 62], others=2, num_threads=1), truth)


def test_what_it_does_not_support_goes_to_torch() -> None:
    for head_dim, block_size, dtype in ((24, 16, torch.float32), (64, 8, torch.float32), (64, 16, torch.float16)):
        assert isinstance(get_backend("cpu", [head_dim], block_size, dtype, dtype), TorchSdpaBackend)
    mixed = get_backend("cpu", [64, 24], 16, torch.float32, torch.float32)
    assert isinstance(mixed, TorchSdpaBackend), "one backend computes all layers"


@pytest.mark.parametrize(("head_dim", "block_size"), [(24, 16), (64, 8), (528, 16)])
def test_int8_that_the_kernel_does_not_serve_is_refused(head_dim: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='int8' needs.*here {head_dim}.*here {block_size}"):
        get_backend("cpu", [head_dim], block_size, torch.float32, torch.int8)


def test_int8_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "off")
    with pytest.raises(ConfigError, match=r"needs the C\+\+ kernels"):
        get_backend("cpu", [64], 16, torch.bfloat16, torch.int8)


def test_the_view_aliases_its_layer_alone() -> None:
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_dim=16, dtype="float32", itemsize=4)
    arena = torch.zeros(3, 2 * spec.block_bytes + 12, dtype=torch.uint8)
    view = get_backend("cpu", [16], 16, torch.float32, torch.float32).kv_cache_view(arena, spec, 1)
    assert view.dtype == torch.float32
    assert view[0].numel() * 4 == spec.block_bytes
    view.fill_(-1.0)
    assert not arena[:, : spec.block_bytes].any()
    assert not arena[:, 2 * spec.block_bytes :].any()


def test_metadata_keeps_no_reference_to_its_inputs() -> None:
    case = dataclasses.replace(LONG, steps=((30, 20), (1, 20)))
    truth, staged = world(case), world(case)
    build = staged.backend.build_metadata

    def build_and_overwrite(inputs, spec):
        names = ("query_start_loc", "seq_lens", "num_computed_tokens", "block_table")
        copies = dataclasses.replace(inputs, **{name: getattr(inputs, name).copy() for name in names})
        metadata = build(copies, spec)
        for name in names:
            getattr(copies, name).fill(-1)
        return metadata

    staged.backend.build_metadata = build_and_overwrite
    assert truth.run() == staged.run() < 1e-5
