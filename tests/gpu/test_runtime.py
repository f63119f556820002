"""A GPU engine as it runs: no step waits for the device, graphs are reported, memory comes back, formats are read well."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu.driving import Driver
from benchmarks.gpu.sizes import random_prompts
from benchmarks.gpu.trace import Trace, record
from inflight import LLM, SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.e2e.greedy_truth import Comparison
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, reference_model, write_model

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
ARGUMENTS: dict[str, Any] = {
    "device": DEVICE,
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 1 << 26,
    "distributed_executor_backend": "uni",
}
EAGER = {"enforce_eager": True}
MODES = {"graphs": {}, "eager": EAGER}
# what a step may hold beside a plain draw; nothing of it may make the host wait
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cut": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 3},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "biased": {"temperature": 0.0, "logit_bias": {5: 2.0, 9: -3.0}},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["qwen3"][0], tmp_path_factory.mktemp("runtime") / "model", seed=0)


@pytest.fixture(scope="module", params=MODES)
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(folder), enable_prefix_caching=False, **ARGUMENTS, **MODES[request.param]) as made:
        yield made


def in_steady_steps(
    llm: LLM, fields: dict[str, Any], num_steps: int, observe: Callable[[Callable[[], None]], None]
) -> None:
    """`observe` gets a call that runs `num_steps` steps in which four requests decode. They have run once before, unobserved:
    kernels are compiled then."""
    engine = llm.llm_engine
    for attempt in range(2):
        ids = [f"steady-{attempt}-{i}" for i in range(4)]
        params = SamplingParams(max_tokens=300, ignore_eos=True, **fields)
        for request_id, prompt in zip(ids, random_prompts([5, 17, 40, 64]), strict=True):
            engine.add_request(request_id, {"prompt_token_ids": [token % VOCAB_SIZE for token in prompt]}, params)
        for _ in range(12):
            engine.step()

        def run() -> None:
            for _ in range(num_steps):
                engine.step()

        if attempt:
            observe(run)
        else:
            run()
        engine.abort_requests(ids)
        while llm.llm_engine.core.has_unfinished_requests():
            engine.step()


def test_the_mode_that_finds_waits_holds_for_all_threads() -> None:
    """Else the next test would see nothing: steps are launched in the compute thread."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="synchronizing"):
            pool.submit(lambda: torch.ones(1, device=DEVICE).item()).result()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fields", FIELDS)
