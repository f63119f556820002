"""KV blocks in host memory and in a folder: the same tokens as without them, for every feature that touches the KV cache.

Prompts are computed, then the prefix cache is emptied, or is too small anyway. So what is found comes from the host pool.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, RequestOutput, SamplingParams
from inflight.interface.statistics import TransferCounts
from inflight.scheduler.kv_transfers import KVTransfers
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.conftest import FULL
from tests.e2e.identity import assert_close
from tests.e2e.serve_process import ServeProcess, serving
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.waits import wait_until

BLOCK = 16
TEXTS = (
    "The fox went into the forest. It saw a small house, and in the house there was an old woman who baked bread. ",
    "One day a girl found a key. She asked her mother what it was for, but her mother did not know it either. ",
    "The river was cold and fast. Three boats lay at the bank, and nobody wanted to be the first to cross it. ",
)
PROMPTS = [text * 5 + end for text in TEXTS for end in ("Then", "But the")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
HOST_POOL = {"kv_offloading_size": 0.02}


@pytest.fixture(autouse=True)
def _requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, blocks are not computed while they are copied."""
    monkeypatch.setattr(KVTransfers, "_seconds_to_wait", lambda transfers, num_tokens: 1e6)


def make(**arguments: Any) -> LLM:
    fixed: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 1 << 24,
        "num_threads": 1,
        "generation_config": "none",
    }
    return LLM(**{**fixed, **arguments})


def transfers_of(llm: LLM) -> KVTransfers:
    found = llm.llm_engine.core.scheduler.transfers
    assert isinstance(found, KVTransfers)
    return found


def finish(llm: LLM) -> None:
    """Returns when all blocks are where they are to be."""

    def is_idle() -> bool:
        transfers_of(llm).settle()
        return not transfers_of(llm).is_running

    wait_until(is_idle)
    llm.llm_engine.core.scheduler.check_integrity()


def take_counts(llm: LLM) -> TransferCounts:
    counts = transfers_of(llm).take_counts()
    assert counts is not None and counts.num_failed == counts.num_late == 0
    return counts


def run(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(PROMPTS, params, use_tqdm=False)


def compare(found: list[RequestOutput], truth: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, truth, strict=True):
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
        assert [each.text for each in ours.outputs] == [each.text for each in theirs.outputs]
        assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)


class Truth:
    """What engines without a host pool answer, one for each set of arguments that changes numbers."""

    def __init__(self) -> None:
        self._llms: dict[str, LLM] = {}

    def __call__(self, params: SamplingParams | list[SamplingParams], **arguments: Any) -> list[RequestOutput]:
        if (name := repr(arguments)) not in self._llms:
            self._llms[name] = make(enable_prefix_caching=False, **arguments)
        return run(self._llms[name], params)

    @property
    def block_bytes(self) -> int:
        config = self._llms["{}"].llm_engine.core.kv_cache_config
        return int(config.block_bytes)

    def close(self) -> None:
        for llm in self._llms.values():
            llm.close()


@pytest.fixture(scope="module")
def truth() -> Iterator[Truth]:
    made = Truth()
    yield made
    made.close()


def regex(pattern: str) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=16, structured_outputs=StructuredOutputsParams(regex=pattern))


MIXED = [SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=1 if i % 2 else None) for i in range(6)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
# name -> arguments of the engine, and what the requests ask for
FEATURES: dict[str, tuple[dict[str, Any], SamplingParams | list[SamplingParams]]] = {
    "plain": ({}, GREEDY),
    "sampled": ({}, SamplingParams(temperature=1.0, seed=3, max_tokens=16)),
    "two ranks a layer": ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, GREEDY),
    "two stages": ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, GREEDY),
    "drafts": ({"speculative_config": NGRAM}, GREEDY),
    "grammar": ({}, regex(r" (the|a) (girl|fox|boat)( [a-z]{2,6}){1,4}\.")),
    "prompt_logprobs": ({}, MIXED),
    "n": ({}, SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=8)),
    "chunks": ({"max_num_batched_tokens": 24, "max_num_seqs": 3}, GREEDY),
}


