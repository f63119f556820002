"""Every field that is accepted changes the outcome, or says in the document that it has none: a case per field, and no field
without one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.entrypoints.fields.strict_model import EFFECT, StrictModel
from inflight.entrypoints.fields.thinking_fields import ThinkingFields
from inflight.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.hub import EMBEDDED_MODEL
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.support.document_rows import row_problems

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
# shows each variable that a request can set
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}<|im_end|>\n{% endfor %}{{ tools | tojson if tools else '' }}{{ reasoning_effort or '' }}{{ mood or '' }}"
    "{{ documents | tojson if documents else '' }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED: list[Any] = [{"role": "user", "content": "What is 7 + 5?"}]
OPENED: list[Any] = [*ASKED, {"role": "assistant", "content": "7 + 5"}]
THINKS: dict[str, Any] = {
    "messages": [*ASKED, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
}
PROMPT = "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n"
TAGS = {"reasoning_parser": "qwen3"}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
BASE: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "return_token_ids": True}
DRAWN = {"temperature": 2.0, "seed": 1}
HOT = {"temperature": 50.0, "seed": 1}
LONGER = {"temperature": 1.5, "seed": 1, "ignore_eos": True, "max_tokens": 60}
NO_END = {"logit_bias": {"2": -100}}

# field -> what is sent beside it, its value. The outcome differs from that without the field.
COMMON: dict[str, tuple[dict[str, Any], Any]] = {
    "n": (DRAWN, 2),
    "temperature": ({"seed": 1}, 30.0),
    "top_p": (HOT, 0.01),
    "top_k": (HOT, 1),
    "min_p": (DRAWN, 1.0),
    "presence_penalty": (LONGER, 2.0),
    "frequency_penalty": (LONGER, 2.0),
    "repetition_penalty": ({}, 20.0),
    "seed": ({"temperature": 50.0}, 3),
    "logit_bias": ({}, {"20": 100}),
    "bad_words": ({}, ["7"]),
    "allowed_token_ids": ({}, [20, 21, 2]),
    "stop": ({}, "+"),
    "stop_sequences": ({}, ["+"]),
    "stop_token_ids": ({}, folder_tokenizer(EMBEDDED_MODEL).encode(" +", False)),
    "ignore_eos": ({}, True),
    "min_tokens": ({}, 12),
    "include_stop_str_in_output": ({"stop": "+"}, True),
    "skip_special_tokens": ({"ignore_eos": True}, False),
    "response_format": ({}, {"type": "json_object"}),
    "structured_outputs": ({}, {"choice": ["cat", "dog"]}),
    "guided_json": ({}, {"type": "integer"}),
    "guided_regex": ({}, "[a-c]+"),
    "guided_choice": ({}, ["cat", "dog"]),
    "guided_grammar": ({}, 'start: "cat"'),
    "guided_json_object": ({}, True),
    "guided_whitespace_pattern": ({"guided_json": {"const": [1, 2]}, "max_tokens": 60}, " {2}"),
    "json_schema": ({}, {"type": "integer"}),
    "regex": ({}, "[a-c]+"),
    "ebnf": ({}, 'root ::= "cat"'),
    "grammar": ({}, 'root ::= "cat"'),
    "format": ({}, "json"),
    "text": ({}, {"format": {"type": "json_object"}}),
    "output_config": ({}, {"format": {"type": "json_schema", "schema": {"type": "integer"}}}),
    "output_format": ({}, {"type": "json_schema", "schema": {"type": "integer"}}),
    "options": ({}, {"stop": "+"}),
    "return_token_ids": ({"return_token_ids": False}, True),
    "prompt_logprobs": ({}, 1),
    "truncate_prompt_tokens": ({}, 3),
    "stream": ({}, True),
    "stream_options": ({"stream": True}, {"include_usage": True}),
    "model": ({}, "another-name"),
}
OWN: dict[str, dict[str, tuple[dict[str, Any], Any]]] = {
    CHAT: {
        "messages": ({}, [{"role": "user", "content": "What is 1 + 1?"}]),
        "return_progress": ({"stream": True}, True),
        "timings_per_token": ({"stream": True}, True),
        "tools": ({}, TOOLS),
        "add_generation_prompt": ({}, False),
        "continue_final_message": ({"messages": OPENED}, True),
        "chat_template_kwargs": ({}, {"mood": "sad"}),
        "documents": ({}, [{"title": "T", "text": "x"}]),
        "add_special_tokens": ({}, True),
        "max_completion_tokens": ({"max_tokens": None}, 2),
        "max_tokens": ({"max_tokens": None}, 2),
        "logprobs": ({}, True),
        "return_tokens_as_token_ids": ({"logprobs": True}, True),
        "top_logprobs": ({"logprobs": True}, 2),
        "tool_choice": ({"tools": TOOLS, "max_tokens": 50}, "required"),
        "functions": ({}, [TOOLS[0]["function"]]),
        "function_call": ({"functions": [TOOLS[0]["function"]], "max_tokens": 50}, {"name": "f"}),
        "parallel_tool_calls": ({"tools": TOOLS, "tool_choice": "required", "max_tokens": 90, **NO_END}, False),
        "reasoning_effort": ({}, "high"),
        "reasoning": (THINKS, {"max_tokens": 1}),
        "thinking": (THINKS, {"type": "enabled", "budget_tokens": 1}),
        "enable_thinking": (THINKS, False),
        **dict.fromkeys(("thinking_token_budget", "thinking_budget"), (THINKS, 1)),
        **dict.fromkeys(("thinking_budget_tokens", "reasoning_budget_tokens"), (THINKS, 1)),
    },
    TEXT: {
        "prompt": ({}, "Something else"),
        "max_tokens": ({"max_tokens": None}, 2),
        "logprobs": ({}, 1),
        "return_tokens_as_token_ids": ({"logprobs": 1}, True),
        "echo": ({}, True),
        "add_special_tokens": ({}, False),
        "suffix": ({}, "= 12"),
        "thinking_token_budget": ({"prompt": "Hi <think>"}, 1),
    },
}
# no outcome of one request shows these: they have tests of their own below (kv_transfer_params: in test_kv_offloading.py)
SHOWN_BELOW = {"cache_salt", "priority", "request_id", "kv_transfer_params"}
# what requests say about thoughts has a table of its own: tests/unit/entrypoints/fields/test_thinking_fields.py
# and what they say about images: tests/e2e/test_images_http.py
SHOWN_BELOW |= {*ThinkingFields.model_fields, "chat_template_kwargs", "mm_processor_kwargs"}
MODELS: dict[str, type[StrictModel]] = {CHAT: ChatCompletionRequest, TEXT: CompletionRequest}


def effect(model: type[StrictModel], name: str) -> str | None:
    extra = model.model_fields[name].json_schema_extra
    assert extra is None or isinstance(extra, dict)
    found = (extra or {}).get(EFFECT)
    assert found in (None, "none", "neutral")
    return found


CASES = [(path, name, *case) for path in MODELS for name, case in {**COMMON, **OWN[path]}.items()]
NONE = {  # of those that are documented as having none: a value that is accepted
    "user": "u", "safety_identifier": "s", "metadata": {"a": 1}, "prompt_cache_key": "k", "service_tier": "priority",
    "modalities": ["text"], "store": True, "verbosity": "high", "best_of": 1, "prediction": {"type": "content"},
    "prompt_cache_retention": "24h", "use_beam_search": False, "logits_processors": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("model") / "with-bos"
    shutil.copytree(EMBEDDED_MODEL, folder)
    make_tokenizer_add_a_token(folder / "tokenizer.json")
    name_fim_tokens(folder / "tokenizer.json")
    args = demo_args(model=str(folder), chat_template=TEMPLATE, scheduling_policy="priority", reasoning_config=TAGS)
    settings = ServerSettings(served_model_names=(MODEL, "another-name"), tool_call_parser="hermes")
    with running_server(args, settings) as running, httpx.Client(base_url=running.url, timeout=300) as made:
        yield made


def make_tokenizer_add_a_token(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def name_fim_tokens(path: Path) -> None:
    """The last three tokens, which no merge makes longer, get the names of Qwen's tokens for filling in the middle."""
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    del model["merges"][-3:]
    for piece in sorted(model["vocab"], key=model["vocab"].get)[-3:]:
        del model["vocab"][piece]
    for name in ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"):
        model["vocab"][name] = len(model["vocab"])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": model["vocab"][name], "content": name, "special": True, **flags})
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_suffix_asks_for_the_middle(client: httpx.Client) -> None:
    asked = {"prompt": ["7 + 5", ""], "suffix": "= 12", "max_tokens": 3, "echo": True, "return_token_ids": True}
    first, second = client.post(TEXT, json=asked).json()["choices"]
    assert first["text"].startswith("7 + 5")
    ids = {text: client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("7 + 5", "= 12")}
    bos, *prefix = ids["7 + 5"]
    assert first["prompt_token_ids"] == [bos, 1533, *prefix, 1534, *ids["= 12"][1:], 1535]
    assert second["prompt_token_ids"] == [bos, 1533, 1534, *ids["= 12"][1:], 1535]


