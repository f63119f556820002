"""Bytes per second of each way of a block, against the same bytes moved by nothing but the system's calls, in turns."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kv_tiers.redis_server import RedisServer, why_no_redis
from benchmarks.kv_tiers.setting import BLOCK_SIZE, Row, Setting, Tier, tell
from inflight.config.kv_tiers import resolve_kv_tiers
from inflight.device.block_copies import HostBlockCopies
from inflight.kv_connector.rank_transfers import NUM_FETCH_THREADS, RankTransfers
from inflight.kv_connector.tier_object import padded
from inflight.kv_connector.tier_stack import TierStack
from inflight.scheduler.kv_fetches import FIRST_FETCH, LAST_FETCH

BAR = 0.7
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def copy_speed(target: Bytes, source: Bytes) -> float:
    """Bytes per second of one `numpy.copyto`."""
    start = time.perf_counter()
    np.copyto(target, source)
    return source.nbytes / (time.perf_counter() - start)


def drop_page_cache(folder: Path) -> None:
    """Files of the folder are read from the disk next time, also by a tier that cannot use O_DIRECT."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def rows(setting: Setting) -> list[Row]:
    found = [_memory(setting), _fs(setting)]
    if reason := why_no_redis():
        return [*found, Row("bandwidth of redis / bare recv_into", bar=BAR, is_most=False, note=reason)]
    return [*found, _redis(setting)]


@contextmanager
def _transfers(setting: Setting, tiers: Sequence[Tier]) -> Iterator[tuple[RankTransfers, int]]:
    """The transfers of a rank, and how many blocks they have."""
    count = setting.prompt_len // BLOCK_SIZE
    arena, host_pool = (torch.ones((count, setting.block_bytes), dtype=torch.uint8) for _ in range(2))
    stack = None
    if tiers:
        stack = TierStack(
            resolve_kv_tiers(tiers), root=bytes(32), shard="one", num_shards=1, payload_bytes=setting.block_bytes
        )
    transfers = RankTransfers(HostBlockCopies(arena, host_pool), stack)
    try:
        yield transfers, count
    finally:
        transfers.close()


def _in_turns(
    setting: Setting, what: str, num_bytes: int, ours: Callable[[], object], bare: Callable[[], object]
) -> Row:
    """`ours` and `bare` move `num_bytes`. The first round is a warm-up."""
    ratios = []
    for index in range(setting.rounds + 1):
        speeds = {}
        for side in (ours, bare) if index % 2 else (bare, ours):
            start = time.perf_counter()
            side()
            speeds[side] = num_bytes / (time.perf_counter() - start)
        if index:
            tell(f"bandwidth of {what}", bytes_per_s=speeds[ours], bare_bytes_per_s=speeds[bare])
            ratios.append(speeds[ours] / speeds[bare])
    return Row(f"bandwidth of {what}", ratios, BAR, False)


def _memory(setting: Setting) -> Row:
    with _transfers(setting, ()) as (transfers, count):
        numbers = range(count)
        target, source = (np.ones((count, setting.block_bytes), np.uint8) for _ in range(2))

        def load() -> None:
            assert transfers.load(numbers, numbers, None).result()

        return _in_turns(setting, "host pool to arena / memcpy", target.nbytes, load, lambda: np.copyto(target, source))


def _fetch_all(transfers: RankTransfers, keys: Sequence[bytes]) -> None:
    """As the engine fetches the blocks of one request: in fetches that grow."""
    first, size = 0, FIRST_FETCH
    while first < len(keys):
        part = range(first, min(first + size, len(keys)))
        found, _ = transfers.fetch([keys[i] for i in part], part).result()
        assert all(found), "the tier does not have what was stored"
        first, size = part.stop, min(2 * size, LAST_FETCH)


def _store_all(transfers: RankTransfers, keys: Sequence[bytes]) -> None:
    numbers = range(len(keys))
    assert transfers.save(1, numbers, numbers, [[key] for key in keys]).result()
    assert transfers.stored(1).result()[0]


def _fs(setting: Setting) -> Row:
    folder = setting.folder / "bandwidth"
    tier = {"type": "fs", "path": str(folder), "timeout_seconds": 60}
    with _transfers(setting, [tier]) as (transfers, count), ThreadPoolExecutor(NUM_FETCH_THREADS) as pool:
        keys = [number.to_bytes(4, "little") for number in range(count)]
        _store_all(transfers, keys)
        drop_page_cache(folder)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        local = threading.local()

        def read(path: Path) -> None:
            if not hasattr(local, "buffer"):
                local.buffer = mmap.mmap(-1, padded(setting.block_bytes))
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(file, [local.buffer], 0) == len(local.buffer)
            os.close(file)

        return _in_turns(
            setting,
            "fs / O_DIRECT reads",
            count * setting.block_bytes,
            lambda: _fetch_all(transfers, keys),
            lambda: list(pool.map(read, paths)),
        )


def _redis(setting: Setting) -> Row:
    with (
        RedisServer() as server,
        _transfers(setting, [{"type": "redis", "url": server.url, "timeout_seconds": 60}]) as (transfers, count),
        ThreadPoolExecutor(NUM_FETCH_THREADS) as pool,
    ):
        keys = [number.to_bytes(4, "little") for number in range(count)]
        _store_all(transfers, keys)
        names, local = server.keys(), threading.local()

        def receive(name: bytes) -> None:
            if not hasattr(local, "socket"):
                local.socket = socket.create_connection(("127.0.0.1", server.port))
                local.buffer = memoryview(mmap.mmap(-1, padded(setting.block_bytes) + 64))
            local.socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            done, end = 0, len(b"$%d\r\n\r\n" % padded(setting.block_bytes)) + padded(setting.block_bytes)
            while done < end:
                got = local.socket.recv_into(local.buffer[done:])
                assert got, "redis has closed the connection"
                done += got

        return _in_turns(
            setting,
            "redis / bare recv_into",
            count * setting.block_bytes,
            lambda: _fetch_all(transfers, keys),
            lambda: list(pool.map(receive, names)),
        )