def check_feature(llm: LLM, params: SamplingParams | list[SamplingParams], wanted: list[RequestOutput]) -> None:
    """Twice: the second time all blocks come from the host pool."""
    compare(run(llm, params), wanted)
    finish(llm)
    saved = take_counts(llm)
    assert saved.num_saved_blocks > 0 and saved.num_hit_tokens == 0
    llm.reset_prefix_cache()
    compare(run(llm, params), wanted)
    finish(llm)
    loaded = take_counts(llm)
    assert loaded.num_hit_tokens >= 6 * BLOCK and loaded.load_bytes > 0


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_are_those_of_an_engine_without_a_host_pool(truth: Truth, feature: str) -> None:
    arguments, params = FEATURES[feature]
    with make(**HOST_POOL, **arguments) as llm:
        check_feature(llm, params, truth(params))


@pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="the C++ kernels are not here")
def test_an_int8_cache(truth: Truth) -> None:
    with make(**HOST_POOL, kv_cache_dtype="int8") as llm:
        check_feature(llm, GREEDY, truth(GREEDY, kv_cache_dtype="int8"))


def test_a_cache_that_is_too_small(truth: Truth) -> None:
    """Requests are preempted, and blocks are evicted while others run."""
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    wanted = truth(params)
    block_bytes = truth.block_bytes
    with make(**HOST_POOL, kv_cache_memory_bytes=17 * block_bytes, max_num_seqs=4) as llm:
        for _ in range(3):
            compare(run(llm, params), wanted)
            finish(llm)
        counts, stats = take_counts(llm), llm.llm_engine.core.scheduler.stats
        assert stats.num_preemptions > 0
        assert counts.num_hit_tokens > 0
        assert counts.num_loaded_blocks * block_bytes == counts.load_bytes


def tier_in(folder: Path, kind: str) -> dict[str, Any]:
    """The settings of a tier in this folder: "fs", or "obj" with 4 blocks in an object."""
    if kind == "fs":
        return {"type": "fs", "path": str(folder), "max_bytes": 1 << 28, "timeout_seconds": 300}
    return {"type": "obj", "url": f"file://{folder}", "blocks_per_chunk": 4, "timeout_seconds": 300}


