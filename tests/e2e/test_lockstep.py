"""Replicas that divide the experts of a mixture give the tokens of one engine that has them all, whatever the others do."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import LLM, RequestOutput, SamplingParams
from inflight.entrypoints.llm_engine import LLMEngine
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.conftest import FULL
from tests.e2e.identity import Engines, Event, Features, compare, examples, make_params, run_schedule
from tests.e2e.test_feature_matrix import TOKENIZER
from tests.e2e.test_identity_matrix import EVENTS, FEATURES
from tests.support.fakes_tokenizer import save_folder, trained
from tests.support.lockstep_engines import LockstepEngines
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

NUM_EXAMPLES = 100 if FULL else 4
# (family, configuration, number of replicas, arguments): 8 and 5 experts, a shared one, KV caches in int8
GROUPS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "2 replicas": ("qwen3_moe", 0, 2, {}),
    "3 replicas, a shared expert": ("qwen2_moe", 0, 3, {}),
    "2 replicas, int8 cache": ("gpt_oss", 0, 2, {"kv_cache_dtype": "int8"}),
    "2 replicas, by collectives": ("glm4_moe", 1, 2, {"all2all_backend": "allgather_reducescatter"}),
}
PLAIN = {"dtype": "float32", "skip_tokenizer_init": True, "generation_config": "none", "max_model_len": 96}


@pytest.fixture(scope="module", params=GROUPS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    family, index, _, arguments = GROUPS[request.param]
    folder = write_model(FAMILY_CONFIGS[family][index], tmp_path_factory.mktemp("lockstep") / "model", seed=1)
    shared = {name: value for name, value in arguments.items() if name != "all2all_backend"}
    found = Engines(folder, 16)
    found.shared |= shared
    yield found
    found.close()


def test_tokens_do_not_depend_on_the_replicas(engines: Engines, request: pytest.FixtureRequest) -> None:
    """Features and schedules at random: replicas are idle at times, and abort and preempt requests."""
    name = request.node.callspec.params["engines"]
    _, _, num_replicas, arguments = GROUPS[name]
    groups: dict[Features, LockstepEngines] = {}

    @examples(NUM_EXAMPLES, name)
    @given(
        features=FEATURES,
        plans_ahead=st.booleans(),
        events=st.lists(EVENTS | st.just([]), min_size=num_replicas, max_size=num_replicas),
    )
    def check(features: Features, plans_ahead: bool, events: list[list[Event]]) -> None:
        features = replace(features, plans_ahead=plans_ahead).engine
        if features not in groups:
            memory = engines._tight_bytes(features) if features.tight else 1 << 21
            sizes = {"kv_cache_memory_bytes": memory, "block_size": engines.block_size}
            given_arguments = {**PLAIN, **arguments, **features.arguments(engines.max_model_len), **sizes}
            groups[features] = LockstepEngines(engines.folder, num_replicas, **given_arguments)
        group = groups[features]
        params = [[make_params(fields, seed=i) for i, (_, fields, _, _) in enumerate(each)] for each in events]

        def work(engine: LLMEngine, index: int) -> dict[int, RequestOutput]:
            engine.core.reset_prefix_cache()
            return run_schedule(engine, events[index], params[index])

        for index, outputs in enumerate(group.run(work)):
            for i, output in outputs.items():
                plain = engines.plain(events[index][i][0], params[index][i])
                compare(engines, output, plain, params[index][i])

    try:
        check()
    finally:
        for group in groups.values():
            group.close()


def numbers_of(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (each.token_ids, [{token: value.logprob for token, value in at.items()} for at in each.logprobs or ()])
        for each in completions
    ]


PROMPTS = [[(7 * i + j) % 90 + 3 for j in range(1 + 5 * i)] for i in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"], scope="module")
def test_llm_divides_experts_among_replicas(layout: dict[str, int], tmp_path: Path) -> None:
    """With one rank in each replica all numbers are the same, bit for bit. Two ranks divide attention, too."""
    folder = write_model(FAMILY_CONFIGS["qwen3_moe"][0], tmp_path / "model", seed=1)
    arguments = {**PLAIN, **layout, "num_threads": 1, "kv_cache_memory_bytes": 1 << 21}
    one = LLM(str(folder), **arguments)
    expected = numbers_of(one.generate(PROMPTS, GREEDY, use_tqdm=False))
    one.close()
    two = LLM(str(folder), **arguments, data_parallel_size=2, enable_expert_parallel=True)
    for count in (9, 1, 3):  # with 1 the other replica has nothing to compute
        found = numbers_of(two.generate(PROMPTS[:count], GREEDY, use_tqdm=False))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected[:count]]
        assert layout or found == expected[:count]
    two.close()


def test_grammars_hold_in_each_replica(tmp_path: Path) -> None:
    """Masks come late, and only in one replica, while the other has steps in flight."""
    config = copy.deepcopy(FAMILY_CONFIGS["qwen3_moe"][0])
    config.vocab_size = trained(TOKENIZER).get_vocab_size()
    config.bos_token_id, config.eos_token_id = 0, 1
    folder = write_model(config, tmp_path / "model", seed=1)
    save_folder(folder, TOKENIZER)
    arguments = {**PLAIN, "skip_tokenizer_init": False, "num_threads": 1, "kv_cache_memory_bytes": 1 << 22}
    grammars = [StructuredOutputsParams(regex="(yes|no){4,9}"), StructuredOutputsParams(choice=["left", "right"]), None]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=grammar, seed=1) for grammar in grammars
    ]
    one = LLM(str(folder), **arguments)
    expected = [output.outputs[0].text for output in one.generate([[5, 6, 7]] * 3, params, use_tqdm=False)]
    one.close()
    group = LockstepEngines(folder, 2, **arguments)

    def work(engine: LLMEngine, index: int) -> list[str]:
        found: list[str] = []
        for each in params[index:]:  # the second replica has one request less
            engine.add_request("r", [5, 6, 7], each)
            outputs: list[RequestOutput] = []
            while not outputs:
                outputs = engine.step()
            found.append(outputs[0].outputs[0].text)
        return found

    assert group.run(work) == [expected, expected[1:]]
    group.close()
