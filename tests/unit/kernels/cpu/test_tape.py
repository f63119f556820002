"""What a recorder takes and what it refuses. tests/unit/models/test_taped_layers.py tests tapes of whole models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.kernels.cpu.functions import AttentionStep
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.library import load_kernels
from inflight.kernels.cpu.tape import Recorder, Tape
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE, ONE_SET_OR_ALL

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")

SIZE = 64
WEIGHT = torch.linspace(0.5, 2, SIZE)
Compute = Callable[[CpuLayerOps, Tensor, Tensor], Any]  # Any: the tests return tensors or tuples of tensors


@pytest.fixture(params=ONE_SET_OR_ALL, autouse=True)
def _instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", request.param)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_ops() -> CpuLayerOps:
    kernels = load_kernels()
    assert kernels is not None
    return CpuLayerOps(kernels)


def record(compute: Compute, num_tokens: int, rows: Tensor) -> tuple[Tape | None, str | None]:
    ops, x = make_ops(), draw(num_tokens, SIZE)
    wanted = compute(ops, x.clone(), rows)
    with Recorder(ops.kernels, [x], rows, [], [WEIGHT]) as recorder:
        results = compute(ops, x, rows)
    assert all(torch.equal(one, other) for one, other in zip(results, wanted, strict=True))  # it disturbs nothing
    return recorder.finish(results), recorder.refusal


def run(call: Callable[[], int]) -> None:
    assert call() == 0


def several(ops: CpuLayerOps, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Buffers of several widths, some of them free again before the next; parts of a tensor; all tokens and selected rows."""
    normed = ops.rms_norm(x, WEIGHT, 1e-6)
    left, right = normed.chunk(2, dim=-1)
    both = [ops.rms_norm(part, WEIGHT[:32], 1e-5) for part in (left, right)]
    both[0] = ops.rms_norm(both[0], WEIGHT[:32], 0.5)
    again = ops.add_and_rms_norm(normed, x, WEIGHT, 1e-6)
    heads = again.view(len(x), 2, -1)
    turned = ops.norm_and_rotate(heads[:, 1:], None, 0.0, *both)
    assert turned.data_ptr() == heads[:, 1].data_ptr()
    few = ops.select_rows(again, rows)
    return ops.rms_norm(few, WEIGHT, 1e-6), ops.select_rows(x, rows), few, both[1], x


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (6, 1), (6, 3)])
def test_a_tape_holds_for_any_number_of_tokens_and_rows(num_tokens: int, num_rows: int) -> None:
    tape, refusal = record(several, num_tokens, torch.arange(num_rows))
    assert tape is not None and refusal is None
    for size, rows in [(1, [0]), (1, []), (40, [39, 3, 3, 7]), (num_tokens, [0] * num_rows), (3, [2, 1, 0])]:
        x, selected = draw(size, SIZE), torch.tensor(rows, dtype=torch.int64)
        wanted = several(make_ops(), x.clone(), selected)
        found = tape.replay([x], selected, [], run)
        assert found[-1] is x
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_buffers_share_memory() -> None:
    def many(ops: CpuLayerOps, x: Tensor, rows: Tensor) -> tuple[Tensor]:
        for _ in range(20):
            x = ops.rms_norm(x, WEIGHT, 1e-6)
        return (x,)

    tape, _ = record(many, 2, torch.arange(1))
    assert tape is not None
    assert tape._bytes_per_token == 2 * SIZE * 4


FOREIGN = draw(5, SIZE)


def norm(ops: CpuLayerOps, x: Tensor) -> Tensor:
    return ops.rms_norm(x, WEIGHT, 1e-6)