def outcome(client: httpx.Client, path: str, body: dict[str, Any]) -> object:
    """What the client sees, without what differs from request to request."""
    asked: dict[str, Any] = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
    response = client.post(path, json={**asked, **BASE, **body})
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        events = response.text.split("\n\n")
        return (
            "stream",
            *(sum(member in event for event in events) for member in ('"choices":[]', '"timings"')),
            ('"prompt_progress"' in response.text),
        )
    answer = response.json()
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    del answer["id"], answer["created"], answer["usage"]["prompt_tokens_details"]
    return answer


def test_variables_of_the_template_that_the_operator_sets() -> None:
    args = demo_args(chat_template=TEMPLATE, override_generation_config={"max_new_tokens": 1})
    settings = ServerSettings(default_chat_template_kwargs={"mood": "sad"})
    with running_server(args, settings) as running, httpx.Client(base_url=running.url, timeout=300) as client:

        def tokens(**more: Any) -> Any:
            return client.post("/tokenize", json={"messages": ASKED, **more}).json()["tokens"]

        assert tokens() == tokens(chat_template_kwargs={"mood": "sad"}) != tokens(chat_template_kwargs={"mood": "glad"})
        assert client.post(CHAT, json={"messages": ASKED}).json()["usage"]["completion_tokens"] == 1


