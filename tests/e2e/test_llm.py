"""`LLM` as a user meets it: sampling fields in effect, order of results, bad input that harms nothing, closing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, ConfigError, EngineError, InvalidRequestError, SamplingParams
from inflight.errors import (
    CheckpointError,
    EngineClosedError,
    ModelNotFoundError,
    OutOfMemoryError,
    StepError,
    TokenizerError,
    UnsupportedModelError,
)
from inflight.interface.step import SchedulerOutput
from tests.support.fakes_tokenizer import byte_tokenizer
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

MAX_MODEL_LEN = 128
PROMPT = [5, 9, 14, 20, 33, 41]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(FAMILY_CONFIGS["llama"][0], tmp_path_factory.mktemp("llm") / "model", seed=0)


def open_llm(folder: Path, **arguments: Any) -> LLM:
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": 1 << 24,
        "generation_config": "none",
    }
    return LLM(str(folder), **{**defaults, **arguments})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def tokens(llm: LLM, prompt: Any = PROMPT, **fields: Any) -> list[int]:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


# -- results -------------------------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[3 + i] * (1 + 7 * (i % 5)) for i in range(20)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 6, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 6 for i in range(20)]
    assert outputs[7].outputs[0].token_ids == tokens(llm, prompts[7], max_tokens=2)


def test_a_seeded_request_is_the_same_alone_and_among_63_others(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate([PROMPT], params, use_tqdm=False)
    others = [SamplingParams(temperature=1.3, max_tokens=5 + i % 20, ignore_eos=True) for i in range(63)]
    crowd = llm.generate([PROMPT] * 64, [*others[:30], params, *others[30:]], use_tqdm=False)
    assert crowd[30].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len({tuple(output.outputs[0].token_ids[:5]) for output in crowd}) > 40  # unseeded requests differ


def test_the_engine_seed_repeats_a_whole_run(folder: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with open_llm(folder, seed=seed) as llm:
            params = SamplingParams(temperature=1.0, max_tokens=8, n=2)
            return [c.token_ids for o in llm.generate([PROMPT] * 3, params, use_tqdm=False) for c in o.outputs]

    assert run(1) == run(1) != run(2)


def test_logprobs_are_of_the_raw_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, repetition_penalty=2.0, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None and completion.cumulative_logprob is not None
    total = 0.0
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        best = max(entry, key=lambda t: entry[t].logprob)
        assert entry[best].rank == 1
        assert len(entry) == 3 + (entry[token].rank > 3)
        total += entry[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    (plain,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1, logprobs=3), use_tqdm=False)
    assert plain.outputs[0].logprobs is not None
    first, penalised = plain.outputs[0].logprobs[0], completion.logprobs[0]
    for token in set(first) & set(penalised):
        assert first[token].logprob == pytest.approx(penalised[token].logprob, abs=1e-5)
    assert len(set(first) & set(penalised)) == 3


def test_prompt_logprobs_with_the_prefix_cache_on(llm: LLM) -> None:
    prompt = [3 + i % 90 for i in range(70)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
    for output in (first, second):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None and token in entry
    assert [list(e or ()) for e in first.prompt_logprobs or ()] == [list(e or ()) for e in second.prompt_logprobs or ()]


def test_each_field_changes_the_outcome(llm: LLM) -> None:
    plain = tokens(llm)
    assert tokens(llm, temperature=2.0, seed=1) != plain
    assert set(tokens(llm, allowed_token_ids=[7, 8])) <= {7, 8}
    assert tokens(llm, logit_bias={50: 100.0}) == [50] * 12
    assert tokens(llm, stop_token_ids=[plain[3]]) == plain[: plain.index(plain[3]) + 1]
    assert len(tokens(llm, stop_token_ids=[plain[3]], min_tokens=9)) >= 9
    assert len(set(tokens(llm, repetition_penalty=50.0))) == 12
    assert tokens(llm, temperature=1.0, seed=2, top_k=1) == plain
    assert tokens(llm, temperature=1.0, seed=2, top_p=1e-6) == plain
    assert tokens(llm, temperature=1.0, seed=2, min_p=1.0) == plain


def test_metrics_and_cached_tokens(llm: LLM) -> None:
    prompt = [77] * 60
    tokens(llm, prompt)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.num_cached_tokens == 48  # whole blocks of 16, never the last token
    metrics = output.metrics
    assert metrics is not None
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time


# -- bad requests: one clear error, nothing else harmed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1, VOCAB_SIZE], "outside the vocabulary"),
        ([1, -1], "outside the vocabulary"),
        ([5] * MAX_MODEL_LEN, "maximum context length is 128"),
        ("text", "no tokenizer"),
        ({"prompt_tokens": [1]}, "unknown key"),
        ([1.5, 2], "not an integer"),
        (7, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_are_untouched(llm: LLM, prompt: Any, message: str) -> None:
    before = tokens(llm)
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate([PROMPT, prompt] if prompt != 7 else prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens(llm) == before


def test_a_request_ends_with_the_context(llm: LLM) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 4)
    for params in (
        {"max_tokens": 123},
        {"max_tokens": 123, "min_tokens": 9, "ignore_eos": False},
        {"max_tokens": None},
    ):
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, **params), use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (4, "length")


def test_bad_parameters(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequestError, match="one for all, or one for each prompt"):
        llm.generate([PROMPT] * 3, [SamplingParams()] * 2, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        tokens(llm, logit_bias={VOCAB_SIZE: 1.0})
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        tokens(llm, bad_words=["no"])


def test_changed_parameters_and_unknown_arguments(llm: LLM) -> None:
    message = [{"role": "user", "content": "x"}]
    params = SamplingParams(max_tokens=2)
    params.max_tokens = 3
    (output,) = llm.generate([PROMPT], params, use_tqdm=False, lora_request=None)
    assert len(output.outputs[0].token_ids) == 3
    params.max_tokens = -1
    with pytest.raises(InvalidRequestError, match="max_tokens=-1"):
        llm.generate([PROMPT], params, use_tqdm=False)
    llm.get_default_sampling_params().n = 7
    assert llm.get_default_sampling_params().n == 1
    generate: Any = llm.generate
    chat: Any = llm.chat
    with pytest.raises(InvalidRequestError, match="priority=1 "):
        generate([PROMPT], priority=1)
    with pytest.raises(InvalidRequestError, match="generate has no argument 'lora_request'"):
        generate([PROMPT], lora_request=object())
    with pytest.raises(InvalidRequestError, match=r"chat has no argument 'mm_processor_kwargs'"):
        chat(message, mm_processor_kwargs={})


def test_equal_completions_of_a_greedy_request(llm: LLM) -> None:
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, n=2, max_tokens=4), use_tqdm=False)
    first, second = output.outputs
    assert first.token_ids == second.token_ids


def test_priorities_need_the_policy(llm: LLM, folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="scheduling_policy"):
        llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False, priority=[3])
    with open_llm(folder, scheduling_policy="priority", max_num_seqs=1) as other:
        outputs = other.generate([PROMPT] * 3, SamplingParams(max_tokens=2), use_tqdm=False, priority=[5, -1, 2])
        finished = [output.metrics.finished_time for output in outputs if output.metrics is not None]
        assert finished[1] < finished[2] < finished[0]


def fail_third_step(llm: LLM) -> None:
    runner = llm.llm_engine.executor._ranks[0].loop._worker.runner  # type: ignore[attr-defined]
    prepare, failures = runner.prepare_inputs, iter([False, False, True])

    def failing(plan: SchedulerOutput) -> Any:
        if next(failures, False):
            raise RuntimeError("injected")
        return prepare(plan)

    runner.prepare_inputs = failing


def test_after_a_failed_step_the_requests_are_computed_again(folder: Path) -> None:
    with open_llm(folder) as llm:
        before = tokens(llm)
        fail_third_step(llm)
        assert tokens(llm) == before
        status = llm.llm_engine.core.fault_status()
        assert (status.state, status.epoch, status.num_recoveries) == ("healthy", 1, {"step_failed": 1})
        llm.llm_engine.core.scheduler.check_integrity()


def test_without_fault_tolerance_a_failed_step_ends_its_call_and_the_engine_goes_on(folder: Path) -> None:
    with open_llm(folder, enable_fault_tolerance=False) as llm:
        before = tokens(llm)
        fail_third_step(llm)
        with pytest.raises(StepError, match="injected") as caught:
            llm.generate([PROMPT, PROMPT[::-1]], SamplingParams(max_tokens=8), use_tqdm=False)
        assert caught.value.rank == 0 and len(caught.value.request_ids) == 2
        llm.llm_engine.core.scheduler.check_integrity()
        assert not llm.llm_engine.has_unfinished_requests()
        assert tokens(llm) == before


# -- bad models and arguments --------------------------------------------------------------------------------------------


def test_arguments() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("x", max_model_length=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=0 is not an integer"):
        LLM("x", tensor_parallel_size=0)
    with pytest.raises(ConfigError, match="threads run on one node"):
        LLM("x", nnodes=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="device"):
        LLM("x", device="tpu")
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        LLM("./nowhere")


def test_a_dtype_that_the_device_cannot_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"float16.*bfloat16, float32"):
        open_llm(folder, dtype="float16")


def test_a_length_beyond_the_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=5000"):
        open_llm(folder, max_model_len=5000)


def test_too_little_memory(folder: Path) -> None:
    with pytest.raises(OutOfMemoryError, match="even one token needs 2 blocks"):
        open_llm(folder, kv_cache_memory_bytes=100)
    with pytest.raises(OutOfMemoryError, match="lower max_model_len"):
        open_llm(folder, kv_cache_memory_bytes=1 << 16)
    with pytest.raises(OutOfMemoryError, match=r"^kv_cache_memory_bytes=10995116277760 "):
        open_llm(folder, kv_cache_memory_bytes=10 << 40)


def test_folders_that_are_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        open_llm(tmp_path)
    with pytest.raises(TokenizerError, match="skip_tokenizer_init"):
        open_llm(folder, skip_tokenizer_init=False)
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"], "model_type": "foo"}))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        open_llm(copy)
    (copy / "config.json").write_text(json.dumps(config))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_llm(copy)
    weights.unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        open_llm(copy)
    with open_llm(copy, load_format="dummy") as llm:
        assert len(tokens(llm)) == 12


# -- life cycle ----------------------------------------------------------------------------------------------------------


def test_closing(folder: Path) -> None:
    llm = open_llm(folder)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        tokens(llm)
    assert issubclass(EngineClosedError, EngineError)


def test_start_up_is_measured_when_no_size_is_given(folder: Path) -> None:
    with open_llm(folder, kv_cache_memory_bytes=None, gpu_memory_utilization=0.05, max_num_seqs=4) as llm:
        assert llm.llm_engine.core.kv_cache_config.num_blocks > MAX_MODEL_LEN // 16
        assert len(tokens(llm)) == 12


def test_text_and_stop_strings(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "with-tokenizer")
    byte_tokenizer()._backend.save(str(copy / "tokenizer.json"))
    with open_llm(copy, skip_tokenizer_init=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        (output,) = llm.generate("hello", params, use_tqdm=False)
        text = output.outputs[0].text
        assert output.prompt == "hello" and len(text) > 10
        stop = text[6:9]
        params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop])
        (cut,) = llm.generate("hello", params, use_tqdm=False)
        assert cut.outputs[0].text == text[: text.index(stop)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
        assert not llm.llm_engine.core.scheduler.has_unfinished_requests()


def test_the_tokenizer_as_programs_for_transformers_use_it() -> None:
    with LLM(max_num_seqs=1, max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = tokenizer("12 + 30")["input_ids"]
        assert tokenizer.encode("12 + 30") == ids and tokenizer(["12 + 30", ""])["input_ids"][0] == ids
        assert tokenizer.batch_decode([ids]) == [tokenizer.decode(ids)]
        assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize("12 + 30")) == ids
        assert len(tokenizer.get_vocab()) == len(tokenizer) == tokenizer.vocab_size
        assert tokenizer.get_vocab()[tokenizer.eos_token] == tokenizer.eos_token_id
        message = [{"role": "user", "content": "12 + 30"}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        assert rendered == llm.llm_engine.render_chat(message)
        assert tokenizer.decode(rendered) == text


def test_threads_are_left_as_asked(folder: Path) -> None:
    with open_llm(folder, num_threads=1) as llm:
        device = llm.llm_engine.executor._ranks[0].loop._worker._device  # type: ignore[attr-defined]
        assert device.submit(torch.get_num_threads).result() == 1
