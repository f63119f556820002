"""Made-up parts that test_seams.py plugs in from outside: a KV tier, an executor, a tool parser and a type of GGUF tensors."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from inflight.config.engine import EngineConfig
from inflight.executor.executor import Executor
from inflight.executor.rank_thread import RankThread
from inflight.interface.messages import WorkerCommand
from inflight.interface.start_up import BeginEpoch, EpochCommand
from inflight.kernels.quantized_weight import QuantizedWeight
from inflight.kv_connector.tier import Tier
from inflight.parsers.text_reader import Steps
from inflight.parsers.tool_parser import ToolParser
from inflight.worker.worker import Worker

HERE = "tests.architecture.made_up_parts"


class ShelfTier(Tier):
    """Keeps objects on named shelves, which all tiers of this process share. Its option is the name of the shelf."""

    shelves: ClassVar[dict[str, dict[bytes, bytes]]] = {}

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        self._objects = self.shelves.setdefault(options["shelf"], {})

    def get(self, name: bytes, into: memoryview) -> int | None:
        data = self._objects.get(name)
        if data is None:
            return None
        into[: len(data)] = data
        return len(data)

    def put(self, name: bytes, data: memoryview) -> None:
        self._objects.setdefault(name, bytes(data))

    def close(self) -> None:
        pass


class LoneExecutor(Executor):
    """Its only rank is a thread. If the rank is lost, there is no other."""

    can_recover = False
    num_commands: ClassVar[int] = 0  # of all executors of this class

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        make_worker = partial(Worker, config, self.places[0])
        self._rank = RankThread(0, make_worker, reply=self._deliver, died=lambda reason: self._rank_died(0, reason))
        self._start()

    def _launch(self) -> None:
        self._rank.start()
        self._send(0, BeginEpoch(epoch=self.meeting.epoch))
        self.join_epoch()

    def _send(self, rank: int, command: WorkerCommand | EpochCommand) -> None:
        LoneExecutor.num_commands += 1
        self._rank.loop.put(command)

    def _ask(self, rank: int) -> None:
        self._deliver(self._rank.loop.report())

    def _terminate(self) -> None:
        self._rank.loop.stop()
        self._rank.join(self._shutdown_deadline())


class AtToolParser(ToolParser):
    """@call get_weather {"city": "Oslo"}"""

    marker = "@call "

    def _marked_call(self, marker: str) -> Steps[None]:
        name = yield from self._name(re.compile(r"[a-z_]+"))
        yield from self._hold_blanks()
        yield from self._arguments(name)


# Blocks of 32 integers and then their scale, a float16. Q8_0 has the scale first
TYPE_NUMBER, TYPE_NAME, BLOCK_SIZE, BLOCK_BYTES = 150, "Q8_LAST", 32, 34


def unpack_last(blocks: Tensor) -> QuantizedWeight:
    scales = blocks[..., BLOCK_SIZE:].contiguous().view(torch.float16).float().flatten(1)
    return QuantizedWeight(
        values=(blocks[..., :BLOCK_SIZE] ^ 128).flatten(1), scales=scales, offsets=scales * 128, bits=8
    )


def draw_last(random: np.random.Generator) -> tuple[bytes, list[float]]:
    """A block, and the weights that it stands for."""
    scale, integers = int(random.integers(1, 17)) / 16384, random.integers(-128, 128, BLOCK_SIZE).tolist()
    return struct.pack("<32be", *integers, scale), [scale * each for each in integers]
