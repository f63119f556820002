"""The endpoints under /api over a played engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from tests.support.fakes_tokenizer import BOS_ID, BYTE_VOCAB_SIZE
from tests.unit.entrypoints.api_client import (
    MAX_MODEL_LEN,
    MODEL,
    SETTINGS,
    TEMPLATE,
    VOCAB_SIZE,
    Api,
    make_tokenizer,
    serving,
)

CHAT, TEXT = "/api/chat", "/api/generate"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [{"role": "user", "content": "x"}]}, TEXT: {"prompt": "x"}}
BOTH = pytest.mark.parametrize("path", BODIES)
PROMPT = [*b"<user>x<assistant>"]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(replace(SETTINGS, served_model_names=("first", "second:latest"))) as made:
        yield made


def text_of(path: str, line: dict[str, Any]) -> str:
    return str(line["response"] if path == TEXT else line["message"]["content"])


# -- generation -----------------------------------------------------------------------------------------------------------


@BOTH
def test_an_answer(api: Api, path: str) -> None:
    answer = api.post(path, {**BODIES[path], "stream": False, "options": {"num_predict": 9, "temperature": 0.5}})
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert (found["model"], found["done"], found["done_reason"], text_of(path, found)) == ("first", True, "stop", "Hi!")
    assert (found["prompt_eval_count"], found["eval_count"]) == (len(PROMPT), 4)
    sampling = api.core.sequences[-1].sampling
    assert (sampling.max_tokens, sampling.params.temperature) == (9, 0.5)
    assert api.core.prompts[-1] == PROMPT


@BOTH
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": None}])
def test_a_stream_is_lines_and_the_default(api: Api, path: str, stream: dict[str, Any]) -> None:
    answer = api.post(path, {**BODIES[path], **stream})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert "".join(text_of(path, line) for line in answer.lines) == "Hi!"
    assert [line["done"] for line in answer.lines] == [False] * (len(answer.lines) - 1) + [True]


@BOTH
@pytest.mark.parametrize("most", [None, 0, -1, -2])
def test_an_answer_may_fill_the_context(api: Api, path: str, most: int | None) -> None:
    sequence = api.asked(path, {**BODIES[path], "options": {} if most is None else {"num_predict": most}})
    assert sequence.sampling.max_tokens == MAX_MODEL_LEN - len(PROMPT)


@BOTH
@pytest.mark.parametrize(
    ("asked", "shown"), [(None, "first"), ("first", "first"), ("first:latest", "first:latest"), ("second", "second")]
)
def test_a_model_has_the_name_that_was_asked_for(api: Api, path: str, asked: str | None, shown: str) -> None:
    for more in (BODIES[path], {}):
        assert api.post(path, {**more, "model": asked, "stream": False}).json["model"] == shown
    answer = api.post(path, {**BODIES[path], "model": "third"})
    assert (answer.status, list(answer.json)) == (404, ["error"])
    assert answer.error.startswith("The model `third` does not exist")
    assert api.post(path, {"model": "third"}).status == 404


@BOTH
def test_without_a_prompt_the_model_is_loaded(api: Api, path: str) -> None:
    before = len(api.core.sequences)
    for body in ({"of_another": 1}, {"of_another": 1, **dict.fromkeys(BODIES[path], "" if path == TEXT else [])}):
        answer = api.post(path, body)
        found = answer.json
        assert (found["model"], found["done"], found["done_reason"], text_of(path, found)) == (
            "first",
            True,
            "load",
            "",
        )
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-ignored-fields"] == "of_another"
    assert len(api.core.sequences) == before


def test_a_system_message(api: Api) -> None:
    api.post(TEXT, {"prompt": "x", "system": "s"})
    assert api.core.prompts[-1] == [*b"<system>s", *PROMPT]


def test_raw_prompts_and_suffixes_go_without_the_template(api: Api) -> None:
    sequence = api.asked(TEXT, {"prompt": "x", "raw": True})
    assert api.core.prompts[-1] == [BOS_ID, ord("x")]
    assert sequence.sampling.max_tokens == MAX_MODEL_LEN - 2
    for body in ({"prompt": "x", "suffix": "y"}, {"suffix": "y"}):
        answer = api.post(TEXT, {**body, "stream": False, "options": {"num_predict": 2}})
        assert (answer.json["response"], answer.json["done_reason"]) == ("Hi", "length")
        prefix = [*body.get("prompt", "").encode()]
        assert api.core.prompts[-1] == [
            BOS_ID, BYTE_VOCAB_SIZE, *prefix, BYTE_VOCAB_SIZE + 1, ord("y"), BYTE_VOCAB_SIZE + 2,
        ]  # fmt: skip
    for more, why in (({"raw": True}, "raw"), ({"suffix": "y"}, "suffix")):
        answer = api.post(TEXT, {"prompt": "x", "system": "s", **more})
        assert answer.status == 400
        assert answer.error == f"system: the chat template writes it, and {why} goes without the template; leave it out"


@BOTH
def test_what_is_refused(api: Api, path: str) -> None:
    for more, words in (
        ({"options": {"temperature": "1"}}, "options.temperature"),
        ({"format": {"type": "no such type"}}, "format"),
        ({"stream": 1}, "stream"),
        (
            {"images": ["x"]} if path == TEXT else {"messages": [{"role": "user", "content": "x", "images": ["x"]}]},
            "takes text only",
        ),
    ):
        answer = api.post(path, {**BODIES[path], **more})
        assert (answer.status, list(answer.json)) == (400, ["error"])
        assert words in answer.error


def test_a_stream_that_waits_has_lines_without_text() -> None:
    with serving(replace(SETTINGS, stream_keep_alive_interval=0.02)) as api:
        api.core.held = True
        exchange = api.open(TEXT, BODIES[TEXT])
        exchange.until(lambda: exchange.answer.parts)
        assert (exchange.answer.lines[0]["response"], exchange.answer.lines[0]["done"]) == ("", False)
        exchange.leave()


def test_embeddings(api: Api) -> None:
    answer = api.post("/api/embed", {"input": ["x", "yz"]}).json
    assert answer["embeddings"] == [[6.0, 8.0], [9.0, 12.0]] and answer["prompt_eval_count"] == 5
    assert answer["model"] == "first:latest" or answer["model"] == "first"
    assert api.post("/api/embeddings", {"prompt": "x"}).json == {"embedding": [6.0, 8.0]}
    assert api.post("/api/embed", {}).error == "input: this field is required"
    assert api.post("/api/embed", {"input": "x", "dimensions": 7}).status == 400


# -- the model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [{}, {"model": "first"}, {"name": "second"}, {"model": "first:latest", "name": "third"}]
)
def test_a_pull_of_the_served_model_succeeds_at_once(api: Api, name: dict[str, Any]) -> None:
    answer = api.post("/api/pull", {**name, "of_another": 1})
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    assert answer.lines == [{"status": "pulling manifest"}, {"status": "success"}]
    assert answer.headers["x-ignored-fields"] == "of_another"
    answer = api.post("/api/pull", {**name, "stream": False})
    assert (answer.json, answer.headers["content-type"]) == ({"status": "success"}, "application/json")
    assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", ["/api/pull", "/api/show"])
@pytest.mark.parametrize("name", [{"model": "third"}, {"name": "third"}])
def test_another_model_is_not_found(api: Api, path: str, name: dict[str, str]) -> None:
    answer = api.post(path, name)
    assert (answer.status, list(answer.json)) == (404, ["error"])


def test_what_is_served_and_runs(api: Api) -> None:
    served, running = api.get("/api/tags").json["models"], api.get("/api/ps").json["models"]
    assert [each["name"] for each in served] == [each["model"] for each in served] == ["first", "second:latest"]
    assert len({each["digest"] for each in served}) == 1 and len(served[0]["digest"]) == 64
    assert datetime.fromisoformat(served[0]["modified_at"]).tzinfo is not None
    assert served[0]["size"] == 0
    assert served[0]["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "scripted",
        "families": ["scripted"],
        "parameter_size": "",
        "quantization_level": "float32",
    }
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": MAX_MODEL_LEN}
    assert running == [{**each, **more} for each in served]


def test_the_model_is_shown(api: Api) -> None:
    answer = api.post("/api/show", {"name": "second", "of_another": 1})
    assert answer.headers["x-ignored-fields"] == "of_another"
    found = answer.json
    assert (found["template"], found["capabilities"]) == (TEMPLATE, ["completion", "insert"])
    assert found["details"] == api.get("/api/tags").json["models"][0]["details"]
    assert found["modified_at"] == api.get("/api/tags").json["models"][0]["modified_at"]
    assert found["model_info"] == {
        "general.architecture": "scripted",
        "general.basename": "second:latest",
        "scripted.context_length": MAX_MODEL_LEN,
        "scripted.embedding_length": 8,
        "scripted.block_count": 1,
        "scripted.vocab_size": VOCAB_SIZE,
    }
    assert api.post("/api/show", {"model": "first", "name": "third"}).json["model_info"]["general.basename"] == "first"


def test_what_the_model_can_do() -> None:
    settings = replace(SETTINGS, tool_call_parser="hermes", reasoning_parser="qwen3")
    with serving(settings, tokenizer=make_tokenizer()) as api:
        assert api.post("/api/show", {}).json["capabilities"] == ["completion", "tools", "thinking"]
        assert api.post("/api/show", {}).json["model_info"]["general.basename"] == MODEL
    with serving(skip_tokenizer_init=True) as api:
        found = api.post("/api/show", {}).json
        assert (found["capabilities"], found["template"]) == (["completion"], "")
