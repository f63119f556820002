"""What `embed`, `classify`, `encode` and `score` refuse, and how they pair texts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from inflight import LLM, InvalidRequestError, PoolingParams, SamplingParams
from inflight.errors import UnknownParameterError
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=8, num_threads=1) as made:
        yield made


TEXTS = ["Anna has a dog.", "What is 2 + 3?", "Anna has a dog."]


def test_one_text_is_compared_with_all(llm: LLM) -> None:
    vectors = [np.array(each.outputs.embedding) for each in llm.embed(TEXTS, use_tqdm=False)]
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    assert scores == pytest.approx([float(vectors[0] @ each) for each in vectors], abs=1e-6)
    pairs = [each.outputs.score for each in llm.score(TEXTS, TEXTS[::-1], use_tqdm=False)]
    assert pairs == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [PoolingParams(use_activation=False), PoolingParams(), PoolingParams(truncate_prompt_tokens=2)]
    found = llm.embed(TEXTS, pooling_params=params, use_tqdm=False)
    lengths = [float(np.linalg.norm(each.outputs.embedding)) for each in found]
    assert lengths[0] != pytest.approx(1.0, abs=1e-3) and lengths[1:] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert len(found[2].prompt_token_ids) == 2 < len(found[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda llm: llm.score([], ["a"], use_tqdm=False), "data_1 is empty: give at least one text"),
        (lambda llm: llm.score(3, ["a"], use_tqdm=False), "data_1 must be a text or a list of texts, not a int"),
        (lambda llm: llm.score({"prompt": "a"}, ["a"], use_tqdm=False), "data_1 must be a text or a list of texts"),
        (lambda llm: llm.score("a", ["b", None], use_tqdm=False), r"data_2\[1\] is a NoneType, and not a text"),
        (lambda llm: llm.score(["a", "b"], ["a"], use_tqdm=False), "data_1 has 2 texts and data_2 has 1"),
        (lambda llm: llm.embed(["a"], prompt_name="query", use_tqdm=False), "prompt_name='query' is not a prompt"),
        (lambda llm: llm.embed(["a", ""], use_tqdm=False), "the prompt is empty"),
        (lambda llm: llm.embed(["a"], pooling_params=[PoolingParams()] * 2, use_tqdm=False), "2 pooling_params for 1"),
        (lambda llm: llm.embed(["a"], pooling_params=SamplingParams(), use_tqdm=False), "give PoolingParams"),
        (lambda llm: llm.embed(["a"], pooling_params=PoolingParams(dimensions=7), use_tqdm=False), "may be cut"),
        (lambda llm: llm.encode(["a"], pooling_task="sing", use_tqdm=False), "task='sing' is not one of"),
        (lambda llm: llm.classify(["a"], use_tqdm=False), "task='classify' is not what this model does"),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_else_is_harmed(llm: LLM, call: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        call(llm)
    assert len(llm.embed(["a"], use_tqdm=False)) == 1


def test_an_instruction_needs_a_template_with_a_place_for_it(llm: LLM) -> None:
    with refused("instruction"):
        llm.score("a", "b", instruction="Find it.", use_tqdm=False)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"dimensions": 0}, "dimensions=0 is not an integer in"),
        ({"dimensions": True}, "dimensions=True"),
        ({"truncate_prompt_tokens": 0}, "leaves no prompt"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
        ({"use_activation": "yes"}, "use_activation='yes'"),
    ],
)
def test_wrong_parameters(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        PoolingParams(**values)


def test_names_of_other_versions_have_advice() -> None:
    with pytest.raises(UnknownParameterError, match="give use_activation"):
        PoolingParams(normalize=True)  # type: ignore[call-arg]