@pytest.mark.parametrize("kind", ["fs", "obj"])
def test_another_engine_finds_the_blocks_in_a_folder(truth: Truth, tmp_path: Path, kind: str) -> None:
    """The first prompt of an engine that has just started is not computed. Other weights do not find them."""
    extra = {"cpu_bytes_to_use": 2e7, "secondary_tiers": [tier_in(tmp_path, kind)]}
    config = {"kv_connector_extra_config": extra}
    wanted = truth(GREEDY)
    for turn in range(2):
        with make(kv_transfer_config=config) as llm:
            compare(run(llm, GREEDY), wanted)
            finish(llm)
            counts = take_counts(llm)
            num_full = sum((len(output.prompt_token_ids) - 1) // BLOCK for output in wanted)
            if turn == 0:
                assert counts.num_fetched_blocks == 0
                assert counts.tiers[kind]["stored"] >= num_full / (2 if kind == "fs" else 8)
            else:
                assert counts.num_fetched_blocks == counts.num_loaded_blocks > 0
                assert counts.tiers[kind]["hits"] == counts.num_fetched_blocks
    with make(kv_transfer_config=config, load_format="dummy") as llm:
        run(llm, GREEDY)
        finish(llm)
        assert take_counts(llm).num_fetched_blocks == 0


@pytest.mark.parametrize("restarts", ["", "fs", "obj"])
def test_the_next_message_goes_on_from_a_recurrent_state(tmp_path: Path, restarts: str) -> None:
    """The state after the last full block of an answer is saved when the request ends: in the host pool, and in the tier, where
    another engine finds it."""
    folder = str(write_model(FAMILY_CONFIGS["qwen3_5"][0], tmp_path / "model", seed=1))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tiers = [tier_in(tmp_path / "kv", restarts)] if restarts else []
    arguments: dict[str, Any] = {"model": folder, "skip_tokenizer_init": True, **HOST_POOL}
    arguments["kv_transfer_config"] = {"kv_connector_extra_config": {"secondary_tiers": tiers}}
    with make(**arguments) as llm:
        (first,) = llm.generate([[5, 9, 4] * 10], params, use_tqdm=False)
        finish(llm)
        llm.reset_prefix_cache()
        said = first.prompt_token_ids + first.outputs[0].token_ids
        next_prompt = [*said, *range(3, 40)]
        if not restarts:
            (second,) = llm.generate([next_prompt], params, use_tqdm=False)
    if restarts:
        with make(**arguments) as llm:
            (second,) = llm.generate([next_prompt], params, use_tqdm=False)
    assert second.num_cached_tokens == (len(said) - 1) // BLOCK * BLOCK > 2 * BLOCK
    with make(model=folder, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
        (plain,) = llm.generate([next_prompt], params, use_tqdm=False)
    assert second.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("family", "arena", "least"), [("gemma3", 160_000, 0.65), ("qwen3_5", 700_000, 0.4)], ids=["windows", "states"]
)
def test_chats_that_share_their_beginnings_under_lack_of_memory(
    tmp_path: Path, family: str, arena: int, least: float
) -> None:
    """Nine chats with three system prompts, three at a time. The arena has room for two, the host pool for all."""
    folder = str(write_model(FAMILY_CONFIGS[family][0], tmp_path / "model", seed=1))
    fixed: dict[str, Any] = {"max_model_len": 400, "block_size": 8, "max_num_batched_tokens": 64}
    fixed |= {"model": folder, "skip_tokenizer_init": True, "state_checkpoint_tokens": 64}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def run_chats(**arguments: Any) -> tuple[list[list[int]], float]:
        """The answers, and how much of the prompts was found."""
        draw = random.Random(3)
        systems = [[draw.randrange(3, 90) for _ in range(length)] for length in (40, 70, 130)]
        chats = [systems[i % 3] + [draw.randrange(3, 90) for _ in range(5 + 4 * i)] for i in range(9)]
        answers, found, total = list[list[int]](), 0, 0
        with make(**{**fixed, **arguments}) as llm:
            for turn in range(4):
                for first in range(0, 9, 3):
                    numbers = [(first + turn + i) % 9 for i in range(3)]
                    outputs = llm.generate([chats[number] for number in numbers], params, use_tqdm=False)
                    for number, output in zip(numbers, outputs, strict=True):
                        answers.append(list(output.outputs[0].token_ids))
                        found, total = found + output.num_cached_tokens, total + len(chats[number])
                        chats[number] += answers[-1] + [draw.randrange(3, 90) for _ in range(10)]
            llm.llm_engine.core.scheduler.check_integrity()
        return answers, found / total

    truth, _ = run_chats(kv_cache_memory_bytes=1 << 22, enable_prefix_caching=False)
    small, _ = run_chats(kv_cache_memory_bytes=arena)
    with_host_pool, share = run_chats(kv_cache_memory_bytes=arena, kv_offloading_size=0.004)
    assert small == truth and with_host_pool == truth
    assert share >= least


def metric_of(server: ServeProcess, name: str) -> float:
    lines = server.request("GET", "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"inflight:{name}"))


def test_the_server_keeps_blocks_in_host_memory() -> None:
    def complete(**more: Any) -> tuple[str, int]:
        """The text, and how many tokens of the prompt were cached."""
        body = {"model": "tested", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0, **more}
        status, text = server.request("POST", "/v1/completions", body)
        assert status == 200, text
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def reset(path: str = "/reset_prefix_cache") -> None:
        assert server.request("POST", path) == (200, '{"status":"reset"}')

    def was_loaded() -> bool:
        reset()
        text, num_cached = complete()
        assert text == truth
        return num_cached > 0 and metric_of(server, "kv_offload_load_bytes") > 0

    def loads_three_blocks() -> bool:
        reset()
        text, num_cached = complete(kv_transfer_params={"max_load_tokens": 3 * BLOCK})
        assert text == truth and num_cached in (0, 3 * BLOCK)  # 0: the copy came too late
        return num_cached > 0

    with serving("--kv-offloading-size", "0.1", "--block-size", "16", "--dtype", "float32") as server:
        truth, num_cached = complete()
        assert num_cached == 0 and metric_of(server, "kv_offload_load_bytes") == 0
        wait_until(was_loaded, server.text_of_log)
        assert (
            metric_of(server, "kv_offload_store_bytes") > 0
            and metric_of(server, "external_prefix_cache_hits") >= 4 * BLOCK
        )
        assert metric_of(server, "kv_offload_failures") == 0
        reset("/reset_prefix_cache?reset_connector=true")
        assert complete() == (truth, 0)
        wait_until(was_loaded, server.text_of_log)  # it was saved again
        reset()
        assert complete(kv_transfer_params={"max_load_tokens": 0}) == (truth, 0)
        wait_until(loads_three_blocks, server.text_of_log)
        reset("/reset_prefix_cache?reset_connector=true")
        num_bytes = metric_of(server, "kv_offload_store_bytes")
        assert complete(kv_transfer_params={"max_offload_tokens": 0}) == (truth, 0)
        _, num_cached = complete(prompt=PROMPTS[2])
        assert num_cached == 0  # its blocks are saved, after those of the last request would have been
        wait_until(lambda: metric_of(server, "kv_offload_store_bytes") > num_bytes, server.text_of_log)
        reset()
        assert complete() == (truth, 0)


def test_no_token_changes_when_processes_die_while_blocks_are_copied(tmp_path: Path) -> None:
    """Two ranks with a folder behind their host pools. Before each round the arena is empty, so that all blocks are loaded,
    fetched or computed and saved while a rank or the engine dies."""
    rng = random.Random(1)
    extra = {"secondary_tiers": [{"type": "fs", "path": str(tmp_path), "max_bytes": 1 << 28}]}
    options = ["-tp", "2", "--dtype", "float32", "--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(1 << 24)]
    options += ["--kv-offloading-size", "0.02"]
    options += ["--kv-transfer-config", json.dumps({"kv_connector_extra_config": extra})]
    limits = json.dumps({"max_recoveries": 1000, "engine_recovery_timeout_sec": 500})

    def complete(prompt: str) -> str:
        body = {"model": "tested", "prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        status, text = server.request("POST", "/v1/completions", body)
        assert status == 200, text
        return str(json.loads(text)["choices"][0]["text"])

    def empty_arena() -> None:
        assert server.request("POST", "/reset_prefix_cache")[0] == 200

    def kill(title: str) -> None:
        try:
            os.kill(server.wait_for_child(title), signal.SIGKILL)
        except ProcessLookupError:  # it was still there from the last round
            kill(title)

    def num_resumed() -> int:
        return int(json.loads(server.request("GET", "/fault_tolerance/status")[1])["num_resumed_requests"])

    def was_loaded() -> bool:
        empty_arena()
        assert complete(PROMPTS[0]) == truth[0]
        return metric_of(server, "kv_offload_load_bytes") > 0 and metric_of(server, "external_prefix_cache_hits") > 0

    with serving(*options, "--fault-tolerance-config", limits) as server, ThreadPoolExecutor(len(PROMPTS)) as threads:
        start = time.monotonic()
        truth = list(threads.map(complete, PROMPTS))
        seconds, number = time.monotonic() - start, 0
        while number < (40 if FULL else 6) or not num_resumed():  # otherwise all were done when the process died
            empty_arena()
            futures = [threads.submit(complete, prompt) for prompt in PROMPTS]
            time.sleep(seconds * rng.random())  # any moment is right
            kill(("worker tp1 pp0", "worker tp0 pp0", "engine")[number % 3])
            assert [future.result() for future in futures] == truth
            number += 1
        wait_until(was_loaded, server.text_of_log)  # in a process that was started after a fault
