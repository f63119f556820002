"""Linear layers as a GPU has them, on the CPU in Triton's interpreter: every form of weight, and how a way is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from inflight.config.architecture import GELU_TANH, SILU
from inflight.errors import ConfigError
from inflight.kernels.quantized_weight import QuantizedWeight, quantize_rows
from inflight.kernels.triton.experts import ExpertWeights
from inflight.kernels.triton.layer_ops import LARGEST
from inflight.kernels.triton.split_k import SplitKScratch, TileConfig
from inflight.layers import gpu_linear, linear_tuner
from inflight.layers.context import select_linear_method
from inflight.layers.gpu_choices import KeptChoice, KeptChoices
from inflight.layers.gpu_linear import GpuLinear
from inflight.layers.linear_method import LinearChoice
from inflight.layers.linear_tuner import GpuWeight, TunedLinear, tune
from tests.support.kernel_reference import multiply_gate
from tests.support.triton_inputs import DEVICE, IS_INTERPRETED, drawn

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered")  # numpy's, in the interpreter: exp(-gate) overflows
FLOAT = torch.float32
TILES = [TileConfig(block_n=32, block_k=32, num_splits=splits, num_warps=4, num_stages=2) for splits in (1, 2, 3)]


def method(quantization: str | None = None, group_size: int = 64, dtype: torch.dtype = FLOAT) -> GpuLinear:
    return GpuLinear(DEVICE, dtype, dtype, quantization=quantization, group_size=group_size, min_weight_bytes=0)


@pytest.fixture(autouse=True)
def _keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuner, "kept_choices", lambda device: KeptChoices(None))


@pytest.fixture
def has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to fp8 in a way of its own, so there torch takes the kernel's place."""

    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.float().abs().amax(dim=1, keepdim=True) / LARGEST
        return (x.float() / scales).to(torch.float8_e4m3fn), scales

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if IS_INTERPRETED:
        monkeypatch.setattr(gpu_linear, "quantize_rows_fp8", rows)


class FakeClock:
    """`seconds`: of a call -> its time, or an error. Calls run, as they would."""

    num_multiprocessors = 4

    def __init__(self, time_of: Callable[[partial[None]], float], cache_bytes: int = 0) -> None:
        self.time_of, self.cache_bytes, self.measured = time_of, cache_bytes, 0

    def microseconds(self, calls: Sequence[Callable[[], None]]) -> float:
        self.measured += 1
        for call in calls:
            call()
        assert isinstance(calls[0], partial)
        return self.time_of(calls[0])


