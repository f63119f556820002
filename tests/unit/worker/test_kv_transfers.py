"""What a worker copies beside its steps, and the names of its blocks in the tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import KVTransferConfig
from inflight.device.cpu import CpuDevice
from inflight.errors import OutOfMemoryError, RankError
from inflight.executor.recovery import recover
from inflight.interface.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inflight.kv_connector.rank_transfers import RankTransfers
from inflight.worker import kv_transfers
from inflight.worker.kv_transfers import make_transfers
from tests.conformance.configs import engine_config
from tests.unit.worker.driven import Driven, make_executor, workers_of, write_small_model
from tests.unit.worker.test_worker_phases import greedy_job, plan_ahead, submit

NUM_SLOTS = 16
FS = KVTierConfig(type="fs", path="/mnt/kv")
SPEC = KVCacheSpec(block_size=4, num_kv_heads=1, head_dim=2, dtype="float32", itemsize=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("transfers"))


@pytest.fixture
def driven(folder: Path) -> Iterator[Driven]:
    """With a host pool."""
    made = make_executor(folder, 1, 1, 3, kv_offloading_size=0.01)
    (worker,) = workers_of(made)
    assert worker._kv_cache_config is not None
    made.executor.initialize_from_config([replace(worker._kv_cache_config, num_slots=NUM_SLOTS)])
    yield made
    made.executor.shutdown()


def test_blocks_of_the_arena_are_saved_and_loaded(driven: Driven) -> None:
    (worker,) = workers_of(driven)
    arena = worker.runner.arena.numpy()
    arena[5] = 7
    call = driven.executor.collective_rpc
    assert call("kv_save", (1, [5], [3], []), beside=True) == [True]
    assert call("kv_load", ([3], [6]), beside=True) == [True]
    assert set(arena[6].tolist()) == {7}


def test_a_load_is_told_the_newest_step(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = workers_of(driven)
    told: list[tuple[Any, ...]] = []

    def note(*args: Any) -> Future[bool]:
        told.append(args)
        return Future()

    monkeypatch.setattr(worker, "_transfers", SimpleNamespace(load=note, fetch=note, close=lambda: None))
    worker.kv_load([3], [6])
    submit(plan_ahead(driven, [greedy_job("masked", has_grammar=True)]), 2)
    driven.executor.collective_rpc("phase", beside=True)  # the worker has the steps
    newest = worker._futures[-1]
    assert len(worker._futures) == 2 and not newest.done()
    worker.kv_load([3], [6])
    worker.kv_fetch([b"key"], [3], [])
    assert told == [([3], [6], None), ([3], [6], newest), ([b"key"], [3], [])]


def begin_load_behind_masks(driven: Driven) -> tuple[Any, Future[Any]]:
    """A step that waits for its masks, and a load that waits for the step."""
    (step,) = submit(plan_ahead(driven, [greedy_job("masked", has_grammar=True)]), 1)
    call = driven.executor.collective_rpc
    return step, call("kv_load", ([3], [6]), non_block=True, beside=True)


def test_a_new_epoch_ends_the_loads_of_the_old_one(driven: Driven) -> None:
    step, loaded = begin_load_behind_masks(driven)
    driven.executor.collective_rpc("phase", beside=True)  # the load has begun
    assert recover(driven.executor, RankError("lost", rank=0)).epoch == 1
    (worker,) = workers_of(driven)
    assert worker._transfers is not None and worker._transfers._epoch == 1
    assert step.done() and isinstance(loaded.exception(timeout=300), RankError)
    assert driven.executor.collective_rpc("kv_load", ([3], [6]), beside=True) == [True]


def test_a_load_that_waits_does_not_hold_up_the_end(driven: Driven) -> None:
    _, loaded = begin_load_behind_masks(driven)
    driven.executor.collective_rpc("phase", beside=True)
    driven.executor.shutdown()
    assert loaded.exception(timeout=300) is not None


# -- names in the tiers ------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """In place of `TierStack`."""

    configs: tuple[KVTierConfig, ...]
    root: bytes
    shard: str
    num_shards: int
    payload_bytes: int

    def close(self) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    found: list[Opened] = []

    def note(configs: tuple[KVTierConfig, ...], **given: Any) -> Opened:
        found.append(Opened(configs, **given))
        return found[-1]

    monkeypatch.setattr(kv_transfers, "TierStack", note)
    monkeypatch.setattr(kv_transfers, "load_kernels", lambda: SimpleNamespace(instruction_set="avx2"))
    return found


def make(
    *,
    rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    contents: bytes = b"weights",
    spec: KVCacheSpec = SPEC,
    tiers: bool = True,
) -> RankTransfers:
    config = engine_config(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    transfer = KVTransferConfig(cpu_bytes=1 << 20, tiers=(FS,) if tiers else ())
    config = replace(config, cache=replace(config.cache, transfer=transfer))
    cache = KVCacheConfig(
        num_blocks=3,
        block_bytes=spec.block_bytes,
        groups=(KVCacheGroup(layer_names=("layers.0",), spec=spec),),
        num_slots=NUM_SLOTS,
        contents=contents,
    )
    with contextlib.closing(CpuDevice()) as device:
        made = make_transfers(config, rank, device, torch.zeros(3, spec.block_bytes, dtype=torch.uint8), cache)
        made.close()
    return made


def test_without_tiers_none_is_opened(opened: list[Opened]) -> None:
    made = make(tiers=False)
    assert made._copies.host_pool.shape == (NUM_SLOTS, SPEC.block_bytes) and opened == []


def test_each_rank_has_a_part_of_its_own(opened: list[Opened]) -> None:
    for rank in range(4):
        make(rank=rank, tp=2, pp=2)
    assert [each.shard for each in opened] == ["tp0of2-pp0of2", "tp1of2-pp0of2", "tp0of2-pp1of2", "tp1of2-pp1of2"]
    assert len({each.root for each in opened}) == 4
    assert {(each.num_shards, each.payload_bytes, each.configs) for each in opened} == {(4, SPEC.block_bytes, (FS,))}


def test_names_depend_on_all_that_determines_the_bytes(opened: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    make()
    assert opened[0].root == opened[1].root and len(opened[0].root) == 32
    make(contents=b"other weights")
    make(tp=2)
    make(pp=2)
    make(spec=replace(SPEC, block_size=8))
    make(spec=replace(SPEC, dtype="int32"))
    make(spec=replace(SPEC, sliding_window=5))
    monkeypatch.setattr(kv_transfers, "load_kernels", lambda: SimpleNamespace(instruction_set="avx512"))
    make()
    monkeypatch.setattr(torch, "__version__", "0.0.0")
    make()
    assert len({each.root for each in opened}) == len(opened) - 1


def test_a_host_pool_beyond_the_memory(opened: list[Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.device.block_copies.available_bytes", lambda: 1)
    with pytest.raises(OutOfMemoryError, match="kv_offloading_size"):
        make()
    assert opened == []
