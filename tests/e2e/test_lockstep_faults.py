"""`inflight serve` with replicas that divide the experts of a mixture: one is killed or stopped, and no request is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.serve_process import MODEL, ServeProcess, serving, tree_of
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.waits import wait_until

NUM_REQUESTS = 24
OPTIONS = ("--skip-tokenizer-init", "--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 22))
LOCKSTEP = ("-dp", "2", "--enable-expert-parallel")
COPIES = ("--enable-eplb", "--eplb-config", '{"step_interval": 8, "window_size": 8}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path_factory.mktemp("lockstep") / "model", seed=1)


def tokens_of(server: ServeProcess, index: int, max_tokens: int = 400) -> list[int]:
    body = {
        "model": MODEL,
        "prompt": [3 + index, 4, 5],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, text = server.request("POST", "/v1/completions", body)
    assert status == 200, text
    tokens: list[int] = json.loads(text)["choices"][0]["token_ids"]
    return tokens


def num_running(server: ServeProcess) -> list[float]:
    """Of each replica."""
    lines = server.request("GET", "/metrics")[1].splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("inflight:num_requests_running")]


def num_copies(server: ServeProcess) -> float:
    """Copies of experts that were used, in the metrics of the replica with the most."""
    lines = server.request("GET", "/metrics")[1].splitlines()
    return max(float(line.split()[-1]) for line in lines if line.startswith("inflight:expert_copies_total"))


@pytest.fixture(scope="module")
def truth(folder: Path) -> Iterator[list[list[int]]]:
    """The tokens of one engine that has all experts."""
    with serving(str(folder), *OPTIONS) as server, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        yield list(threads.map(lambda index: tokens_of(server, index), range(NUM_REQUESTS)))


@pytest.mark.parametrize(
    ("layout", "victim", "fault"),
    [
        (COPIES, "rank of engine 1", signal.SIGKILL),
        ((), "engine 0", signal.SIGKILL),
        ((), "rank of engine 0", signal.SIGSTOP),
        pytest.param((), "engine 1", signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(("-tp", "2"), "rank of engine 1", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_after_a_fault_in_one_replica_all_requests_go_on(
    folder: Path, truth: list[list[int]], layout: tuple[str, ...], victim: str, fault: signal.Signals
) -> None:
    with serving(str(folder), *OPTIONS, *LOCKSTEP, *layout) as server, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        running = [threads.submit(tokens_of, server, index) for index in range(NUM_REQUESTS)]
        wait_until(lambda: min(num_running(server)) > 2)
        if layout == COPIES:
            wait_until(lambda: num_copies(server) > 0)
        os.kill(victim_of(server, victim), fault)
        assert [each.result() for each in running] == truth
        log = server.text_of_log()
        assert "the engine has recovered in" in log, "the fault came while requests ran"
        again = [threads.submit(tokens_of, server, index, 20) for index in range(4)]
        assert [each.result() for each in again] == [tokens[:20] for tokens in truth[:4]]


def test_if_a_replica_is_given_up_the_others_end_too(folder: Path) -> None:
    """They have only some of the experts. No request waits for ever."""
    limits = ("--fault-tolerance-config", '{"engine_recovery_timeout_sec": 4}')
    with serving(str(folder), *OPTIONS, *LOCKSTEP, *limits) as server, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        running = [threads.submit(tokens_of, server, index, 800) for index in range(NUM_REQUESTS)]
        wait_until(lambda: min(num_running(server)) > 2)
        while server.popen.poll() is None:
            if (core := server.children().get("engine 1")) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(core, signal.SIGKILL)
            time.sleep(0.05)
        assert server.end() == 1
        assert any(each.exception() is not None for each in running)
        assert "replicas 1, which have some of the experts, did not come back within 4 s" in server.text_of_log()


def victim_of(server: ServeProcess, title: str) -> int:
    """The engine core of a replica ("engine 1"), or its first rank ("rank of engine 1")."""
    core = server.children()[title.removeprefix("rank of ")]
    if not title.startswith("rank"):
        return core
    command = "inflight: worker tp0 pp0"
    ranks = [pid for pid in tree_of(core) if command in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")]
    assert len(ranks) == 1
    return ranks[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--headless", "-dpr", "1", "-dpl", "1", "-dpa", "127.0.0.1"), "only 1 of them would"),
        (("-pp", "2"), "pipeline_parallel_size=2"),
        ((*COPIES, "--all2all-backend", "allgather_reducescatter"), "all2all_backend='allgather_reducescatter'"),
    ],
)
def test_replicas_that_cannot_keep_step_end_with_code_2(folder: Path, options: tuple[str, ...], told: str) -> None:
    token = {"INFLIGHT_CLUSTER_TOKEN": "0123456789abcdef" * 2}
    with serving(str(folder), *OPTIONS, *LOCKSTEP, *options, ready=False, **token) as server:
        assert server.end() == 2
        assert told in server.text_of_log()


def test_a_dense_model_has_no_experts_to_divide() -> None:
    with serving(*LOCKSTEP, ready=False) as server:
        assert server.end() == 2
        assert "it is a dense model" in server.text_of_log()