def test_every_field_has_a_case() -> None:
    for path, model in MODELS.items():
        known = set(model.model_fields)
        cases = {*COMMON, *OWN[path], *(SHOWN_BELOW & known)}
        assert cases <= known, f"{model.__name__} has no field {cases - known}: remove the cases in this file"
        with_effect = {name for name in known if effect(model, name) is None}
        assert not (lost := with_effect - cases), (
            f"{model.__name__} has fields without a case: {lost}. Add to COMMON or OWN[{path!r}] of this file what is sent "
            "beside the field, and a value that changes the answer. If the field changes nothing, make it with `no_effect` or "
            "`neutral` (inflight/entrypoints/fields/strict_model.py)"
        )
        assert not (marked := cases - with_effect), f"{marked} have no effect, says the document: remove the cases"
        assert all(model.model_fields[name].description for name in known), "a field needs a description"


@pytest.mark.parametrize(("path", "name", "beside", "value"), CASES, ids=[f"{c[0][4:8]}-{c[1]}" for c in CASES])
def test_a_field_changes_the_outcome(
    client: httpx.Client, path: str, name: str, beside: dict[str, Any], value: object
) -> None:
    without = outcome(client, path, beside)
    assert outcome(client, path, {**beside, name: value}) != without
    if name not in ("seed", "temperature"):  # and it is the field: the same again is the same
        assert outcome(client, path, beside) == without


