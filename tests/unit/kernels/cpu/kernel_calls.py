"""Calls every C++ kernel through its wrapper, with buffers beside pages that nothing may touch, or under the address sanitizer.

This is a program: `python -m tests.unit.kernels.cpu.kernel_calls INSTRUCTION_SET...`. With `--sanitized FOLDER` it opens the
libraries in this folder, and torch allocates the memory, as the address sanitizer wants it. Each instruction set has a process
of its own. The program prints the name of each call before it makes it. So if a process ends too early, its last line names the
call. Results are not looked at: the kernels' own tests do that. In further processes, a call touches an element beside its
buffer.

The sizes are the smallest ones, those around the widths of vectors and tiles, and larger ones. If a size is not supported, the
wrapper must refuse it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inflight.config.architecture import GELU, GELU_TANH, RELU, SIGMOID, SILU
from inflight.config.experts import MoeSpec, RouterSpec
from inflight.distributed.shared_collectives import PIECE_BYTES, SharedCollectives
from inflight.errors import ConfigError
from inflight.kernels.cpu import library
from inflight.kernels.cpu.expert_balance import BalancedExperts, Homes, describe
from inflight.kernels.cpu.expert_exchange import exchange_experts
from inflight.kernels.cpu.experts import CpuExperts
from inflight.kernels.cpu.functions import DTYPES, SIGNATURES, ExpertExchange
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.linear import PackedLinear
from inflight.kernels.cpu.packing import pack_float
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.kernels.cpu.tape import Recorder
from inflight.kernels.encoder_ops import activate, layer_norm
from inflight.kernels.token_masks import cpu_apply_token_masks
from tests.unit.kernels.cpu.attention_calls import attention, recurrent
from tests.unit.kernels.cpu.guarded_memory import GuardedMemory, Side
from tests.unit.kernels.cpu.kernel_call import BFLOAT16, FLOAT32, FLOATS, SIZES, TORCH_EMPTY, Call, Kernels
from tests.unit.kernels.cpu.linear_calls import experts, integers, linear


def calls(kernels: Kernels) -> Iterator[Call]:
    products = linear, integers, experts, exchanged_experts
    for part in (attention, recurrent, *products, between_products, token_masks, collectives, tape):
        yield from part(kernels)


# -- between matrix products -------------------------------------------------------------------------------------------


def between_products(kernels: Kernels) -> Iterator[Call]:
    ops, memory = CpuLayerOps(kernels.library), kernels.memory

    def of_size(size: int, dtype: torch.dtype) -> None:
        x, delta, wide = (memory.normal(3, width, dtype=dtype) for width in (size, size, size + 3))
        weight = memory.normal(size, dtype=dtype)
        ops.rms_norm(x, weight, 1e-6)
        ops.rms_norm(wide[:, 3:], weight, 1e-6)
        ops.add_and_rms_norm(delta, x, weight, 1e-6)
        for given in (None, delta):
            for bias in (None, memory.normal(size, dtype=dtype)):
                layer_norm(ops, given, wide[:, 3:], weight, bias, 1e-6)
        for activation in (SILU, GELU_TANH, GELU, RELU):
            activate(ops, wide[:, 3:], activation)
        for activation in (SILU, GELU_TANH, SIGMOID):
            ops.multiply_activation(x, wide[:, 3:], activation)
        for factor in (None, memory.normal(1), memory.normal(3, 1)):
            ops.add_and_scale(x, delta, factor)
        ops.add_and_scale(x, None, memory.normal(1))
        heads = memory.normal(3, 2, size, dtype=dtype)
        ops.norm_heads(heads, memory.normal(2, size, dtype=dtype), 1e-6)
        ops.copy_heads(heads, memory.empty(3, 2, size, dtype=dtype))
        ops.select_rows(x, memory.copy(torch.tensor([2, 0, 2])))

    def rotate(size: int, dtype: torch.dtype) -> None:
        for weight in (None, memory.normal(2, size, dtype=dtype)):
            heads, cos, sin = memory.normal(3, 3, size, dtype=dtype), *memory.normal(2, 3, size, dtype=dtype)
            ops.norm_and_rotate(heads[:, 1:], weight, 1e-6, memory.copy(cos), memory.copy(sin))

    for dtype in FLOATS:
        for size in SIZES:
            yield Call(f"norms, gates and copies of {size}, {dtype}", partial(of_size, size, dtype))
            yield Call(f"rotation of {size}, {dtype}", partial(rotate, size, dtype), is_supported=size % 2 == 0)
    for index in (-1, 3):
        rows = memory.copy(torch.tensor([0, index]))
        yield Call(f"row {index} of 3", partial(ops.select_rows, memory.normal(3, 8), rows), False)


def token_masks(kernels: Kernels) -> Iterator[Call]:
    memory = kernels.memory

    def apply(vocab_size: int, rows: list[int], num_words: int) -> None:
        masks = torch.randint(-(2**31), 2**31, (len(rows), num_words)).int()
        masks[:, ::2] = 0
        cpu_apply_token_masks(
            kernels.library, memory.normal(3, vocab_size), memory.copy(torch.tensor(rows)), memory.copy(masks)
        )

    for size in SIZES:
        words = -(-size // 32)
        yield Call(f"masks of {size} tokens", partial(apply, size, [2, 0], words))
        yield Call(f"masks of {size} tokens, a word too few", partial(apply, size, [0], words - 1), False)
    yield Call("a mask of a row that does not exist", partial(apply, 33, [3], 2), False)


# -- ranks, and tapes --------------------------------------------------------------------------------------------------


def collectives(kernels: Kernels) -> Iterator[Call]:
    memory = kernels.memory

    def exchange(num_bytes: int, dtype: torch.dtype, size: int) -> None:
        """Two ranks, which are threads."""
        shared: Any = memory.zeros(num_bytes, dtype=torch.uint8).numpy()  # instead of a mapping: both are buffers
        inputs = [memory.normal(1, size, dtype=dtype) for _ in range(2)]

        def compute(rank: int) -> None:
            kernels.library.recording.recorder = CALLED
            group = SharedCollectives(kernels.library, shared, [os.pidfd_open(os.getpid())] * 2, [0, 1], rank, 60.0)
            group.all_reduce(memory.copy(inputs[rank]))
            group.all_gather(inputs[rank], dim=1)
            group.broadcast(memory.copy(inputs[rank]))
            barrier.wait()
            kernels.library.inflight_leave_group(group.pointer)

        barrier = threading.Barrier(2)
        other = threading.Thread(target=compute, args=(0,))
        other.start()
        compute(1)
        other.join()

    num_bytes: int = kernels.library.inflight_group_memory_bytes(2, PIECE_BYTES)
    for dtype in (FLOAT32, BFLOAT16, torch.float16):
        for size in (1, 7, 17, PIECE_BYTES // dtype.itemsize + 1):
            yield Call(f"collectives of {size} elements, {dtype}", partial(exchange, num_bytes, dtype, size))

    def lone(num_bytes: int) -> None:
        SharedCollectives(kernels.library, bytearray(num_bytes), [-1] * 2, [0, 1], 0, 1.0)  # type: ignore[arg-type]

    yield Call("memory of ranks that is too small", partial(lone, num_bytes - 1), False)


def exchanged_experts(kernels: Kernels) -> Iterator[Call]:
    memory, size, num_experts, top_k = kernels.memory, 20, 5, 2
    spec = MoeSpec(num_experts=num_experts, size=size, router=RouterSpec(top_k=top_k))

    def exchange(num_bytes: int, dtype: torch.dtype, num_rows: int, has_copies: bool) -> None:
        """Two ranks, which are threads and have two and three experts; two rows are exchanged at once. Or two replicas, of
        which the first one has a copy of the last expert, too."""
        shared: Any = memory.zeros(num_bytes, dtype=torch.uint8).numpy()
        places = memory.zeros(5 * 4096, dtype=torch.uint8)
        hidden, logits = memory.normal(num_rows, size, dtype=dtype), memory.normal(num_rows, num_experts)
        packed = [[pack(kernels, dtype, size, gate) for _ in range(num_experts)] for gate in (SILU, None)]

        def compute(rank: int) -> None:
            kernels.library.recording.recorder = CALLED
            group = SharedCollectives(kernels.library, shared, [os.pidfd_open(os.getpid())] * 2, [0, 1], rank, 60.0)
            held = [[each if (index < 2) == (rank == 0) else None for index, each in enumerate(row)] for row in packed]
            layer = CpuExperts(kernels.library, spec, held[0], held[1], dtype, num_shared=0)
            if has_copies:
                homes = Homes(2, rank, np.array([0, 0, 1, 1, 1]), np.array([0]))
                balanced = BalancedExperts(layer, homes)
                for place in balanced.places.values():
                    for part, row in zip(place.parts, packed, strict=True):
                        description, stored = describe(row[-1])
                        for to, each in zip(part.begin(description)[0], stored, strict=True):
                            to.copy_(each)
                balanced.agree_on(np.array([num_experts - 1]), 1)
            of_rank = ExpertExchange(
                group=group.pointer,
                memory=places.data_ptr(),
                chunk_rows=2,
                results_at=4096,
                sums_at=2 * 4096,
                choices_at=3 * 4096,
                inputs_at=4 * 4096,
                num_replicas=2 if has_copies else 1,
                replica=rank if has_copies else 0,
                tp_size=1 if has_copies else 2,
                tp_rank=0 if has_copies else rank,
            )
            exchange_experts(kernels.library, layer, of_rank, group.run, hidden, layer.choose(logits))
            barrier.wait()
            kernels.library.inflight_leave_group(group.pointer)

        barrier = threading.Barrier(2)
        other = threading.Thread(target=compute, args=(0,))
        other.start()
        compute(1)
        other.join()

    num_bytes: int = kernels.library.inflight_group_memory_bytes(2, PIECE_BYTES)
    for dtype in FLOATS:
        for num_rows, has_copies in ((1, False), (5, False), (5, True)):
            name = f"exchange of {num_rows} rows, {dtype}, with copies: {has_copies}"
            yield Call(name, partial(exchange, num_bytes, dtype, num_rows, has_copies))


def pack(kernels: Kernels, dtype: torch.dtype, size: int, gate: str | None) -> PackedLinear:
    weight = kernels.memory.normal(2 * size if gate else size, size, dtype=dtype)
    return pack_float(kernels.library, kernels.memory, [weight], None, gate=gate)  # type: ignore[arg-type]  # for HugePages


def tape(kernels: Kernels) -> Iterator[Call]:
    ops, memory = CpuLayerOps(kernels.library), kernels.memory

    def replay() -> None:
        weight, rows = memory.normal(24), memory.copy(torch.tensor([1, 0]))

        def compute(x: Tensor, rows: Tensor) -> list[Tensor]:
            return [ops.rms_norm(ops.select_rows(ops.rms_norm(x, weight, 1e-6), rows), weight, 1e-6)]

        x = memory.normal(3, 24)
        guarded = torch.empty
        vars(torch)["empty"] = TORCH_EMPTY  # a recorder sees torch's own allocations only
        with Recorder(kernels.library, [x], rows, [], [weight]) as recorder:
            results = compute(x, rows)
        kernels.library.recording.recorder = CALLED
        vars(torch)["empty"] = guarded
        made = recorder.finish(results)
        assert made is not None, recorder.refusal
        for num_tokens, chosen in ((1, [0]), (40, [39, 0, 3])):
            made.replay([memory.normal(num_tokens, 24)], memory.copy(torch.tensor(chosen)), [], run_tape)

    def run_tape(call: Callable[[], int]) -> None:
        assert call() == 0

    yield Call("a tape", replay)


def wrong(kernels: Kernels, side: Side) -> Iterator[Call]:
    """A call past the wrappers, which writes one element beside its buffer."""
    opened, first = kernels.library, 0 if side == "behind" else -1
    source, target = kernels.memory.empty(1026), kernels.memory.empty(1024)

    def copy() -> None:
        pointers = source.data_ptr() + 4, 0, 0, target.data_ptr() + 4 * first, 0, 0
        opened.inflight_copy_heads(*pointers, 1, 1, 1025 + first, DTYPES[FLOAT32])

    yield Call("one element too many", copy)


# -- the program -------------------------------------------------------------------------------------------------------


class Called:
    """The functions that were called, which the library tells it."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def add(self, name: str, arguments: Sequence[Any]) -> None:
        self.names.add(name)


