"""Prompts of completions, and those that ask a model to fill in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from inflight.entrypoints.http.chat_request import TextRequest
from inflight.entrypoints.http.field_names import FieldNames
from inflight.entrypoints.http.text_prompts import _FIM_TOKENS, _prompt, find_fim_tokens
from inflight.entrypoints.http.validated import Presentation
from inflight.entrypoints.openai.completions import _check_suffix
from inflight.entrypoints.openai.protocol import CompletionRequest
from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.tokenizer import Tokenizer
from tests.support.fakes_tokenizer import BOS_ID
from tests.unit.entrypoints.api_client import FIM, MAX_MODEL_LEN, Api, make_tokenizer, serving
from tests.unit.entrypoints.refusals import refused

FAMILIES = {texts[0]: texts for texts in _FIM_TOKENS}
CODE_LLAMA = _FIM_TOKENS[-1]


def byte_level(*special: str) -> Tokenizer:
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", *special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(letters))])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """It writes a blank before each text, and a BOS before this."""
    letters = {"<unk>": 0, "\u2581": 1, "a": 2, "b": 3} | {f"<0x{i:02X}>": 4 + i for i in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<s>", *CODE_LLAMA]
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in special])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return Tokenizer(backend)


def prompt(tokenizer: Tokenizer, **fields: Any) -> tuple[list[str | None], str | None]:
    """The pieces of the prompt, and the text that `echo` shows."""

    async def encode(text: str, *, add_special_tokens: bool, behind: bool = False) -> list[int]:
        return tokenizer.encode(text, add_special_tokens)

    model = SimpleNamespace(max_model_len=99)
    engine: Any = SimpleNamespace(tokenizer=tokenizer, encode=encode, model=model)
    shown = Presentation(model="m", echo=fields.pop("echo", False))
    request = TextRequest(prompts=["ab"], params=SamplingParams(), presentation=shown, **fields)
    made = asyncio.run(_prompt(engine, request, "ab"))
    return [tokenizer.id_to_piece(token) for token in made.token_ids], made.text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_prefix_suffix_middle(family: str) -> None:
    before_prefix, before_suffix, before_answer = FAMILIES[family]
    tokenizer = byte_level(*FAMILIES[family])
    expected = ["<s>", before_prefix, "a", "b", before_suffix, "b", "a", before_answer]
    assert prompt(tokenizer, suffix="ba") == (expected, "ab")
    assert prompt(tokenizer, suffix="ba", add_special_tokens=False)[0] == expected[1:]


def test_a_suffix_begins_where_the_answer_ends() -> None:
    """No blank comes before it: Code Llama's own code encodes it in this way."""
    pieces, _ = prompt(sentencepiece(), suffix="b a")
    assert pieces == ["<s>", "\u2581<PRE>", "\u2581", "a", "b", "\u2581<SUF>", "b", "\u2581", "a", "\u2581<MID>"]


def test_an_unknown_token_is_not_taken_for_those_of_a_family() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert len(backend.encode("<fim_prefix>").ids) == 1
    assert find_fim_tokens(Tokenizer(backend)) is None


def test_an_empty_suffix_is_none_and_a_model_without_the_tokens_takes_no_other() -> None:
    assert prompt(byte_level(), suffix="")[0] == ["<s>", "a", "b"]
    with pytest.raises(InvalidRequestError) as raised:
        prompt(byte_level(*FAMILIES["<fim_prefix>"][:2]), suffix="a")
    assert FieldNames(CompletionRequest(prompt="x", suffix="a")).api_error(raised.value).param == "suffix"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": ["a", "b"], "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
    ],
)
def test_what_a_suffix_excludes(fields: dict[str, Any], param: str) -> None:
    with refused(param):
        _check_suffix(CompletionRequest(suffix="x", **fields))
    _check_suffix(CompletionRequest(suffix="", **fields))
    _check_suffix(CompletionRequest(suffix="x", echo=True, logprobs=None, prompt=["a", "b"]))