class CountingWeight(GpuWeight):
    """Remembers how it was multiplied."""

    def __init__(self, kind: str = "floats", shape: tuple[int, int] = (8, 4), num_bytes: int = 1 << 30) -> None:
        self.kind, self.shape, self.num_bytes = kind, shape, num_bytes
        self.ways: list[TileConfig | None] = []
        self.copies: list[CountingWeight] = []

    def tiles(self, num_multiprocessors: int) -> list[TileConfig]:
        assert num_multiprocessors == FakeClock.num_multiprocessors
        return [] if self.kind == "fixed" else TILES

    def multiply(
        self, x: Tensor, bias: Tensor | None, out: Tensor, tile: TileConfig, scratch: SplitKScratch, *, gate: str | None
    ) -> None:
        num_partials = tile.num_splits * 32 * 16 if tile.num_splits > 1 else 1
        assert scratch.partials.numel() >= num_partials, "reserved before it is measured"
        if self.kind == "broken" and tile.num_splits == 3:
            raise OutOfResources(300 << 10, 99 << 10, "shared memory")
        if self.kind == "uncompilable" and tile.num_splits == 3:
            raise RuntimeError("PassManager::run failed")
        if self.kind == "fatal" and tile.num_splits == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.ways.append(tile)

    def multiply_by_library(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        self.ways.append(None)

    def stack(self, weights: Sequence[GpuWeight]) -> ExpertWeights:
        raise AssertionError("this is no weight of experts")

    def floats(self, dtype: torch.dtype) -> Tensor:
        raise AssertionError("this weight is only multiplied")

    def __deepcopy__(self, memo: object) -> CountingWeight:
        self.copies.append(CountingWeight(self.kind, self.shape, self.num_bytes))
        return self.copies[-1]


def time_of(call: partial[None], *, library: float) -> float:
    """More splits are faster."""
    configs = [argument for argument in call.args if isinstance(argument, TileConfig)]
    return 10.0 - configs[0].num_splits if configs else library


class Tuned:
    """Layers of these weights, and what `tune` measures them with."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, *weights: CountingWeight, path: Path | None = None
    ) -> None:
        monkeypatch.setattr(linear_tuner, "GraphClock", lambda device: clock)
        monkeypatch.setattr(linear_tuner, "kept_choices", lambda device: KeptChoices(path))
        scratch = SplitKScratch(DEVICE)
        self.layers = {id(weight): TunedLinear(weight, None, scratch, gate=None) for weight in weights}

    def tune(self, max_num_rows: int) -> list[LinearChoice]:
        layers = list(self.layers.values())
        return tune(layers, max_num_rows, device=DEVICE, dtype=FLOAT, out_dtype=FLOAT, min_weight_bytes=0)

    def way(self, weight: CountingWeight, num_rows: int) -> TileConfig | None:
        weight.ways.clear()
        out = torch.zeros(num_rows, 8, device=DEVICE)
        assert self.layers[id(weight)](torch.zeros(num_rows, 4, device=DEVICE), FLOAT, out) is out
        [found] = weight.ways
        return found


def test_the_fastest_is_chosen_for_each_count_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(partial(time_of, library=8.5))
    weight = CountingWeight()
    tuned = Tuned(monkeypatch, clock, weight)
    assert tuned.way(weight, 1) is None, "nothing was measured yet"
    choices = tuned.tune(20)
    assert [choice.num_rows for choice in choices] == [1, 2, 4, 8, 16, 32]
    assert {(choice.way, choice.microseconds) for choice in choices} == {(str(TILES[2]), 7.0)}
    assert {choice.library_microseconds for choice in choices} == {8.5}
    measured = clock.measured
    assert [tuned.way(weight, rows) for rows in (1, 3, 32, 33, 65)] == [TILES[2]] * 3 + [None] * 2
    assert tuned.way(weight, 0) is None
    assert clock.measured == measured, "a choice is looked up"


def test_the_library_stays_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = CountingWeight()
    tuned = Tuned(monkeypatch, FakeClock(partial(time_of, library=1.0)), weight)
    assert {(choice.way, choice.microseconds) for choice in tuned.tune(64)} == {("library", 1.0)}
    assert tuned.way(weight, 1) is None


def test_an_error_of_the_device_is_no_slow_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = Tuned(monkeypatch, FakeClock(partial(time_of, library=8.5)), CountingWeight("fatal"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        tuned.tune(1)


@pytest.mark.parametrize("kind", ["broken", "uncompilable"])
def test_what_does_not_run_is_left_out(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = CountingWeight(kind)
    tuned = Tuned(monkeypatch, FakeClock(partial(time_of, library=9.5)), weight)
    with caplog.at_level(logging.WARNING):
        tuned.tune(1)
    assert tuned.way(weight, 1) == TILES[1]
    assert "does not run" in caplog.text


def test_a_tile_that_does_not_fit_is_tried_with_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ and AWQ with groups of 128 have 64 rows in six stages on no GPU with 99 KB of shared memory."""
    weight = CountingWeight()
    tuned = Tuned(monkeypatch, FakeClock(partial(time_of, library=9.5)), weight)
    deep = replace(TILES[0], num_stages=6)

    def multiply(x: Tensor, bias: object, out: Tensor, tile: TileConfig, scratch: object, *, gate: str | None) -> None:
        if tile.num_stages > 3:
            raise OutOfResources(136 << 10, 99 << 10, "shared memory")
        weight.ways.append(tile)

    monkeypatch.setattr(weight, "multiply", multiply)
    monkeypatch.setattr(weight, "tiles", lambda num_multiprocessors: [deep])
    tuned.tune(64)
    assert tuned.way(weight, 64) == replace(deep, num_stages=3)


def test_the_next_start_takes_the_choices_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it would choose others: another way adds in another order, and rounds differently."""
    path = tmp_path / "kept" / "products.json"
    first, second = CountingWeight(), CountingWeight()
    chosen = Tuned(monkeypatch, FakeClock(partial(time_of, library=8.5)), first, path=path).tune(4)
    clock = FakeClock(partial(time_of, library=1.0))
    again = Tuned(monkeypatch, clock, second, path=path)
    assert again.tune(4) == chosen
    assert clock.measured == 0
    assert [again.way(second, rows) for rows in (1, 2, 4)] == [TILES[2]] * 3
    more = again.tune(8)
    assert (len(more), clock.measured) == (4, 1 + len(TILES)), "what is new is measured"
    path.write_text("{damaged")
    assert {choice.way for choice in again.tune(1)} == {"library"}


def test_a_kept_choice_that_does_not_run_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "products.json"
    Tuned(monkeypatch, FakeClock(partial(time_of, library=8.5)), CountingWeight(), path=path).tune(1)
    weight = CountingWeight()
    tuned = Tuned(monkeypatch, FakeClock(partial(time_of, library=9.5)), weight, path=path)
    weight.kind = "broken"
    (name,) = KeptChoices(path).read()
    tuned.layers[id(weight)].key = CountingWeight().kind, weight.shape, None
    tuned.tune(1)
    assert tuned.way(weight, 1) == TILES[1]
    assert KeptChoices(path).read()[name]["tile"] == asdict(TILES[1])


def test_the_first_of_two_ranks_is_right(tmp_path: Path) -> None:
    store = KeptChoices(tmp_path / "products.json")
    ours, theirs = (KeptChoice(tile=None, microseconds=time, library_microseconds=9.0) for time in (1.0, 2.0))
    assert store.agree({"a": ours}, {}) == {"a": ours}
    assert store.agree({"a": theirs, "b": theirs}, {}) == {"a": ours, "b": theirs}
    assert KeptChoices(None).agree({"a": theirs}, {}) == {"a": theirs}


def test_kinds_and_shapes_are_chosen_apart_and_weights_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(partial(time_of, library=8.5))
    alike = [CountingWeight(num_bytes=100 << 20) for _ in range(5)]
    other, fixed = CountingWeight("4 bits"), CountingWeight("fixed")
    tuned = Tuned(monkeypatch, clock, *alike, other, fixed)
    assert len(tuned.tune(1)) == 2
    assert clock.measured == 2 * (1 + len(TILES))
    turns = [len(weight.ways) for weight in alike]
    assert turns == [turns[0]] * 3 + [0] * 2, "three are more than a cache holds"
    assert turns[0] * 3 >= 8 * 4
    assert tuned.way(alike[4], 1) == TILES[2] and tuned.way(fixed, 1) is None


def test_few_weights_are_copied_so_that_a_cache_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = [CountingWeight(num_bytes=10 << 20) for _ in range(2)]
    Tuned(monkeypatch, FakeClock(partial(time_of, library=8.5), cache_bytes=22 << 20), *alike).tune(2)
    copies = alike[0].copies
    assert len(copies) == 3 and not alike[1].copies, "five are more than twice the cache; for both counts of rows"
    assert {len(weight.ways) for weight in (*alike, *copies)} == {2 * 2 * (1 + len(TILES))}


@pytest.mark.parametrize("gate", [None, SILU, GELU_TANH])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
def test_floats(num_rows: int, has_out: bool, gate: str | None) -> None:
    weight, bias, x = drawn(0, 48, 40), drawn(1, 48), drawn(2, num_rows, 40)
    layer = method().prepare([weight], bias, gate=gate)
    truth = F.linear(x, weight, bias)
    if gate is not None:
        truth = multiply_gate(truth, gate)
    out = torch.empty_like(truth) if has_out else None
    result = layer(x, FLOAT, out)
    assert out is None or result is out
    torch.testing.assert_close(result, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [None, SILU, GELU_TANH])
def test_the_tuned_way_gives_the_same(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantize_rows(drawn(0, 48, 128), bits=4, group_size=32)
    monkeypatch.setattr(linear_tuner, "GraphClock", lambda device: FakeClock(partial(time_of, library=100.0), 6000))
    monkeypatch.setattr(linear_tuner, "_MIN_CALLS", 1)
    tuned = method()
    layer, bias = tuned.prepare(weight, drawn(1, 48), gate=gate), drawn(1, 48)
    tuned.prepare(weight, None, gate=None if gate else SILU)  # of the same shape, and measured apart
    x = drawn(2, 1, 128)
    by_library = layer(x, FLOAT)
    assert {choice.way != "library" for choice in tuned.tune(1)} == {True}
    truth = F.linear(x.double(), weight.dequantize().double(), bias.double())
    if gate is not None:
        truth = multiply_gate(truth, gate)
    for result in (by_library, layer(x, FLOAT)):
        torch.testing.assert_close(result.double(), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [None, SILU, GELU_TANH])
@pytest.mark.usefixtures("has_fp8")
def test_the_tuned_way_keeps_activations_of_fp8_weights(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_tuner, "GraphClock", lambda device: FakeClock(partial(time_of, library=100.0), 4000))
    monkeypatch.setattr(linear_tuner, "_MIN_CALLS", 1)
    tuned, weight, x = method("fp8", dtype=torch.float16), drawn(0, 48, 80, dtype=torch.float16), drawn(1, 1, 80)
    layer, x = tuned.prepare([weight], None, gate=gate), x.half()
    stored, scales = gpu_linear.quantize_rows_fp8(weight)
    truth = x.double() @ (stored.double() * scales.double()).T
    truth = truth if gate is None else multiply_gate(truth, gate)
    by_library = layer(x, torch.float16)
    assert {choice.way != "library" for choice in tuned.tune(1)} == {True}
    difference = [
        float((found.double() - truth).norm() / truth.norm()) for found in (by_library, layer(x, torch.float16))
    ]
    assert difference[1] < 1e-3 < difference[0], "the library rounds activations too"
    exact = method("fp8")
    exact.prepare([weight.float()], None, gate=gate)
    assert exact.tune(1) == [], "float32 is left to the library"


@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.012), ("int4", 0.12), ("fp8", 0.06)])
@pytest.mark.parametrize("gate", [None, SILU, GELU_TANH])
@pytest.mark.usefixtures("has_fp8")
def test_floats_are_brought_to_fewer_bits(quantization: str, error: float, gate: str | None) -> None:
    weight, bias, x = drawn(0, 32, 96), drawn(1, 32), drawn(2, 5, 96)
    layer = method(quantization, group_size=64).prepare([weight], bias, gate=gate)
    truth = F.linear(x, weight, bias)
    if gate is not None:
        truth = multiply_gate(truth, gate)
    found = layer(x, FLOAT)
    assert 1e-4 < (found - truth).norm() / truth.norm() < (1 if gate is None else 2) * error
    out = torch.empty_like(truth)
    assert layer(x, FLOAT, out) is out and torch.equal(out, found)


@pytest.mark.usefixtures("has_fp8")
def test_fp8_in_bfloat16_and_without_rows() -> None:
    weight, x = drawn(0, 32, 48, dtype=torch.bfloat16), drawn(1, 3, 48, dtype=torch.bfloat16)
    layer = method("fp8", dtype=torch.bfloat16).prepare([weight], None)
    truth = F.linear(x.float(), weight.float())
    assert (layer(x, torch.bfloat16).float() - truth).norm() / truth.norm() < 0.06
    assert layer(x[:0], torch.bfloat16).shape == (0, 32)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.usefixtures("has_fp8")
def test_what_has_no_groups_stays_in_floats(quantization: str, caplog: pytest.LogCaptureFixture) -> None:
    weight, x = drawn(0, 10, 40), drawn(1, 2, 40)
    with caplog.at_level(logging.WARNING):
        layer = method(quantization).prepare([weight], None)
    assert "10x40 stays in floats" in caplog.text
    torch.testing.assert_close(layer(x, FLOAT), F.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("in_features", "bits", "group_size"), [(96, 4, 32), (192, 8, 192), (96, 8, 16), (40, 8, 0), (64, 8, 0)]
)
def test_stored_integers_stay_so_or_are_brought_to_floats(
    in_features: int, bits: int, group_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    if group_size == 0:
        weight = quantize_rows(drawn(0, 20, in_features), bits=8, group_size=0)
    else:
        values = torch.randint(0, 2**bits, (20, in_features), dtype=torch.uint8)
        scales = torch.rand(20, in_features // group_size)
        weight = QuantizedWeight(values=values, scales=scales, offsets=scales * 2.5, bits=bits)
    x = drawn(1, 3, in_features)
    with caplog.at_level(logging.WARNING):
        found = method().prepare(weight, None)(x, FLOAT)
    assert ("becomes floats" in caplog.text) == (weight.group_size in (16, 40))
    truth = F.linear(x.double(), weight.to(DEVICE).dequantize().double())
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))


def test_many_features_are_dequantized_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_linear, "_DEQUANTIZED_AT_ONCE", 7 * 64)
    weight = quantize_rows(drawn(0, 20, 64), bits=4, group_size=32)
    x, bias = drawn(1, 3, 64), drawn(2, 20)
    truth = F.linear(x.double(), weight.dequantize().double(), bias.double())
    found = method().prepare(weight, bias)(x, FLOAT)
    torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)


def test_a_gpu_has_its_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert isinstance(select_linear_method(cuda, torch.bfloat16), GpuLinear)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 or newer.*cuda has 8\.0"):
        select_linear_method(cuda, torch.bfloat16, quantization="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for quantization in ("fp8", "int8"):
        assert not select_linear_method(cuda, torch.bfloat16, quantization=quantization).is_batch_invariant(64)
    with pytest.raises(ConfigError, match="this is a cpu"):
        select_linear_method(torch.device("cpu"), torch.bfloat16, quantization="fp8")


@pytest.mark.parametrize("gate", [None, SILU])
def test_the_tuned_way_of_floats(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 7,680 bytes. Smaller ones than the least that is measured are left to the library, and so is float32."""
    monkeypatch.setattr(linear_tuner, "GraphClock", lambda device: FakeClock(partial(time_of, library=100.0), 8000))
    monkeypatch.setattr(linear_tuner, "_MIN_CALLS", 1)
    weight, bias, x = (
        drawn(seed, *shape, dtype=torch.float16) for seed, shape in enumerate([(48, 80), (48,), (1, 80)])
    )
    truth = F.linear(x.double(), weight.double(), bias.double())
    truth = truth if gate is None else multiply_gate(truth, gate)
    for least, is_tuned in ((7680, True), (7681, False)):
        options = {"quantization": None, "group_size": 64, "min_weight_bytes": least}
        tuned = GpuLinear(DEVICE, torch.float16, torch.float16, **options)  # type: ignore[arg-type]
        layer = tuned.prepare([weight], bias, gate=gate)
        by_library = layer(x, torch.float16)
        assert [choice.way != "library" for choice in tuned.tune(1)] == [True] * is_tuned
        for found in (by_library, layer(x, torch.float16)):
            torch.testing.assert_close(found.double(), truth, rtol=1e-2, atol=1e-2 * float(truth.abs().max()))
    exact = method()
    exact.prepare([weight.float()], bias.float(), gate=gate)
    assert exact.tune(1) == []