CALLED = Called()


def run(job: str, opened: KernelLibrary, side: Side | None, made: Callable[[Kernels], Iterator[Call]]) -> None:
    memory = GuardedMemory(side)
    vars(torch)["empty"] = memory.empty  # the wrappers make their results with it
    opened.recording.recorder = CALLED
    for call in made(Kernels(opened, memory)):
        print(f"{job}: {side or 'sanitized'}: {call.name}", flush=True)
        try:
            call.run()
        except (ConfigError, AssertionError):
            if call.is_supported:
                raise
        else:
            assert call.is_supported, "it was not refused"


def call_all(name: str, job: str, is_sanitized: bool) -> None:
    opened = library.open_kernels(name)
    sides: tuple[Side | None, ...] = (None,) if is_sanitized else ("behind", "before")
    for side in sides:
        run(job, opened, side, calls)
    library.bind_threads(opened, [min(os.sched_getaffinity(0))])
    assert CALLED.names == SIGNATURES.keys(), f"never called: {SIGNATURES.keys() - CALLED.names}"


def call_wrongly(name: str, side: Side, job: str, is_sanitized: bool) -> None:
    run(job, library.open_kernels(name), None if is_sanitized else side, partial(wrong, side=side))


def in_a_process(work: Callable[[], None]) -> int:
    """Returns the exit code of a copy of this process that does the work; a negative one is a signal."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        faulthandler.enable()
        torch.manual_seed(0)
        torch.set_num_threads(1)
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--sanitized", type=Path)
    arguments = parser.parse_args()
    if arguments.sanitized is not None:
        library._FOLDER = arguments.sanitized
    jobs: dict[str, Callable[..., None]] = {}
    for name in arguments.names:
        jobs[name] = partial(call_all, name)
        jobs |= {f"{name} {side} a buffer": partial(call_wrongly, name, side) for side in ("behind", "before")}
    for job, work in jobs.items():
        code = in_a_process(partial(work, job=job, is_sanitized=arguments.sanitized is not None))
        print(f"{job}: exit code {code}", flush=True)


if __name__ == "__main__":
    main()
