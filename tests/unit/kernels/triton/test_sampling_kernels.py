"""Parts of the sampling kernels, in Triton's interpreter; and what the compiler makes of the kernels for GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from inflight.kernels.triton import sampling
from inflight.kernels.triton.sampling import NUM_COLUMNS, draw_words, key_of, log_exponential, logit_of
from inflight.sample.device_sampler import BLOCK_SIZE, GROUP_SIZE, SEARCH_BLOCK_SIZE
from inflight.sample.noise import log_exponential as cpu_log_exponential
from inflight.sample.noise import noise_words, token_hashes
from inflight.sample.seeds import draw_keys, seed_words
from tests.support.triton_aot import MAX_SHARED_BYTES, KernelCase, resources
from tests.unit.sample.device_batch import DEVICE


@triton.jit
def noise_kernel(column, position, words, noise, SIZE: tl.constexpr):
    tokens = tl.arange(0, SIZE)
    word0, word1 = draw_words(column, 1, tl.load(position))
    tl.store(words, word0.to(tl.int32))
    tl.store(words + 1, word1.to(tl.int32))
    tl.store(noise + tokens, log_exponential(tokens, word0, word1))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15])
@pytest.mark.parametrize("position", [0, 1, 2**31 - 1])
def test_noise_is_the_cpus(seed: int, position: int) -> None:
    seeds = np.array([seed], dtype=np.uint64)
    column = torch.zeros(NUM_COLUMNS, dtype=torch.int32)
    column[sampling.SEED.value : sampling.SEED.value + 2] = torch.from_numpy(seed_words(seeds).view(np.int32))
    words, noise = torch.empty(2, dtype=torch.int32, device=DEVICE), torch.empty(4096, device=DEVICE)
    noise_kernel[(1,)](
        column.to(DEVICE), torch.tensor([position], dtype=torch.int32, device=DEVICE), words, noise, SIZE=4096
    )
    keys = draw_keys(seeds, np.array([position]))
    assert words.tolist() == keys[0].tolist()
    expected = cpu_log_exponential(noise_words(token_hashes(4096, torch.device("cpu")), torch.from_numpy(keys)))[0]
    torch.testing.assert_close(noise.cpu(), expected, rtol=3e-7, atol=3e-7)


@triton.jit
def small_noise_kernel(words, noise, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(noise + places, sampling.log_of_exponential(tl.load(words + places)))


def test_noise_keeps_its_precision_where_it_wins_and_at_its_end() -> None:
    """The draw's whole range: the smallest hashes, around each power of two, and the largest."""
    powers = 2 ** np.arange(31, dtype=np.int64)
    words = np.unique(np.clip(np.concatenate([[0], powers - 1, powers, powers + 1, 2**31 - powers]), 0, 2**31 - 1))
    words = np.resize(words.astype(np.int32), 128)
    noise = torch.empty(128, device=DEVICE)
    small_noise_kernel[(1,)](torch.from_numpy(words).to(DEVICE), noise, SIZE=128)
    torch.testing.assert_close(noise.cpu(), cpu_log_exponential(torch.from_numpy(words)), rtol=3e-7, atol=3e-7)


@triton.jit
def key_kernel(x, keys, back, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    key = key_of(tl.load(x + places))
    tl.store(keys + places, key)
    tl.store(back + places, logit_of(key))


def test_keys_order_as_floats() -> None:
    x = torch.tensor([-torch.inf, -3e38, -1.5, -1e-44, 0.0, 1e-44, 1e-20, 1.0, 1.0000001, 3e38, torch.inf, torch.nan])
    x = torch.cat([x, torch.tensor([-0.0, -torch.nan, 7.0, -7.0])])
    keys, back = torch.empty(16, dtype=torch.int32, device=DEVICE), torch.empty(16, device=DEVICE)
    key_kernel[(1,)](x.to(DEVICE), keys, back, SIZE=16)
    assert (keys[:12].diff() > 0).all()
    assert keys[12] == keys[4] and keys[13] == keys[11]
    torch.testing.assert_close(back[:11].cpu(), x[:11], rtol=0, atol=0)


POINTERS = {"logits": "*fp32", "columns": "*i32", "slots": "*i32", "positions": "*i32"}
RESULTS = {"best": "*i64", "mass": "*fp32", "maxima": "*i32"}
NUMBERS = {"vocab_size": "i32", "num_blocks": "i32", "num_groups": "i32", "stride": "i32"}
ALIGNED = (*POINTERS, *RESULTS, "vocab_size")


@pytest.mark.parametrize("compute_capability", [pytest.param(80, marks=pytest.mark.full_gpu), 90])
def test_kernels_compile_without_spills(compute_capability: int) -> None:
    """At a vocabulary of 152,000: 75 blocks."""
    folder = "inflight.kernels.triton."
    cases = [
        KernelCase(
            kernel=f"{folder}sampling:score_kernel",
            signature=POINTERS | RESULTS | NUMBERS | {"BLOCK": "constexpr", "GROUP": "constexpr"},
            constants={"BLOCK": BLOCK_SIZE, "GROUP": GROUP_SIZE},
            compute_capability=compute_capability,
            num_warps=sampling.SCORE_WARPS,
            aligned=ALIGNED,
        ),
        KernelCase(
            kernel=f"{folder}sampling:choose_kernel",
            signature=POINTERS
            | {"chosen": "*i32"}
            | RESULTS
            | {"listed": "*i32"}
            | NUMBERS
            | {"BLOCKS": "constexpr", "GROUP": "constexpr", "BLOCK": "constexpr"},
            constants={"BLOCKS": 128, "GROUP": GROUP_SIZE, "BLOCK": SEARCH_BLOCK_SIZE},
            compute_capability=compute_capability,
            num_warps=sampling.CHOOSE_WARPS,
            num_stages=1,
            aligned=(*ALIGNED, "chosen", "listed"),
        ),
        KernelCase(
            kernel=f"{folder}token_masks:token_masks_kernel",
            signature={
                "logits": "*fp32",
                "rows": "*i64",
                "masks": "*i32",
                "vocab_size": "i32",
                "num_words": "i32",
                "WORDS": "constexpr",
            },
            constants={"WORDS": 64},
            compute_capability=compute_capability,
            aligned=("logits", "vocab_size"),
        ),
    ]
    for case, used in zip(cases, resources(cases), strict=True):
        assert used.stack_bytes == 0, f"{case.kernel}: {used}"
        assert used.registers * 32 * case.num_warps <= 32 * 1024, f"{case.kernel}: {used}"  # two programs at a time
        assert used.shared_bytes <= MAX_SHARED_BYTES[compute_capability] // 2, f"{case.kernel}: {used}"
