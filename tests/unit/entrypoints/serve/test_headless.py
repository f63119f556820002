"""`inflight serve --headless`: options that do not fit together, a head that is not there, and the end of a replica."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import pytest

from benchmarks.shared.free_port import free_port
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve import headless
from inflight.entrypoints.serve.headless import run_headless
from inflight.errors import ConfigError, EngineDeadError, EngineError
from tests.unit.entrypoints.runner import invoke

NODE = ["-dp", "2", "-dpl", "1", "-dpr", "1", "-dpa", "127.0.0.1"]


def args_of(port: int) -> EngineArgs:
    return EngineArgs(
        data_parallel_size=2,
        data_parallel_size_local=1,
        data_parallel_start_rank=1,
        data_parallel_address="127.0.0.1",
        data_parallel_rpc_port=port,
    )


PROBLEMS: dict[str, list[str]] = {
    "headless=True: give data_parallel_address": [],
    "data_parallel_start_rank=1 without .*give data_parallel_hybrid_lb or data_parallel_address": NODE[:6],
    "headless=True: give .*but neither data_parallel_hybrid_lb nor": [*NODE, "-dph"],
    "headless=True: .*nor data_parallel_rank": ["-dp", "2", "-dpn", "1", "-dpa", "h"],
    "data_parallel_start_rank=2: .*data_parallel_size=2 allows 0 to 1": [*NODE, "-dpr", "2"],
    "data_parallel_address='0.0.0.0' with headless=True: give the head's": [*NODE[:-1], "0.0.0.0"],
    "data_parallel_address='::' with headless=True: give the head's": [*NODE[:-1], "::"],
    "data_parallel_rpc_port=0 is not an integer in": [*NODE, "-dpp", "0"],
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_does_not_fit_together(problem: str) -> None:
    done = invoke(["serve", "--check", "--headless", *PROBLEMS[problem]])
    assert done.exit_code == 2
    assert re.search(problem, " ".join(done.output.split())), done.output


def test_options_of_a_front_end_are_told_and_ignored() -> None:
    done = invoke(["serve", "--check", "--headless", *NODE, "--port", "9000", "--api-server-count", "3"])
    assert done.exit_code == 0, done.output
    assert "--port has no effect with --headless" in done.output
    assert "--api-server-count has no effect with --headless" in done.output
    assert "--host" not in done.output


def test_a_missing_token_is_told_before_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_CLUSTER_TOKEN", raising=False)
    monkeypatch.delattr(headless, "terms_of")
    with pytest.raises(ConfigError, match="set INFLIGHT_CLUSTER_TOKEN"):
        run_headless(args_of(free_port()))


def test_a_head_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "secret")
    monkeypatch.setattr(headless, "MAX_CONNECT_SECONDS", 0.1)
    with pytest.raises(EngineError, match=r"127.0.0.1:.*within 0.1 s"):
        run_headless(args_of(free_port()))


class PlayedKeeper:
    """`end`: what happens to the replica: an error, or a signal to this process."""

    closed = 0

    def __init__(self, end: Exception | signal.Signals | None) -> None:
        self._end = end

    def start(self) -> None:
        if isinstance(self._end, signal.Signals):
            os.kill(os.getpid(), self._end)

    async def failed(self) -> None:
        if isinstance(self._end, Exception):
            raise self._end
        await asyncio.Event().wait()

    async def close(self) -> None:
        PlayedKeeper.closed += 1


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, EngineDeadError("it is given up")])
def test_how_it_ends(end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first replica that is given up, all of them end."""
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "secret")
    ends = iter([None, end])
    joined: list[int] = []

    class Joined:
        def close(self) -> None:
            joined.append(0)

    monkeypatch.setattr(headless, "EngineKeeper", lambda _args, _config: PlayedKeeper(next(ends)))
    monkeypatch.setattr(headless, "join_head", lambda *_args, **_more: Joined())
    monkeypatch.setattr(PlayedKeeper, "closed", 0)
    args = EngineArgs(
        data_parallel_size=3, data_parallel_size_local=2, data_parallel_start_rank=1, data_parallel_address="h"
    )
    if isinstance(end, Exception):
        with pytest.raises(EngineDeadError, match="it is given up"):
            run_headless(args)
    else:
        run_headless(args)
    assert (PlayedKeeper.closed, len(joined)) == (2, 2)