def test_no_step_makes_the_host_wait(llm: LLM, fields: str) -> None:
    def observe(run: Callable[[], None]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    in_steady_steps(llm, FIELDS[fields], 40, observe)


def test_no_step_synchronizes_the_device_or_a_stream(llm: LLM) -> None:
    """Calls that the mode above does not know. An event may be waited for: the drain thread does."""
    traces: list[Trace] = []
    in_steady_steps(llm, FIELDS["greedy"], 40, lambda run: traces.append(record(DEVICE, run)))
    assert len(traces[0].kernels) > 40
    waits = {name: count for name, count in traces[0].host_calls.items() if name != "cudaEventSynchronize"}
    # the profiler waits for the device itself, as it starts and as it ends
    assert sum(waits.values()) <= 4, waits


def test_graphs_are_reported(llm: LLM, request: pytest.FixtureRequest) -> None:
    (report,) = llm.collective_rpc("graph_report")
    assert set(report) >= {"num_graphs", "seconds", "bytes"}
    if "graphs" in request.node.callspec.id:
        assert report["num_graphs"] > 0 and 0 < report["seconds"] < 60 and 0 < report["bytes"] < 8 << 30
    else:
        assert report["num_graphs"] == 0


def test_an_abort_frees_what_the_request_held(llm: LLM) -> None:
    driver = Driver(llm, DEVICE)
    prompts = [[token % VOCAB_SIZE for token in prompt] for prompt in random_prompts([100] * 6)]
    request_ids = driver.add(prompts, [200] * 6)
    for _ in range(30):
        llm.llm_engine.step()
    llm.llm_engine.abort_requests(request_ids[::2])
    finished = []
    while llm.llm_engine.has_unfinished_requests():
        finished += [output.request_id for output in llm.llm_engine.step() if output.finished]
    assert sorted(finished) == sorted(request_ids[1::2])
    for _ in range(3):
        llm.llm_engine.step()
    llm.llm_engine.core.scheduler.check_integrity()
    assert not llm.llm_engine.core.has_unfinished_requests()


def test_memory_comes_back(folder: Path) -> None:
    def allocated() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    with LLM(str(folder), **ARGUMENTS) as warm:  # what libraries keep for good, they take with the first engine
        warm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    del warm
    gc.collect()
    before = allocated()
    with LLM(str(folder), **ARGUMENTS) as made:
        made.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert allocated() - before > ARGUMENTS["kv_cache_memory_bytes"] // 2
    del made
    gc.collect()
    assert allocated() - before < 1 << 20


@pytest.mark.parametrize("mode", MODES)
def test_a_long_prompt(tmp_path: Path, mode: str) -> None:
    """Longer than a step's tokens, and more keys than one program reads: splits, and pieces of a prompt."""
    fields = FAMILY_CONFIGS["llama"][0].to_dict()
    config = LlamaConfig(**{**fields, "max_position_embeddings": 16384})
    folder = write_model(config, tmp_path / "long", seed=3)
    rng = random.Random(1)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(9000)]
    long = {**ARGUMENTS, "max_model_len": 9100, "max_num_batched_tokens": 4096}
    with LLM(str(folder), dtype="float32", **long, **MODES[mode]) as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False
        )
    truth = reference_model(folder).to(DEVICE)
    truth.set_attn_implementation("sdpa")  # eager attention would hold 9,000 x 9,000 scores a head
    Comparison().add(truth, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        pytest.param({"quantization": "fp8"}, 0.4, id="fp8"),
        pytest.param({"quantization": "int4", "quantization_group_size": 32}, 0.6, id="int4"),
        pytest.param({"kv_cache_dtype": "fp8"}, 0.2, id="kv-fp8"),
        pytest.param({"quantization": "fp8", "kv_cache_dtype": "fp8"}, 0.45, id="fp8-kv-fp8"),
    ],
)
def test_formats_of_fewer_bits(tmp_path: Path, arguments: dict[str, Any], bound: float) -> None:
    """`bound`: of the mean difference of the log-probabilities of a prompt's tokens from those in bfloat16, in parts of these'
    own spread. In plain torch fp8 has 0.25, int4 0.39, keys and values in fp8 0.11; a format that is read wrongly has 1.1."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = write_model(config, tmp_path / "formats", seed=2, dtype=torch.bfloat16)
    rng = random.Random(2)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(200)]

    def log_probabilities(**more: Any) -> torch.Tensor:
        """Of the prompt's tokens but the first; and it generates, so that steps of one token run too."""
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
        with LLM(str(folder), dtype="bfloat16", **ARGUMENTS, **more) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 16 and output.prompt_logprobs is not None
        return torch.tensor(
            [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if entry]
        )

    plain, other = log_probabilities(), log_probabilities(**arguments)
    assert float((plain - other).abs().mean() / plain.std()) < bound
    assert not torch.equal(plain, other), "the format is not in use"


def test_the_embedded_model_answers() -> None:
    """With its tokenizer, in its own dtype; one request follows a grammar."""
    with LLM(device=DEVICE, kv_cache_memory_bytes=1 << 26, max_num_seqs=8) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80)
        (answer,) = llm.chat([{"role": "user", "content": "What is 47 + 38?"}], params, use_tqdm=False)
        assert "85" in answer.outputs[0].text
        pytest.importorskip("llguidance")
        choice = StructuredOutputsParams(choice=["a long way", "far"])
        constrained = SamplingParams(temperature=1.0, seed=1, max_tokens=24, structured_outputs=choice)
        outputs = llm.generate(["How far?"] * 3, [constrained, params, constrained], use_tqdm=False)
    assert all(outputs[i].outputs[0].text in ("a long way", "far") for i in (0, 2))
