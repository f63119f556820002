"""The endpoints beside generation: models, tokens, health, metrics, the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

import inflight
from inflight.interface.request import FinishReason
from tests.support.fakes_tokenizer import BOS, BOS_ID, EOS, EOS_ID
from tests.unit.entrypoints.api_client import MAX_MODEL_LEN, MODEL, SETTINGS, TEMPLATE, Api, serving

HELLO: list[Any] = [{"role": "user", "content": "x"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = {"prompt": "x"}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving(replace(SETTINGS, served_model_names=("org/first", "second"))) as made:
        yield made


# -- models ---------------------------------------------------------------------------------------------------------------


def test_models(api: Api) -> None:
    found = api.get("/v1/models").json
    assert (found["object"], found["has_more"]) == ("list", False)
    assert [card["id"] for card in found["data"]] == ["org/first", "second"] == [found["first_id"], found["last_id"]]
    card = found["data"][0]
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert datetime.fromisoformat(card["created_at"]).tzinfo is not None
    rest = {name: value for name, value in card.items() if name not in ("created", "created_at")}
    assert rest == {
        "id": "org/first",
        "display_name": "org/first",
        "object": "model",
        "type": "model",
        "owned_by": "inflight",
        "root": MODEL,
        "lifecycle": "active",
        "input_modalities": ["text"],
        **dict.fromkeys(("max_model_len", "max_input_tokens", "max_tokens"), MAX_MODEL_LEN),
    }
    for shown in found["data"]:
        assert api.get(f"/v1/models/{shown['id']}").json == shown
    answer = api.get("/v1/models/org/second")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_the_models_own_name_is_the_default() -> None:
    with serving() as api:
        assert [card["id"] for card in api.get("/v1/models").json["data"]] == [MODEL]
        assert api.post("/v1/completions", TEXT).json["model"] == MODEL


def test_what_clients_need_to_tokenise(api: Api) -> None:
    assert api.get("/tokenizer_info").json == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": None,
        "unk_token": None,
        "chat_template": TEMPLATE,
        "model_max_length": MAX_MODEL_LEN,
    }


# -- tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [BOS_ID, *"hé".encode()]),
        ({"prompt": "h", "add_special_tokens": False}, [*b"h"]),
        ({"prompt": "h", "add_special_tokens": True, "model": "second"}, [BOS_ID, *b"h"]),
        ({"messages": HELLO}, [*b"<user>x<assistant>"]),
        ({"messages": HELLO, "add_special_tokens": True}, [BOS_ID, *b"<user>x<assistant>"]),
        ({"messages": HELLO, "add_generation_prompt": False}, [*b"<user>x"]),
        ({"messages": HELLO, "tools": [TOOL]}, [*b"[f]<user>x<assistant>"]),
        ({"messages": HELLO, "chat_template_kwargs": {"more": "!"}}, [*b"<user>x<assistant>!"]),
    ],
)
def test_tokens_of_a_prompt_or_of_messages(api: Api, body: dict[str, Any], tokens: list[int]) -> None:
    answer = api.post("/tokenize", body)
    assert answer.json == {"count": len(tokens), "max_model_len": MAX_MODEL_LEN, "tokens": tokens}
    assert answer.headers["content-type"] == "application/json"
    pieces = api.post("/tokenize", {**body, "return_token_strs": True}).json["token_strs"]
    assert len(pieces) == len(tokens)
    assert (pieces[0] == BOS) is (tokens[0] == BOS_ID)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "prompt"),
        *(
            ({"prompt": "x", name: value}, name)
            for name, value in {
                "tools": [TOOL],
                "add_generation_prompt": False,
                "continue_final_message": False,
                "documents": [],
            }.items()
        ),
        ({"prompt": "x" * 4000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "messages"),
    ],
)
def test_what_is_not_tokenised(api: Api, body: dict[str, Any], param: str) -> None:
    answer = api.post("/tokenize", body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("more", "text"),
    [({}, f"h{EOS}"), ({"skip_special_tokens": False}, f"h{EOS}"), ({"skip_special_tokens": True}, "h")],
)
def test_the_text_of_tokens(api: Api, more: dict[str, Any], text: str) -> None:
    assert api.post("/detokenize", {"tokens": [*b"h", EOS_ID], **more}).json == {"prompt": text}


@pytest.mark.parametrize(("path", "body"), [("/tokenize", TEXT), ("/detokenize", {"tokens": [1]})])
def test_models_and_unknown_fields_are_checked_here_too(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = api.post(path, {**body, "model": "third"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    answer = api.post(path, {**body, "model": "second", "of_another": 1})
    assert (answer.status, answer.headers["x-ignored-fields"]) == (200, "of_another")


def test_without_a_tokenizer_prompts_are_token_ids() -> None:
    with serving(skip_tokenizer_init=True) as api:
        assert api.get("/tokenizer_info").error["code"] == "not_found"
        for body, param in ((TEXT, "prompt"), ({"messages": HELLO}, "messages")):
            answer = api.post("/tokenize", {**body, "return_token_strs": True})
            assert (answer.status, answer.error["param"]) == (400, param)
        assert api.post("/detokenize", {"tokens": [1]}).status == 400
        answer = api.post("/v1/completions", {"prompt": [5, 6], "return_token_ids": True})
        assert (answer.status, answer.json["choices"][0]["token_ids"]) == (200, [*b"Hi!", EOS_ID])
        assert api.core.prompts == [[5, 6]]


# -- operation ------------------------------------------------------------------------------------------------------------


def test_version_and_health(api: Api) -> None:
    assert api.get("/version").json == {"version": inflight.__version__}
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = api.get(path, method=method)
        assert (answer.status, answer.json) == (200, {"status": "healthy"}), path
    assert api.get("/ready").json == {"status": "ready"}


def test_a_reset_of_the_prefix_cache_includes_the_connector_only_on_request(api: Api) -> None:
    api.core.forget()
    for query in ("", "?reset_connector=false", "?reset_connector=true"):
        answer = api.post(f"/reset_prefix_cache{query}")
        assert (answer.status, answer.json) == (200, {"status": "reset"})
    assert api.core.resets == [False, False, True]
    assert api.post("/reset_prefix_cache?reset_connector=perhaps").error["param"] == "reset_connector"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),  # another port or subdomain
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),  # a browser without Sec-Fetch-Site
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000", "Host": "localhost:8000"}, 403),
        ({"Origin": "http://localhost:8000", "Host": "localhost:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://localhost:8000", "Host": "localhost:8000"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({}, 200),
    ],
)
def test_a_page_of_another_site_cannot_change_anything(api: Api, headers: dict[str, str], status: int) -> None:
    api.core.forget()
    headers = {name.lower(): value for name, value in headers.items()}  # as a server shows them to the app
    for path in ("/reset_prefix_cache", "/ping"):
        answer = api.post(path, headers=headers)
        assert answer.status == status, path
        assert status == 200 or answer.error["code"] == "cross_site_request"
    assert len(api.core.resets) == (status == 200)
    assert api.get("/version", headers=headers).status == 200, "reading changes nothing"


def test_metrics_have_the_form_that_is_asked_for(api: Api) -> None:
    api.post("/v1/completions", TEXT)
    plain, newer = (api.get("/metrics", {"accept": kind}) for kind in ("*/*", "application/openmetrics-text"))
    assert plain.headers["content-type"].startswith("text/plain")
    assert newer.headers["content-type"].startswith("application/openmetrics-text")
    assert newer.text.endswith("# EOF\n") and not plain.text.endswith("# EOF\n")
    labels = f'model_name="{MODEL}",route="/v1/completions",status="200"'
    assert any(line.startswith("inflight:http_requests_total{" + labels) for line in plain.text.splitlines())


def test_an_engine_that_recovers_is_healthy_and_not_ready() -> None:
    with serving() as api:
        api.do(lambda: api.core._lose("gone"))
        assert api.get("/health").status == 200
        answer = api.get("/ready")
        assert (answer.status, answer.error["code"], answer.error["type"]) == (503, "engine_recovering", "server_error")
        assert api.get("/fault_tolerance/status").json["state"] == "recovering"
        api.do(api.core._restore)
        assert api.get("/ready").json == {"status": "ready"}
        assert api.get("/fault_tolerance/status").json["state"] == "healthy"


def test_an_engine_that_makes_no_step_is_not_ready() -> None:
    with serving() as api:
        api.core.held = True
        exchange = api.open("/ready", method="GET")
        exchange.until(lambda: api.core.sequences)  # a token for the check
        assert api.core.sequences[0].sampling.max_tokens == 1
        api.core.emit(0, "", FinishReason.ERROR, error="the GPU is gone")
        answer = exchange.end()
        assert (answer.status, answer.error["code"]) == (503, "not_ready")
        assert answer.error["message"] == "the engine makes no steps"


def test_a_dead_engine_is_neither_healthy_nor_ready() -> None:
    with serving() as api:
        api.core._finish("gone")
        for path, code in (("/health", "engine_dead"), ("/ping", "engine_dead"), ("/ready", "not_ready")):
            answer = api.get(path)
            assert (answer.status, answer.error["code"]) == (503, code)
        assert api.post("/reset_prefix_cache").error["code"] == "engine_dead"


def test_one_replica_of_several_is_enough() -> None:
    with serving(num_replicas=3) as api:
        everything = {"status": "ready", "engines": {"0": "ready", "1": "ready", "2": "ready"}}
        assert api.get("/ready").json == everything
        api.do(lambda: api.cores[1]._lose("gone"))
        api.do(lambda: api.cores[2]._finish("gone"))
        states = {"0": "ready", "1": "recovering", "2": "not ready"}
        assert api.get("/ready").json == {"status": "ready", "engines": states}
        api.do(lambda: api.cores[0]._lose("gone"))
        assert api.get("/ready").error["code"] == "engine_recovering"


def test_a_server_that_shuts_down_is_healthy_and_not_ready() -> None:
    with serving() as api:
        api.runner.run(api.engine.drain(0.0))
        assert api.get("/health").status == 200
        answer = api.get("/ready")
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
