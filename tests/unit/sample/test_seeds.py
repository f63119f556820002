"""Seeds of children and keys of draws."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from inflight.sample.seeds import derive_seed, draw_keys, front_end_seed, mix64
from inflight.sampling_params import MAX_N, MAX_SEED


def test_child_0_keeps_the_seed() -> None:
    assert derive_seed(1234, 0) == 1234
    assert derive_seed(-1, 0) == 2**64 - 1


def test_children_have_seeds_of_their_own() -> None:
    parents = [0, 1, 2, 3, -1, MAX_SEED, -MAX_SEED - 1]
    seeds = [derive_seed(parent, index) for parent in parents for index in range(MAX_N)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_front_ends_have_seeds_of_their_own() -> None:
    """And none of them is one of a request, or of a completion, of another front end."""
    seeds = [front_end_seed(7, index) for index in range(4)]
    assert seeds[0] == 7
    assert seeds == [front_end_seed(7, index) for index in range(4)]
    requests = [derive_seed(seed, number) for seed in seeds for number in range(1, 64)]
    children = [derive_seed(seed, index) for seed in requests for index in range(1, 8)]
    assert len({*seeds, *requests, *children}) == len(seeds) + len(requests) + len(children)


def test_without_a_seed_every_front_end_draws_one() -> None:
    assert len({front_end_seed(None, 0) for _ in range(8)}) == 8


def test_derived_seeds_never_change() -> None:
    """They are part of what a user's seed means: a new release may not change them."""
    assert derive_seed(0, 1) == 3143721795637098831
    assert front_end_seed(0, 1) == 10387249414457368740
    assert draw_keys(np.array([1, 2**64 - 1], dtype=np.uint64), np.array([0, 7])).tolist() == [
        [-2101291592, -589028355],
        [288529671, -557485039],
    ]


def test_mix64_is_splitmix64() -> None:
    """The first output of the published generator seeded with 0 (as java.util.SplittableRandom gives it)."""
    state = np.array([0x9E3779B97F4A7C15], dtype=np.uint64)
    assert int(mix64(state)[0]) == 0xE220A8397B1DCDAF


def test_keys_tell_seeds_and_positions_apart() -> None:
    seeds, positions = np.meshgrid(np.arange(256, dtype=np.uint64), np.arange(256))
    keys = draw_keys(seeds.ravel(), positions.ravel())
    assert keys.dtype == np.int32
    assert keys.shape == (256 * 256, 2)
    assert (keys[:, 1] & 1).all()
    assert len(np.unique(keys.view(np.int64))) == 256 * 256


def test_keys_do_not_depend_on_the_integer_type_of_positions() -> None:
    seeds = np.array([5, 6], dtype=np.uint64)
    expected = draw_keys(seeds, np.array([100, 200], dtype=np.int64))
    assert (draw_keys(seeds, np.array([100, 200], dtype=np.int32)) == expected).all()


def test_the_engine_can_import_them_without_torch() -> None:
    code = "import sys, inflight.sample.seeds, inflight.sample.validation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