def without_tokens(ops: CpuLayerOps) -> Tensor:
    """A call that computes no tokens, and a tensor that is not recorded."""
    assert ops.kernels.inflight_attention_scratch_bytes(16, 1) > 0
    return WEIGHT


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda ops, x, rows: (norm(ops, x) * 2,), "torch computes mul"),
        (lambda ops, x, rows: (norm(ops, x.clone()),), "torch computes clone"),
        (lambda ops, x, rows: (norm(ops, x[rows]),), "torch computes index"),
        (lambda ops, x, rows: (norm(ops, x[-1:]),), "slice is not a view of all rows"),
        (lambda ops, x, rows: (norm(ops, x[0].view(1, -1)),), "select"),
        (lambda ops, x, rows: (norm(ops, x.narrow_copy(0, 0, 1)),), "torch computes narrow_copy"),
        (lambda ops, x, rows: (norm(ops, torch.chunk(x, 1, dim=-2)[0]),), "split is not a view of all rows"),
        (lambda ops, x, rows: (norm(ops, x.view(-1, SIZE // 2).view(-1, SIZE)),), "view is not a view of all rows"),
        (lambda ops, x, rows: (norm(ops, x), norm(ops, FOREIGN)), "memory that is not known"),
        (lambda ops, x, rows: (norm(ops, torch.empty(len(x), SIZE).fill_(1)),), "torch computes fill_"),
        (lambda ops, x, rows: (norm(ops, x), WEIGHT), "a result is not"),
        (lambda ops, x, rows: (norm(ops, x), without_tokens(ops)), "inflight_attention_scratch_bytes is not for tapes"),
        (lambda ops, x, rows: (norm(ops, x)[:, :8],), "a result is not"),
        (lambda ops, x, rows: (ops.add_and_rms_norm(ops.select_rows(x, rows), x, WEIGHT, 1e-6),), "neither"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_refusals(compute: Compute, reason: str, num_tokens: int) -> None:
    tape, refusal = record(compute, num_tokens, torch.arange(num_tokens))
    assert tape is None
    assert refusal is not None and reason in refusal


def test_inputs_of_another_shape_are_not_replayed() -> None:
    tape, _ = record(several, 4, torch.arange(2))
    assert tape is not None
    rows = torch.arange(2)
    for x in (draw(4, SIZE + 1), draw(4, SIZE).to(torch.bfloat16), draw(4, 2 * SIZE)[:, ::2], draw(1, SIZE)):
        with pytest.raises(AssertionError):
            tape.replay([x], rows, [], run)


def test_other_threads_are_not_recorded() -> None:
    def compute(ops: CpuLayerOps, x: Tensor, rows: Tensor) -> tuple[Tensor]:
        thread = threading.Thread(target=lambda: norm(ops, FOREIGN * 2))
        thread.start()
        thread.join()
        return (norm(ops, x),)

    tape, refusal = record(compute, 3, torch.arange(1))
    assert tape is not None and refusal is None


@pytest.mark.parametrize("rows", [[4], [-1], [0, 7]])
def test_rows_that_are_no_tokens_are_not_replayed(rows: list[int]) -> None:
    tape, _ = record(several, 4, torch.arange(2))
    assert tape is not None
    with pytest.raises(AssertionError, match="given: 4 rows"):
        tape.replay([draw(4, SIZE)], torch.tensor(rows), [], run)


def test_a_step_with_other_kv_groups_is_not_replayed() -> None:
    tape, _ = record(several, 4, torch.arange(2))
    assert tape is not None
    with pytest.raises(AssertionError, match=r"KV groups .*given: 1"):
        tape.replay([draw(4, SIZE)], torch.arange(2), [AttentionStep()], run)


def test_a_struct_of_a_step_that_is_not_known_is_refused() -> None:
    """And a call for a part of the rows, or one that begins behind the first row."""
    ops, x = make_ops(), draw(4, SIZE)
    out = torch.empty_like(x)

    def refusal(name: str, *arguments: object) -> str | None:
        with Recorder(ops.kernels, [x, out], None, [], [WEIGHT]) as recorder:
            recorder.add(name, arguments)
        return recorder.refusal

    norm_of = (x.data_ptr(), SIZE, None, 0, WEIGHT.data_ptr(), out.data_ptr(), 4, SIZE, 1e-6, 0)
    assert refusal("inflight_rms_norm", *norm_of) is None
    fewer = (*norm_of[:6], 3, *norm_of[7:])
    assert refusal("inflight_rms_norm", *fewer) == "inflight_rms_norm computes a part of the rows"
    behind = (x.data_ptr() + SIZE * 4, *norm_of[1:])
    assert refusal("inflight_rms_norm", *behind) == "inflight_rms_norm does not begin at the first row"
    within = (x.data_ptr() + SIZE * 4 - 4, *norm_of[1:])
    assert refusal("inflight_rms_norm", *within) is None
    step = AttentionStep()
    conv = (x.data_ptr(), SIZE, out.data_ptr(), WEIGHT.data_ptr(), step, None)
    assert refusal("inflight_short_conv", *conv) == "the step has another KV group"
