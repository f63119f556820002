"""Tensor and pipeline parallel ranks give the tokens of one rank: every family, every layout, features and schedules at random.

The ranks are threads of this process for most examples, and processes for some. The examples are those of
`test_identity_matrix`; `make test` runs a few, which are others for each family.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import LLM, SamplingParams
from inflight.errors import EngineDeadError, StepError
from tests.conftest import FULL
from tests.e2e.identity import PLAIN, Engines, Event, Features, examples, run_example
from tests.e2e.test_identity_matrix import EVENTS, FEATURES
from tests.support.listening import listening_hosts
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, write_model
from tests.support.processes import children

NUM_EXAMPLES = 100 if FULL else 3
NUM_PROCESS_EXAMPLES = 40 if FULL else 4
NUM_LAYERS = 4
EXPERT_PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "pipeline_stagger": 3},
    "pp3": {"pipeline_parallel_size": 3, "pipeline_layer_partition": "1,1,2", "pipeline_stagger": 7},
    "tp2-pp2": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "pipeline_layer_partition": "3,1",
        "pipeline_stagger": 2,
    },
}
# family -> (configuration, block size): blocks of 16 are attended to by the C++ kernel, of 4 by plain torch
MODELS = {
    "llama": (2, 4),  # tied
    "mistral": (1, 16),  # windows
    "qwen2": (3, 4),  # mixed windows and biases
    "qwen3": (1, 16),  # tied, with one key head
    "gemma4": (1, 16),  # heads of two sizes, values that are keys
    "qwen3_5": (0, 16),  # recurrent layers
    "deepseek_v2": (1, 16),  # latent attention
    "qwen2_moe": (0, 16),  # experts
    "gpt_oss": (0, 16),  # sinks, experts with biases
    "hunyuan_v1_moe": (0, 16),  # norms after the rotation
    "gemma4-experts": (3, 16),  # experts beside the MLP
    "glm4_moe": (1, 16),  # groups of experts, dense first layers
}


def written(family: str, root: Path) -> Path:
    config = copy.deepcopy(FAMILY_CONFIGS[family.partition("-")[0]][MODELS[family][0]])
    config.num_hidden_layers = NUM_LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * NUM_LAYERS)[:NUM_LAYERS]
    folder = write_model(config, root / "model", seed=1)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    return folder


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(written(request.param, tmp_path_factory.mktemp("parallel")), MODELS[request.param][1])
    found.llm(PLAIN)
    yield found
    found.close()


# what does not depend on the family: of attention, and of recurrent layers, whose states a step changes in place
@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(request.param, tmp_path_factory.mktemp("parallel"))


# without "full": `tp2-pp2` for each family, and `tp2` and `pp3` for every other one; these have all that `pp2` has
LAYOUTS_OF = [
    pytest.param(family, layout, marks=[] if layout in ("tp2-pp2", ("tp2", "pp3")[index % 2]) else pytest.mark.full)
    for index, family in enumerate(MODELS)
    for layout in LAYOUTS
]


EXPERTS_OF = [
    pytest.param(
        family,
        layout,
        marks=[] if (family, layout) in (("qwen2_moe", "ep2"), ("gpt_oss", "ep2-pp2")) else pytest.mark.full,
    )
    for family in ("qwen2_moe", "gpt_oss", "gemma4-experts", "glm4_moe", "hunyuan_v1_moe", "deepseek_v2")
    for layout in ("ep2", "ep2-pp2")
]
LAYOUTS |= {"ep2": EXPERT_PARALLEL, "ep2-pp2": LAYOUTS["tp2-pp2"] | EXPERT_PARALLEL}


@pytest.mark.parametrize(("engines", "layout"), [*LAYOUTS_OF, *EXPERTS_OF], indirect=["engines"])
def test_tokens_do_not_depend_on_the_layout(engines: Engines, layout: str, request: pytest.FixtureRequest) -> None:
    arguments = {**LAYOUTS[layout], "distributed_executor_backend": "uni"}
    run_examples(engines, arguments, FEATURES, examples(NUM_EXAMPLES, request.node.callspec.params["engines"]))


# an engine of processes takes seconds to start: one for a layout, with all features on, and a cache that is too small
ALL_ON = Features(caching=True, chunk=16, tight=True, max_num_seqs=5)


@pytest.mark.parametrize("engines", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    "layout",
    # without "full": collectives, first, middle and last stages, and tensors that travel in parts
    ["pp3", "tp2-pp2", pytest.param("tp2", marks=pytest.mark.full), pytest.param("pp2", marks=pytest.mark.full)],
)
def test_tokens_of_ranks_that_are_processes(engines: Engines, layout: str, request: pytest.FixtureRequest) -> None:
    arguments = {**LAYOUTS[layout], "distributed_executor_backend": "mp"}
    run_examples(
        engines, arguments, st.just(ALL_ON), examples(NUM_PROCESS_EXAMPLES, request.node.callspec.params["engines"])
    )


def run_examples(
    engines: Engines,
    arguments: dict[str, Any],
    which: st.SearchStrategy[Features],
    of_subject: Callable[[Callable[..., None]], Callable[..., None]],
) -> None:
    parallel = replace(engines, arguments=arguments, llms=dict(engines.llms), specs={})

    @of_subject
    @given(features=which, events=EVENTS)
    def check(features: Features, events: list[Event]) -> None:
        run_example(parallel, features, events)

    try:
        check()
        assert listening_hosts(children(os.getpid())) <= {"127.0.0.1"}
    finally:
        for features, llm in parallel.llms.items():
            if features not in engines.llms:
                llm.close()
    print(f"{arguments}: {parallel.num_tokens} tokens, {parallel.num_ties} ties")


def make(folder: Path, **arguments: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        generation_config="none",
        num_threads=1,
        kv_cache_memory_bytes=1 << 22,
        distributed_executor_backend="uni",
        **arguments,
    )


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2-pp2"])
def test_after_a_step_that_fails_on_one_rank_the_tokens_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The other ranks wait for the one that failed. They leave their groups, and all meet again; no rank is replaced."""
    llm = make(folder, **LAYOUTS[layout])
    prompts, params = [[3, 4, 5], [6] * 20], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    executor: Any = llm.llm_engine.executor  # Any: its threads are private
    workers = [rank.loop._worker for rank in executor._ranks]
    for worker in (workers[-1], workers[0]):
        model, calls = worker.runner._model, itertools.count()

        def fail(*arguments: Any, calls: Any = calls, forward: Any = model.forward, **more: Any) -> Any:
            if next(calls) == 3:
                raise RuntimeError("bad luck")
            return forward(*arguments, **more)

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", fail)
            found = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in found] == expected
    assert llm.llm_engine.core.fault_status().num_recoveries == {"step_failed": 2}
    assert [rank.loop._worker for rank in executor._ranks] == workers
    llm.close()


