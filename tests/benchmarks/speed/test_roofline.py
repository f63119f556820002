"""The roofline's arithmetic, and one small measurement of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shared.models import SHAPES
from benchmarks.speed import roofline
from benchmarks.speed.roofline import Machine, Needs, tokens_per_second
from inflight.config.parse_architecture import parse_architecture
from inflight.entrypoints.cli.workloads import BY_NAME, Workload

MACHINE = Machine(num_threads=2, read=31.2e9, read_huge_pages=33.8e9, fp32=230e9, bf16=448e9, int8=890e9)
NEEDS = Needs.of(parse_architecture({"architectures": ["Qwen3ForCausalLM"], **SHAPES["qwen3-0.6b"].fields}))


def test_the_roofline_of_the_06b_shape() -> None:
    assert NEEDS.layer_weights == 440_401_920 and NEEDS.head_weights == 155_582_464
    limits = {
        name: tokens_per_second(NEEDS, MACHINE, "bf16", BY_NAME[name]) for name in ("decode1", "decode32", "prefill")
    }
    # by hand: 1.19 GB at 33.8 GB/s; prompts of 0.45 TFLOP and 63 steps of 38 GFLOP; (0.90 + 0.12) TFLOP, at 448 GFLOP/s
    assert limits == pytest.approx({"decode1": 28.2, "decode32": 320, "prefill": 449}, rel=0.02)
    assert tokens_per_second(NEEDS, MACHINE, "int4", BY_NAME["decode1"]) > 2 * 28.2 * 1.6
    long, short = (tokens_per_second(NEEDS, MACHINE, "bf16", Workload("", 1, length, 64)) for length in (4096, 16))
    assert long < short / 5  # its prompt counts, and the KV cache is read


def test_the_peak_is_that_of_the_format() -> None:
    assert [MACHINE.peak(name) for name in ("bf16", "int8", "int4")] == [448e9, 890e9, 890e9]
    plain = Machine(num_threads=2, read=2e10, read_huge_pages=1e10, fp32=2e11, bf16=None, int8=None)
    assert [plain.peak(name) for name in ("bf16", "int8")] == [2e11, 2e11]
    assert plain.bandwidth == 2e10
    assert plain.best(plain) == plain
    assert (
        MACHINE.best(Machine(num_threads=2, read=3.5e10, read_huge_pages=1, fp32=1, bf16=9e11, int8=1)).bandwidth
        == 3.5e10
    )


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "roofline.c"  # a hundredth of the work
    text = roofline.SOURCE.read_text().replace("(size_t)1 << 30", "(size_t)1 << 24").replace("1 << 21", "1 << 14")
    source.write_text(text)
    monkeypatch.setattr(roofline, "SOURCE", source)
    found = roofline.measure_machine(1)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.fp32 < 1e13
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises((SystemExit, OSError)):
        roofline.measure_machine(1)
