"""All layers in one call of the kernels: the same tokens and log-probabilities, bit for bit, as one layer after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, RequestOutput, SamplingParams
from inflight.kernels.cpu.tape import Recorder, Tape
from inflight.models.taped_layers import TapedLayers
from tests.support.instruction_sets import INSTRUCTION_SETS_HERE
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS_HERE, reason="no C++ kernels here")

# with a head_dim that the attention kernel takes: plain, all biases, windows, biases, QK-norm (two), latent attention, experts,
# sinks and experts with biases
MODELS = [("llama", 0), ("llama", 6), ("mistral", 1), ("qwen2", 2), ("qwen3", 1), ("qwen3", 4), ("deepseek_v2", 1)]
MODELS += [("qwen2_moe", 0), ("gpt_oss", 0), ("deepseek_v3", 2)]
NUM_PROMPTS = 8  # they finish at different times, so batches have 1 to 8 requests


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 5, 40, 90, 2, 30, 17, 64)
    return [torch.randint(3, VOCAB_SIZE, (size,), generator=generator).tolist() for size in sizes[:NUM_PROMPTS]]


def run(folder: Path, **arguments: Any) -> list[Any]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=3 + index, ignore_eos=True, logprobs=3, prompt_logprobs=2)
        for index in range(NUM_PROMPTS)
    ]
    given = {"max_model_len": 128, "max_num_batched_tokens": 48, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 22}
    given |= {"skip_tokenizer_init": True, "distributed_executor_backend": "uni", "dtype": "bfloat16", "num_threads": 1}
    with LLM(str(folder), **{**given, **arguments}) as llm:
        return numbers(llm.generate(prompts(), params, use_tqdm=False))


def numbers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.prompt_logprobs) for out in outputs]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done in the test: "record", "refuse" or "replay"."""
    done: list[str] = []
    finish, replay = Recorder.finish, Tape.replay

    def counted_finish(self: Recorder, *arguments: Any) -> Any:
        tape = finish(self, *arguments)
        done.append(self.refusal or "record")
        return tape

    def counted_replay(self: Tape, *arguments: Any) -> Any:
        done.append("replay")
        return replay(self, *arguments)

    monkeypatch.setattr(Recorder, "finish", counted_finish)
    monkeypatch.setattr(Tape, "replay", counted_replay)
    return done


def compute_at_once(self: TapedLayers, compute: Callable[[], Any], *_: Any) -> Any:
    return compute()


@pytest.mark.parametrize(("family", "index"), MODELS)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": "float32"},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int4", "quantization_group_size": 32, "head_quantization": "none"},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()) or "bfloat16",
)
def test_a_tape_is_layer_after_layer(
    family: str,
    index: int,
    arguments: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[str],
) -> None:
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path / "model", seed=1)
    taped = run(folder, **arguments)
    assert calls.count("replay") > 5
    assert calls.count("record") == len(calls) - calls.count("replay") <= 4
    calls.clear()
    monkeypatch.setattr(TapedLayers, "__call__", compute_at_once)
    assert run(folder, **arguments) == taped
    assert not calls


def test_a_stage_that_cannot_be_taped_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """The kernels do not take weights with 33 input features: torch multiplies them."""
    folder = write_model(FAMILY_CONFIGS["llama"][7], tmp_path / "model", seed=1)
    taped = run(folder)
    assert len(calls) > 0 and set(calls) == {"torch computes linear"}
    monkeypatch.setattr(TapedLayers, "__call__", compute_at_once)
    assert run(folder) == taped