def test_without_fault_tolerance_a_step_that_fails_on_one_rank_fails_the_engine_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for the one that failed: they are freed, and what is raised is that rank's error, not theirs."""
    llm = make(folder, tensor_parallel_size=2, pipeline_parallel_size=2, enable_fault_tolerance=False)
    llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    executor: Any = llm.llm_engine.executor  # Any: its threads are private
    runner = executor._ranks[3].loop._worker.runner

    def fail(*arguments: Any, **more: Any) -> None:
        raise RuntimeError("bad luck")

    monkeypatch.setattr(runner, "_model", fail)
    with pytest.raises(StepError, match="failed on rank 3: RuntimeError: bad luck"):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(EngineDeadError, match="failed on rank 3: RuntimeError: bad luck"):
        llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    llm.close()


def test_memory_is_measured_on_every_rank(folder: Path) -> None:
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        generation_config="none",
        gpu_memory_utilization=0.05,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        distributed_executor_backend="uni",
        num_threads=1,
    )
    executor = llm.llm_engine.executor
    assert len(executor.determine_available_memory()) == 4
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    executor.collective_rpc("execute_dummy_batch")
    llm.close()


def test_measuring_memory_leaves_the_cache_of_a_running_engine_alone(folder: Path) -> None:
    llm = make(folder)
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompt = list(range(3, 40))
    before = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    llm.llm_engine.executor.determine_available_memory()
    assert llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids == before
    llm.close()
