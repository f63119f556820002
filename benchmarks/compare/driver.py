"""The engine's side of the pipe, the same for all: load once, then a line in, a workload run, a line out.

Standard library only: it runs in the environments of the peers, too.

    parent  ── {"prompts": [[5, 7, ...], ...], "output_len": 64} ──▶  python -m benchmarks.compare.drivers.ENGINE SETTINGS
            ◀── {"seconds": 1.23, "num_tokens": 512} ──

The child's first line is {"imported_at", "constructed_at", "first_token_at"}, of the machine's monotonic clock. An empty line
asks for {"peak_bytes"}; end of file ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shared.report import memory_bytes

Generate = Callable[[list[list[int]], int], int]  # prompts, tokens for each -> tokens produced
Construct = Callable[[], Generate]

WARM_UP_PROMPT = list(range(3, 19))
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine is loaded with; the parent sends it as JSON.

    Attributes:
        folder: the model in the form that the engine reads.
        weight_format: by the engine's own name for it.
        max_model_len, max_num_seqs, max_kv_tokens: the most that the workloads need.
        kv_bytes: for engines that take the size of the KV cache in bytes.
        engine_args: further arguments of the engine's constructor (ours only).
    """

    folder: str
    weight_format: str
    max_model_len: int
    max_num_seqs: int
    max_kv_tokens: int
    kv_bytes: int
    engine_args: dict[str, Any] = field(default_factory=dict)  # Any: whatever the engine takes

    @property
    def kv_gib(self) -> int:
        """Rounded up."""
        return -(-self.kv_bytes // 2**30)


def serve(load: Callable[[Settings], Construct]) -> None:
    """`load` imports what it needs and returns the constructor, which reads the model; the two are timed apart.

    A run is greedy and goes past every end token.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr

    def reply(**fields: Any) -> None:  # Any: JSON
        print(json.dumps(fields), file=replies, flush=True)

    construct = load(Settings(**json.loads(sys.argv[1])))
    imported_at = time.monotonic()
    generate = construct()
    constructed_at = time.monotonic()
    generate([WARM_UP_PROMPT], 1)
    first_token_at = time.monotonic()
    generate([WARM_UP_PROMPT], WARM_UP_TOKENS)
    reply(imported_at=imported_at, constructed_at=constructed_at, first_token_at=first_token_at)
    for line in sys.stdin:
        if not line.strip():
            reply(peak_bytes=memory_bytes("VmHWM"))
            continue
        request = json.loads(line)
        start = time.perf_counter()
        num_tokens = generate(request["prompts"], request["output_len"])
        reply(seconds=time.perf_counter() - start, num_tokens=num_tokens)
