"""`InputProcessor`: what is refused, and what a request becomes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from inflight.config.architecture import GatedMlpSpec, LayerSpec, ModelArchitecture
from inflight.config.engine import EngineConfig, ModelConfig
from inflight.config.mixers import AttentionSpec, RopeConfig
from inflight.config.reasoning import ReasoningConfig
from inflight.engine.request.input_processor import InputProcessor
from inflight.engine.request.processed import ProcessedRequest
from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.interface.prompt_logprobs import PromptLogprobsPart
from inflight.interface.request import AnswerFrame
from inflight.sample.seeds import derive_seed
from inflight.sampling_params import SamplingParams
from inflight.structured_output.spec import SchemaPlace
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.tokenizer import Tokenizer
from tests.support.fakes_tokenizer import BYTE_VOCAB_SIZE, EOS_ID, byte_tokenizer, trained
from tests.support.refusals import refused

MAX_MODEL_LEN = 40


def make(
    tokenizer: Tokenizer | str | None = "bytes", generation_config: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    layer = LayerSpec(
        mixer=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, rope=RopeConfig()), mlp=GatedMlpSpec(size=8)
    )
    architecture = ModelArchitecture(
        name="LlamaForCausalLM", vocab_size=kwargs.pop("vocab_size", BYTE_VOCAB_SIZE), hidden_size=8, layers=(layer,),
        rms_norm_eps=1e-5, max_position_embeddings=MAX_MODEL_LEN, eos_token_ids=kwargs.pop("eos", ()),
    )  # fmt: skip
    config = ModelConfig(
        folder=Path("."), name="m", architecture=architecture, dtype="float32", max_model_len=MAX_MODEL_LEN,
        load_format="dummy", seed=0, fingerprint="f", generation_overrides=kwargs.pop("generation_overrides", {}),
    )  # fmt: skip
    parts = SimpleNamespace(
        model=config,
        reasoning_end=kwargs.pop("reasoning_end", ""),
        reasoning_budget=-1,
        reasoning_budget_message="",
        reasoning=ReasoningConfig(),
        scheduler=SimpleNamespace(policy=kwargs.pop("policy", "fcfs")),
        parallel=SimpleNamespace(routes_by_prefix=False),
    )
    chosen = byte_tokenizer() if isinstance(tokenizer, str) else tokenizer
    return InputProcessor(
        cast("EngineConfig", parts), chosen, None, generation_config, seed=kwargs.pop("engine_seed", 0), **kwargs
    )


def process(prompt: Any = "hello", processor: Any = None, **params: Any) -> ProcessedRequest:
    result = (processor or make()).process("r", prompt, SamplingParams(**params), arrival_time=1.5)
    assert isinstance(result, ProcessedRequest)
    return result


# -- prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hi", "hi"),
        ([104, 105], None),
        ((104, 105), None),
        (np.array([104, 105]), None),
        ({"prompt": "hi"}, "hi"),
        ({"prompt_token_ids": [104, 105]}, None),
    ],
)
def test_the_ways_to_give_a_prompt(prompt: Any, text: str | None) -> None:
    request = process(prompt)
    [sequence] = request.sequences
    assert (request.prompt, request.prompt_token_ids) == (text, [104, 105])
    assert all(type(token_id) is int for token_id in request.prompt_token_ids)
    assert request.prompt_array.dtype == np.int32 and request.prompt_array.tolist() == [104, 105]
    assert (sequence.request_id, sequence.prompt_leader, sequence.cache_salt) == ("r", None, "")
    assert request.arrival_time == 1.5


def test_what_structured_outputs_need() -> None:
    """All but the grammar itself is checked here; a keyword of a schema is named with its path."""
    tokenizer = Tokenizer(trained("byte_level"))

    def refusal(processor: InputProcessor, wanted: StructuredOutputsParams, **fields: Any) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            processor.process("r", [5], SamplingParams(structured_outputs=wanted, **fields), arrival_time=0.0)
        return str(caught.value)

    choice = StructuredOutputsParams(choice=["a", "b"])
    assert "needs a tokenizer" in refusal(make(None), choice)
    processor = make(tokenizer, vocab_size=tokenizer.vocab_size, generation_config={"eos_token_id": 3})
    processor.process("r", [5], SamplingParams(structured_outputs=choice), arrival_time=0.0)
    assert "give only one" in refusal(processor, choice, allowed_token_ids=[7])
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    assert "#/properties/a/not" in refusal(processor, StructuredOutputsParams(json=schema))
    lenient = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema, lenient=True))
    told = processor.process("r", [5], lenient, arrival_time=0.0).unenforced
    assert told == (SchemaPlace("response_format", "response_format: #/properties/a/not"),)


def test_a_grammar_has_a_frame_unless_the_prompt_has_ended_the_thinking() -> None:
    tokenizer = Tokenizer(trained("byte_level"))
    end, begin = (tokenizer.encode(tag, add_special_tokens=False) for tag in ("</think>", "<think>"))
    processor = make(
        tokenizer, vocab_size=tokenizer.vocab_size, reasoning_end="</think>", generation_config={"eos_token_id": 3}
    )
    wanted = StructuredOutputsParams(choice=["a", "b"])

    def frame_of(
        prompt: list[int], structured: StructuredOutputsParams | None = wanted, **options: Any
    ) -> AnswerFrame | None:
        params = SamplingParams(structured_outputs=structured)
        return processor.process("r", prompt, params, arrival_time=0.0, **options).sequences[0].sampling.answer_frame

    assert len(end) > 1
    optional = AnswerFrame(begin="<think>", end="</think>")
    inside = dataclasses.replace(optional, is_open=True)
    assert frame_of([5, 6]) == optional
    assert frame_of([5, *end, 6]) is None
    assert frame_of([5, *begin, 6]) == frame_of([*end, 5, *begin]) == inside
    assert frame_of([5, *end, 3, 6]) == frame_of([5, *begin, 3, 6]) == optional, "of a turn before"
    assert frame_of([3, 6, *end]) is None
    assert frame_of([5, 6], None) is None
    assert frame_of([5, 6], thinks_first=False) is None
    assert frame_of([5, 6], answer_frame=inside) == optional, "the engine's own tags come first"
    assert frame_of([5, 6], answer_frame=inside, thinks_first=False) == inside


def test_an_unknown_end_of_thinking_is_waited_for() -> None:
    tokenizer = Tokenizer(trained("byte_level"))
    processor = make(
        tokenizer, vocab_size=tokenizer.vocab_size, reasoning_end=";;", generation_config={"eos_token_id": 3}
    )
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    found = processor.process("r", [5], params, arrival_time=0.0).sequences[0].sampling.answer_frame
    assert found == AnswerFrame(begin="", end=";;", is_open=True)


def test_priority_and_salt() -> None:
    processor = make(policy="priority")
    plain = processor.process("r", "x", None, arrival_time=0.0, priority=3, cache_salt="a").sequences[0]
    assert (plain.priority, plain.cache_salt) == (3, "a")
    inner = processor.process("r", {"prompt": "x", "cache_salt": "b"}, None, arrival_time=0.0, cache_salt="a")
    assert inner.sequences[0].cache_salt == "b"


def test_a_priority_without_effect_is_refused() -> None:
    processor = make()
    processor.process("r", "x", priority=0)
    with refused("priority"):
        processor.process("r", "x", priority=3)


def test_special_tokens_are_added_once() -> None:
    tokenizer = Tokenizer(trained("byte_level"))
    processor = make(tokenizer, vocab_size=tokenizer.vocab_size)
    with_bos = processor.process("r", "time", None, arrival_time=0.0)
    rendered = processor.process("r", "time", None, arrival_time=0.0, add_special_tokens=False)
    assert with_bos.prompt_token_ids == [0, *rendered.prompt_token_ids]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([258, 259], r"prompt token 259 at position 1 is outside the vocabulary of 259 tokens"),
        ([1, 300, 2], r"prompt token 300 at position 1 is outside the vocabulary of 259 tokens"),
        ([1, -1], r"prompt token -1 at position 1 is outside"),
        ([2**70], "outside the vocabulary"),
        ([1, "a"], r"prompt token 'a' at position 1 is not an integer"),
        ([1.0], r"prompt token 1\.0 at position 0 is not an integer"),
        ([True], "prompt token True at position 0 is not an integer"),
        ([[1, 2]], r"prompt token \[1, 2\] at position 0"),
        (None, "this one is a NoneType"),
        (b"bytes", "this one is a bytes"),
        (5, "this one is a int"),
        ({}, "either 'prompt'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "and not both"),
        ({"prompt": [1]}, "'prompt' is a list"),
        ({"prompt_token_ids": "abc"}, "'prompt_token_ids' is text"),
        ({"prompt": "a", "multi_modal_date": {}}, "unknown key 'multi_modal_date'"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt=7 must be a string"),
        ([1] * 41, r"too long: it has 41 tokens, and at least one more is needed"),
        ("a\udfff", "not valid Unicode"),
    ],
)
def test_bad_prompts(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        process(prompt)


def test_a_tokenizer_larger_than_the_model() -> None:
    with refused("prompt", 104):
        process("h", make(vocab_size=100))


# -- parameters ----------------------------------------------------------------------------------------------------------


def test_max_tokens() -> None:
    assert process("x" * 39, max_tokens=1).sequences[0].sampling.max_tokens == 1
    assert process("x" * 10, max_tokens=None).sequences[0].sampling.max_tokens == 30
    assert process("x" * 10, max_tokens=30).sequences[0].sampling.max_tokens == 30
    assert process("x" * 10, max_tokens=31).sequences[0].sampling.max_tokens == 30
    assert process("x" * 10, max_tokens=10**6).sequences[0].sampling.max_tokens == 30
    for max_tokens in (None, 50):
        assert process("x" * 10, max_tokens=max_tokens, min_tokens=50).sequences[0].sampling.max_tokens == 30


def test_a_prompt_that_leaves_no_room_is_told_in_words_that_clients_know() -> None:
    for prompt in ("x" * 40, [1] * 40):
        with pytest.raises(ContextLengthExceededError) as caught:
            process(prompt)
        assert str(caught.value).startswith(
            "This model's maximum context length is 40 tokens. However, the prompt is too long: it has 40"
        )


def test_default_params() -> None:
    config = {"temperature": 0.5, "max_new_tokens": 20, "eos_token_id": 7}
    processor = make(generation_config=config)
    [sequence] = processor.process("r", "x" * 30, None, arrival_time=0.0).sequences
    assert sequence.sampling.params == processor.default_params == SamplingParams(temperature=0.5, max_tokens=20)
    assert sequence.sampling.max_tokens == 10  # gives way to the context
    processor = make(generation_config=config, use_generation_defaults=False)
    [sequence] = processor.process("r", "x", None, arrival_time=0.0).sequences
    assert sequence.sampling.params == SamplingParams()
    assert sequence.sampling.eos_token_ids == {7, EOS_ID}


@pytest.mark.parametrize(("uses_file", "expected"), [(True, {"temperature": 0.5, "top_k": 3}), (False, {"top_k": 3})])
def test_fields_that_replace_those_of_generation_config(uses_file: bool, expected: dict[str, Any]) -> None:
    config, overrides = {"temperature": 0.5, "top_k": 9, "eos_token_id": 7}, {"top_k": 3, "eos_token_id": [8]}
    processor = make(generation_config=config, generation_overrides=overrides, use_generation_defaults=uses_file)
    assert processor.default_params == SamplingParams(**expected)
    assert processor.eos_token_ids == {8, EOS_ID}


@pytest.mark.parametrize(
    "params", [{"stop_token_ids": [3, 259]}, {"allowed_token_ids": [259]}, {"logit_bias": {259: 1.0}}]
)
def test_token_ids_in_parameters(params: dict[str, Any]) -> None:
    with refused(next(iter(params)), 259):
        process(**params)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_tokens(name: str) -> None:
    with refused(name):
        process([1], make(None, vocab_size=8), **{name: 9})


def test_without_a_tokenizer() -> None:
    processor = make(None, eos=(5,))
    with refused("prompt"):
        process("text", processor)
    for params in ({"stop": "x"}, {"bad_words": ["x"]}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(params))} needs a tokenizer"):
            process([1], processor, **params)
    assert process([1], processor).sequences[0].sampling.stop_token_ids == {5}


def test_end_tokens() -> None:
    processor = make(generation_config={"eos_token_id": [7, 9, 5000]}, eos=(5,))
    sampling = process("x", processor, stop_token_ids=[5, 20]).sequences[0].sampling
    assert sampling.eos_token_ids == {5, 7, 9, EOS_ID}
    assert sampling.stop_token_ids == {5, 7, 9, 20, EOS_ID}
    sampling = process("x", processor, stop_token_ids=[5, 20], ignore_eos=True).sequences[0].sampling
    assert sampling.eos_token_ids == frozenset()
    assert sampling.stop_token_ids == {5, 20}


def test_bad_words() -> None:
    def tokenized(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        processor = make(tokenizer, vocab_size=tokenizer.vocab_size)
        return process([5], processor, bad_words=words).sequences[0].sampling.bad_words_token_ids

    assert tokenized(["ab", "\n"], byte_tokenizer()) == ((97, 98), (10,))  # after a space it is the same
    merged = Tokenizer(trained("byte_level"))
    there, after_space = (merged.encode(text, add_special_tokens=False) for text in ("the", " the"))
    assert there != after_space
    for word in ("the", " the"):
        assert tokenized([word], merged) == (tuple(there), tuple(after_space))
    assert tokenized([" "], merged) == (tuple(merged.encode(" ", add_special_tokens=False)),)
    with pytest.raises(InvalidRequestError, match="bad word 'Ж' has no tokens"):
        tokenized(["Ж"], Tokenizer(trained("metaspace"), {"unk_token": "<unk>"}))
    with refused("bad_words", "z"):
        process([5], make(vocab_size=100), bad_words=["z"])


# -- seeds and sequences --------------------------------------------------------------------------------------------------


def test_seeds() -> None:
    assert process(seed=5).sequences[0].sampling.seed == 5
    assert process(seed=-1).sequences[0].sampling.seed == 2**64 - 1
    first, second = make(engine_seed=3), make(engine_seed=3)
    seeds = [process(processor=first).sequences[0].sampling.seed for _ in range(5)]
    assert len(set(seeds)) == 5
    assert seeds == [process(processor=second).sequences[0].sampling.seed for _ in range(5)]
    assert seeds[0] != process(processor=make(engine_seed=4)).sequences[0].sampling.seed


def test_a_caller_may_name_the_seed_of_requests_that_bring_none() -> None:
    processor = make()
    found = [
        processor.process("r", [1], SamplingParams(seed=seed), arrival_time=0.0, default_seed=9) for seed in (None, 5)
    ]
    assert [request.sequences[0].sampling.seed for request in found] == [9, 5]
    assert (
        process(processor=processor).sequences[0].sampling.seed == process(processor=make()).sequences[0].sampling.seed
    )


def test_a_seeded_request_does_not_shift_the_others() -> None:
    first, second = make(), make()
    process(processor=first, seed=1)
    process(processor=second)
    assert process(processor=first).sequences[0].sampling.seed == process(processor=second).sequences[0].sampling.seed


def test_a_refused_request_does_not_shift_the_others() -> None:
    first, second = make(), make()
    with pytest.raises(InvalidRequestError):
        process("x" * 40, processor=first)
    assert process(processor=first).sequences[0].sampling.seed == process(processor=second).sequences[0].sampling.seed


def test_sequences() -> None:
    request = process("hi", n=3, seed=11, prompt_logprobs=2, logprobs=1)
    assert [sequence.request_id for sequence in request.sequences] == ["0_r", "1_r", "2_r"]
    assert [sequence.prompt_leader for sequence in request.sequences] == [None, "0_r", "0_r"]
    assert [sequence.sampling.seed for sequence in request.sequences] == [derive_seed(11, i) for i in range(3)]
    assert request.sequences[0].sampling.seed == process("hi", seed=11).sequences[0].sampling.seed
    assert [sequence.parts for sequence in request.sequences] == [(PromptLogprobsPart(num_logprobs=2),), (), ()]
    assert {sequence.sampling.params.logprobs for sequence in request.sequences} == {1}
    assert request.params.n == 3


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    processor = make()
    for name, words in (("prioritty", "did you mean 'priority'"), ("zzz", "known are arrival_time, priority")):
        for error in (InvalidRequestError, TypeError):
            with pytest.raises(error, match=words):
                processor.process("r", "hello", SamplingParams(), **{name: 1})