# -- whole requests -------------------------------------------------------------------------------------------------------

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as made:
        made.core.texts = ("Hello",)
        yield made


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": "ab"}, [[BOS_ID, *b"ab"]]),
        ({"prompt": ["ab", "c"]}, [[BOS_ID, *b"ab"], [BOS_ID, *b"c"]]),
        ({"prompt": [5, 6]}, [[5, 6]]),
        ({"prompt": [[5, 6], [7]]}, [[5, 6], [7]]),
        ({"prompt": ["ab", "c"], "add_special_tokens": False}, [[*b"ab"], [*b"c"]]),
        ({"prompt": "abc", "truncate_prompt_tokens": 2}, [[*b"bc"]]),
        ({"prompt": [9] * 2 * MAX_MODEL_LEN, "truncate_prompt_tokens": -1}, [[9] * (MAX_MODEL_LEN - 1)]),
    ],
)
def test_prompts_in_all_forms(api: Api, body: dict[str, Any], prompts: list[list[int]]) -> None:
    before = len(api.core.prompts)
    answer = api.post(PATH, body)
    assert answer.status == 200, answer.text
    assert api.core.prompts[before:] == prompts
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(len(prompts)))


def test_the_length_of_a_completion(api: Api) -> None:
    assert api.asked(PATH, {"prompt": "a"}).sampling.max_tokens == 16
    assert api.asked(PATH, {"prompt": "a", "max_tokens": 17}).sampling.max_tokens == 17
    answer = api.post(PATH, {"prompt": "a", "max_tokens": 1})
    assert (answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"]) == ("H", "length")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt": "ab"}, "abHello"),
        ({"prompt": [*b"ab"]}, "abHello"),
        ({"prompt": "abc", "truncate_prompt_tokens": 2}, "bcHello"),
        ({"prompt": "ab", "truncate_prompt_tokens": 3}, "abHello"),
        ({"prompt": "ab", "max_tokens": 0}, "ab"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_that_was_used(api: Api, fields: dict[str, Any], text: str, stream: bool) -> None:
    answer = api.post(PATH, {**fields, "echo": True, "stream": stream})
    assert answer.status == 200, answer.text
    answers = answer.events if stream else [answer.json]
    assert "".join(choice["text"] for each in answers for choice in each["choices"]) == text


def test_the_log_probabilities_of_an_echo(api: Api) -> None:
    """They are asked of the engine for the prompt, too, as many as the answer or `prompt_logprobs` needs."""
    for fields, wanted in (
        ({"echo": True, "logprobs": 2}, (2, 2)),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, (2, 2)),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 3}, (1, 3)),
        ({"echo": True, "prompt_logprobs": 0}, (None, 0)),
        ({"echo": False, "logprobs": 2}, (2, None)),
        ({"echo": True}, (None, None)),
    ):
        params = api.asked(PATH, {"prompt": "ab", **fields}).sampling.params
        assert (params.logprobs, params.prompt_logprobs) == wanted, fields
    answer = api.post(PATH, {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 0}).json
    (choice,) = answer["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b"]
    assert choice["logprobs"]["token_logprobs"] == [None, pytest.approx(-0.97), pytest.approx(-0.98)]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt": [5], "suffix": "x"}, "suffix"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"prompt": "x" * 4000}, "prompt"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": [999]}, "prompt"),
    ],
)
def test_what_is_refused(api: Api, fields: dict[str, Any], param: str) -> None:
    before = len(api.core.prompts)
    answer = api.post(PATH, {"prompt": "a", **fields})
    assert (answer.status, answer.error["param"], answer.error["type"]) == (400, param, "invalid_request_error")
    assert len(api.core.prompts) == before


def test_best_of_may_repeat_n(api: Api) -> None:
    assert api.asked(PATH, {"prompt": "a", "best_of": 1}).sampling.params.n == 1
    answer = api.post(PATH, {"prompt": "a", "best_of": 2, "n": 2})
    assert (answer.status, len(answer.json["choices"])) == (200, 2)


def test_a_suffix(api: Api) -> None:
    tokens = [make_tokenizer(*FIM).encode(text, add_special_tokens=False)[0] for text in FIM]
    answer = api.post(PATH, {"prompt": "a", "suffix": "b", "echo": True})
    assert answer.json["choices"][0]["text"] == "aHello"
    assert api.core.prompts[-1] == [BOS_ID, tokens[0], *b"a", tokens[1], *b"b", tokens[2]]
    with serving(tokenizer=make_tokenizer()) as without:
        assert without.post(PATH, {"prompt": "a", "suffix": "b"}).error["param"] == "suffix"
