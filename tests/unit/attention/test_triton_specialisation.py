"""Triton compiles a kernel again for an argument that is 1, or divisible by 16, unless the kernel says that it is not to. What
changes from step to step must not do this while the engine serves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.attention.backend import AttentionParams, LayerCache
from inflight.attention.metadata import AttentionInputs
from inflight.attention.triton_paged import TritonPagedBackend
from inflight.interface.kv_cache import KVCacheSpec
from tests.support.triton_inputs import DEVICE, IS_INTERPRETED

BLOCK_SIZE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 4, 16, 4, 2
SPEC = KVCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="float32", itemsize=4)
PARAMS = AttentionParams(scale=0.25)


def specialisation(name: str, value: Any, not_specialised: list[str]) -> object:
    """What Triton's cache of compiled kernels knows of an argument (triton/runtime/jit.py)."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype) if name in not_specialised else (str(value.dtype), value.data_ptr() % 16 == 0)
    if isinstance(value, int) and not isinstance(value, bool) and name not in not_specialised and name.islower():
        return "1" if value == 1 else ("int", value % 16 == 0)
    return type(value).__name__ if name.islower() else value


@pytest.mark.skipif(not IS_INTERPRETED, reason="reads what the interpreter is called with")
@pytest.mark.parametrize("query_len", [1, 3])
def test_block_tables_of_any_width_use_the_same_kernels(monkeypatch: pytest.MonkeyPatch, query_len: int) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    found: list[tuple[object, ...]] = []
    run = InterpretedFunction.run

    def noting(kernel: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        fixed = list(kernel.kwargs.get("do_not_specialize") or ())
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        key = {name: specialisation(name, value, fixed) for name, value in given.items() if name in kernel.arg_names}
        found.append((kernel.fn.__name__, *sorted(key.items(), key=str)))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noting)
    backend = TritonPagedBackend(DEVICE, num_multiprocessors=2)
    arena = torch.zeros(40, SPEC.block_bytes, dtype=torch.uint8, device=DEVICE)
    kernels = []
    for width in (1, 16, 17):
        inputs = AttentionInputs(
            query_start_loc=np.array([0, query_len], dtype=np.int32),
            seq_lens=np.array([query_len], dtype=np.int32),
            num_computed_tokens=np.array([0], dtype=np.int32),
            block_table=np.ones((1, width), dtype=np.int32),
        )
        cache = LayerCache(backend.layer_cache(arena, SPEC, 0), backend.build_metadata(inputs, SPEC), PARAMS)
        heads = torch.ones(query_len, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, device=DEVICE)
        found.clear()
        backend.attend(heads, None, None, cache, num_heads=NUM_HEADS)
        kernels.append(list(found))
    assert kernels[0] and kernels[0] == kernels[1] == kernels[2]
