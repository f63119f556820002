"""`inflight serve` with a cache of packed weights: two ranks share the work, one is lost, and the tokens are the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.e2e.serve_process import MODEL, ServeProcess, serving
from tests.support.waits import wait_until

TWO_RANKS = ("--tensor-parallel-size", "2", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 24))
MAPPED = "the packed weights are mapped from"


def complete(server: ServeProcess) -> str:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
    status, text = server.request("POST", "/v1/completions", body)
    assert status == 200, text
    return text.partition('"text":')[2].partition(",")[0]


def test_a_rank_that_is_replaced_maps_its_weights(tmp_path: Path) -> None:
    variables: dict[str, Any] = {
        "INFLIGHT_WEIGHT_CACHE": "on",
        "XDG_CACHE_HOME": str(tmp_path),
        "INFLIGHT_LOG_LEVEL": "INFO",
    }
    folder = tmp_path / "inflight" / "weights"
    with serving(*TWO_RANKS, **variables) as server:
        truth = complete(server)
        wait_until(lambda: len(list(folder.glob("*.index"))) == 2)
        assert MAPPED not in server.text_of_log()
        os.kill(server.children()["worker tp1 pp0"], signal.SIGKILL)
        assert complete(server) == truth
        assert "(rank 1 of 2): " + MAPPED in server.text_of_log()
        assert "(rank 0 of 2): " + MAPPED not in server.text_of_log()
    assert len(list(folder.iterdir())) == 4