@pytest.mark.parametrize("path", list(MODELS))
def test_a_field_without_effect_has_none(client: httpx.Client, path: str) -> None:
    model = MODELS[path]
    names = [name for name in model.model_fields if effect(model, name) is not None]
    assert set(names) >= {"user", "service_tier"}
    without = outcome(client, path, {})
    assert outcome(client, path, {name: NONE.get(name) for name in names}) == without


@pytest.mark.parametrize("path", list(MODELS))
def test_a_salt_separates_prefix_caches(client: httpx.Client, path: str) -> None:
    words = " ".join(f"{path} {number}" for number in range(60))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}

    def cached(salt: str) -> int:
        response = client.post(path, json={**asked, "max_tokens": 1, "cache_salt": salt})
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert cached("a") == 0
    assert cached("a") > 0
    assert cached("b") == 0


def test_a_priority_is_taken(client: httpx.Client) -> None:
    """The order itself is the scheduler's, and tested there; one that does not serve priorities refuses them."""
    with running_server() as plain, httpx.Client(base_url=plain.url, timeout=300) as other:
        for path in MODELS:
            outcome(client, path, {"priority": -3})
            asked: dict[str, Any] = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
            assert "priority" in other.post(path, json={**asked, "priority": -3}).json()["error"]["message"]


def test_usage_can_be_forced() -> None:
    """Whoever bills by usage wants it of every stream."""
    settings = ServerSettings(enable_force_include_usage=True)
    with running_server(settings=settings) as server, httpx.Client(base_url=server.url, timeout=300) as other:
        for path in MODELS:
            asked: dict[str, Any] = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
            for options in ({}, {"stream_options": {"include_usage": False}}):
                text = other.post(path, json={**asked, "max_tokens": 3, "stream": True, **options}).text
                *_, last, done = (
                    event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data")
                )
                assert done == "[DONE]"
                assert json.loads(last)["choices"] == [] and json.loads(last)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", list(MODELS))
def test_the_body_s_request_id(client: httpx.Client, path: str) -> None:
    asked: dict[str, Any] = {"messages": ASKED} if path == CHAT else {"prompt": PROMPT}
    asked |= {"max_tokens": 1, "request_id": "mine-1"}
    response = client.post(path, json=asked)
    assert response.json()["id"].endswith("-mine-1")
    assert response.headers["x-request-id"] == "mine-1"
    response = client.post(path, json=asked, headers={"X-Request-Id": "header-2"})
    assert response.json()["id"].endswith("-header-2")
    assert response.headers["x-request-id"] == "header-2"
    for wrong in ("", "a b", "x" * 129, "é", 5):
        response = client.post(path, json={**asked, "request_id": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "request_id"


# -- docs/server-api.md ------------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "server-api.md"
_EFFECTS = {None: "", "none": "no effect: ", "neutral": "neutral value only: "}


def field_rows() -> list[str]:
    """Both endpoints in one table."""
    rows: dict[tuple[str, str], list[str]] = {}
    for endpoint, model in (("chat", ChatCompletionRequest), ("completions", CompletionRequest)):
        for name, field in model.model_fields.items():
            row = (name, _EFFECTS[effect(model, name)] + str(field.description))
            rows.setdefault(row, []).append(endpoint)
    return [f"| `{name}` | {', '.join(where)} | {text} |" for (name, text), where in sorted(rows.items())]


def test_the_document_lists_every_field() -> None:
    assert not (problems := row_problems(DOCUMENT, ["| field | of | |", "|---|---|---|"], field_rows())), problems
