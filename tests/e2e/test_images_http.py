"""Images over HTTP: the four APIs give the same image to the model, and answers, counts and errors say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from inflight import LLM, SamplingParams
from inflight.engine.request.prompt import TextPrompt
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import InvalidRequestError
from tests.e2e.openai_server import MODEL, demo_args, running_server
from tests.support.served_image_model import IMAGE, base64_of, data_url, picture, png, write_served_image_model

KEY, OTHER_KEY = "the-key-of-these-tests", "another-client"
SETTINGS = ServerSettings(
    served_model_names=(MODEL,), access_log="off", stream_keep_alive_interval=None, api_keys=(KEY, OTHER_KEY)
)
NUM_TOKENS = 8
QUESTION = "What is it?"
FIRST, SECOND = picture(1), picture(2, 30, 60)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
# a file that ends in the middle of the image
CUT = base64_of(FIRST)[:400]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_image_model(tmp_path_factory.mktemp("model") / "images")


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    with (
        running_server(
            demo_args(model=str(folder), max_model_len=1024, limit_mm_per_prompt={"image": 45}), SETTINGS
        ) as running,
        httpx.Client(base_url=running.url, timeout=300, headers={"x-api-key": KEY}) as client,
    ):
        yield client


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(http: httpx.Client, *messages: dict[str, Any], **more: Any) -> tuple[str, int]:
    """The text, and how many tokens the prompt has."""
    answer = post(http, CHAT, {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **more})
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def responses(http: httpx.Client, *items: dict[str, Any]) -> tuple[str, int]:
    answer = post(http, RESPONSES, {"input": items, "max_output_tokens": NUM_TOKENS, "temperature": 0})
    return answer["output"][-1]["content"][0]["text"], answer["usage"]["input_tokens"]


def messages(http: httpx.Client, *given: dict[str, Any]) -> tuple[str, int]:
    answer = post(http, MESSAGES, {"messages": given, "max_tokens": NUM_TOKENS, "temperature": 0})
    usage = answer["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    return answer["content"][0]["text"], usage["input_tokens"] + cached


def ollama(http: httpx.Client, *given: dict[str, Any]) -> tuple[str, int]:
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    answer = post(http, "/api/chat", {"messages": given, "stream": False, "options": options})
    return answer["message"]["content"], answer["prompt_eval_count"]


def text(given: str) -> dict[str, str]:
    return {"type": "text", "text": given}


def image_url(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def block(image: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(image)}}


def test_each_api_gives_the_model_the_same_prompt(http: httpx.Client) -> None:
    asked = chat(http, {"role": "user", "content": [image_url(FIRST), text(QUESTION)]})
    assert asked[1] > len(QUESTION) + 50, "the image has tokens"
    parts = [{"type": "input_image", "image_url": data_url(FIRST)}, {"type": "input_text", "text": QUESTION}]
    assert responses(http, {"role": "user", "content": parts}) == asked
    assert messages(http, {"role": "user", "content": [block(FIRST), text(QUESTION)]}) == asked
    assert ollama(http, {"role": "user", "content": QUESTION, "images": [base64_of(FIRST)]}) == asked
    generated = post(
        http,
        "/api/generate",
        {
            "prompt": QUESTION,
            "images": [base64_of(FIRST)],
            "stream": False,
            "options": {"temperature": 0, "num_predict": NUM_TOKENS},
        },
    )
    assert (generated["response"], generated["prompt_eval_count"]) == asked
    other = chat(http, {"role": "user", "content": [image_url(SECOND), text(QUESTION)]})
    assert other != asked, "another image"


def test_python_gives_the_same_answer(http: httpx.Client, folder: Path, tmp_path: Path) -> None:
    asked = chat(
        http, {"role": "user", "content": [text("First:"), image_url(FIRST), text("Second:"), image_url(SECOND)]}
    )
    path = tmp_path / "second.png"
    path.write_bytes(png(SECOND))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with LLM(str(folder), max_model_len=1024, dtype="float32", num_threads=1) as llm:
        for first, second in (
            ({"type": "image_pil", "image_pil": FIRST}, {"type": "image", "image": path}),
            (image_url(FIRST), {"type": "image", "image": png(SECOND)}),
        ):
            content = [text("First:"), first, text("Second:"), second]
            [output] = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
            assert (output.outputs[0].text, len(output.prompt_token_ids)) == asked
        prompt = f"<|im_start|>User: First:{IMAGE}Second:{IMAGE}<end_of_utterance>\nAssistant:"
        given: TextPrompt = {"prompt": prompt, "multi_modal_data": {"image": [FIRST, SECOND]}}
        [output] = llm.generate([given], params, use_tqdm=False)
        assert output.outputs[0].text == asked[0]
        wrong = [{"role": "user", "content": [text("a"), {"type": "image", "image": png(FIRST)[:99]}]}]
        for several, begin in ((wrong, ""), ([wrong, wrong], "messages[0]: ")):
            with pytest.raises(InvalidRequestError) as error:
                llm.chat(several, params, use_tqdm=False)
            assert error.value.param == "messages[0]['content'][1]"
            assert str(error.value).startswith(f"{begin}{error.value.param}: ")


def test_counts_are_those_of_usage(http: httpx.Client) -> None:
    content = [image_url(FIRST), text(QUESTION), image_url(SECOND)]
    _, asked = chat(http, {"role": "user", "content": content})
    assert post(http, "/tokenize", {"messages": [{"role": "user", "content": content}]})["count"] == asked
    blocks = [block(FIRST), text(QUESTION), block(SECOND)]
    counted = post(http, f"{MESSAGES}/count_tokens", {"messages": [{"role": "user", "content": blocks}]})
    assert counted["input_tokens"] == asked
    assert messages(http, {"role": "user", "content": blocks})[1] == asked


def test_results_of_tools_have_images(http: httpx.Client) -> None:
    """As text this template writes the result "Tool: ", whatever the API."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = chat(
        http,
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [image_url(FIRST)]},
    )
    assert asked[1] > 60
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    assert asked == messages(
        http,
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [block(FIRST)]}]},
    )
    assert asked == responses(
        http,
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": data_url(FIRST)}],
        },
    )


def test_an_image_is_named_by_its_uuid(http: httpx.Client) -> None:
    named = {**image_url(FIRST), "uuid": "the first"}
    asked = chat(http, {"role": "user", "content": [named, text(QUESTION)]})
    again = {"type": "image_url", "image_url": None, "uuid": "the first"}
    assert chat(http, {"role": "user", "content": [again, text(QUESTION)]}) == asked
    refused(http, CHAT, [{**again, "uuid": "never sent"}], "messages[0].content[0].uuid")


def test_a_uuid_is_valid_for_the_client_that_has_sent_it(http: httpx.Client) -> None:
    again = {"type": "image_url", "image_url": None, "uuid": "a secret"}

    def ask(image: dict[str, Any], key: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": [image, text(QUESTION)]}], "max_tokens": 4, "temperature": 0}
        return http.post(CHAT, json=body, headers={"x-api-key": key})

    first = ask({**image_url(FIRST), "uuid": "a secret"}, KEY).json()["choices"][0]["message"]
    assert ask(again, OTHER_KEY).status_code == 400
    second = ask({**image_url(SECOND), "uuid": "a secret"}, OTHER_KEY).json()["choices"][0]["message"]
    assert first != second
    assert [ask(again, key).json()["choices"][0]["message"] for key in (KEY, OTHER_KEY)] == [first, second]


def test_a_request_cannot_ask_for_larger_images_than_the_server(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": [image_url(FIRST), text(QUESTION)]}], "max_tokens": 2}
    answer = http.post(CHAT, json={**body, "mm_processor_kwargs": {"size": {"longest_edge": 10**9}}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mm_processor_kwargs"), answer.text


def test_a_stream(http: httpx.Client) -> None:
    content: Any = [image_url(FIRST), text(QUESTION)]
    asked, num_tokens = chat(http, {"role": "user", "content": content})
    with OpenAI(base_url=f"{http.base_url}/v1", api_key=KEY, max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *parts, last = list(chunks)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == asked
    assert last.usage is not None and last.usage.prompt_tokens == num_tokens


def refused(http: httpx.Client, path: str, content: list[dict[str, Any]], param: str) -> str:
    answer = http.post(path, json={"messages": [{"role": "user", "content": content}], "max_tokens": 2})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,aGVsbG8=", "not an image"),
        (f"data:image/png;base64,{CUT}", ""),
        ("data:image/png;base64,?", ""),
        ("data:,", ""),
        ("https://example.com/a.png", "allowed-media-domains"),
        ("http://127.0.0.1/a.png", ""),
        ("file:///etc/passwd", "allowed-local-media-path"),
        ("/etc/passwd", "URL"),
        ("ftp://example.com/a.png", "URL"),
    ],
)
def test_what_is_no_image(http: httpx.Client, url: str, words: str) -> None:
    given = {"type": "image_url", "image_url": {"url": url}}
    message = refused(http, CHAT, [image_url(FIRST), given], "messages[0].content[1].image_url.url")
    assert words in message


def test_what_else_is_refused(http: httpx.Client) -> None:
    refused(http, CHAT, [image_url(FIRST), text(f"a {IMAGE}")], "messages[0].content[1].text")
    refused(http, CHAT, [image_url(FIRST), {"type": "input_audio", "input_audio": {}}], "messages[0].content[1].type")
    refused(http, CHAT, [image_url(picture(0))] * 40, "messages")  # longer than the context
    assert "45" in refused(http, CHAT, [image_url(picture(0))] * 46, "messages")
    unknown = http.post(
        CHAT,
        json={"messages": [{"role": "user", "content": [image_url(FIRST)]}], "mm_processor_kwargs": {"no_such": 1}},
    )
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "mm_processor_kwargs")
    answer = http.post("/v1/completions", json={"prompt": f"a {IMAGE}", "max_tokens": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def body_of(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}], "max_tokens": 2, **more}


def said(*given: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": [*given]}], **more}


def shown(*images: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", "images": [*images]}], **more}


WRITTEN = f"a {IMAGE}"  # is refused, because it would be taken for an image
STORED = {"type": "image", "source": {"type": "file", "file_id": "f"}}
CUT_URL = f"data:image/png;base64,{CUT}"
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [text(WRITTEN)]}


@pytest.mark.parametrize(
    ("path", "body", "place", "words"),
    [
        (CHAT, {"messages": [{"role": "system", "content": WRITTEN}]}, "messages[0].content", "stands for an image"),
        (CHAT, body_of({**image_url(FIRST), "uuid": "x" * 257}), "messages[0].content[0].uuid", "256"),
        (CHAT, body_of({**image_url(FIRST), "uuid": 5}), "messages[0].content[0].uuid", "string"),
        (CHAT, body_of({**image_url(FIRST), "uuid": ""}), "messages[0].content[0].uuid", "1 character"),
        (CHAT, body_of({"type": "image", "image": data_url(FIRST)}), "messages[0].content[0].type", "image_url"),
        (CHAT, body_of({"type": "computer_screenshot"}), "messages[0].content[0].type", "image_url"),
        (CHAT, body_of({"type": "video_url", "video_url": {}}), "messages[0].content[0].type", "no audio, video"),
        (CHAT, body_of(image_url(FIRST), mm_processor_kwargs=5), "mm_processor_kwargs", ""),
        (RESPONSES, {"instructions": WRITTEN, "input": "a"}, "instructions", "stands for an image"),
        (RESPONSES, {"instructions": "a", "input": WRITTEN}, "input", "stands for an image"),
        (RESPONSES, said({"type": "input_text", "text": WRITTEN}, instructions="a"), "input[1]", "stands for an image"),
        (RESPONSES, said({"type": "input_image", "image_url": CUT_URL}), "input[1].content[0].image_url", ""),
        (RESPONSES, said({"type": "input_image", "file_id": "f"}), "input[1].content[0]", "no files"),
        (RESPONSES, said({"type": "input_image", "uuid": 5}), "input[1].content[0].uuid", "string"),
        (RESPONSES, said({"type": "input_image", "uuid": "never"}), "input[1].content[0].uuid", "cached"),
        (RESPONSES, said({"type": "input_file", "file_id": "f"}), "input[1].content[0].type", "no audio, video"),
        (MESSAGES, body_of(text("a"), system=WRITTEN), "system", "stands for an image"),
        (MESSAGES, body_of(text(WRITTEN), system="a"), "messages[0]", "stands for an image"),
        (
            MESSAGES,
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [text("b"), USE]},
                    {"role": "user", "content": [RESULT, text("c")]},
                ],
                "max_tokens": 2,
                "system": "s",
            },
            "messages[2]",
            "stands for an image",
        ),
        (MESSAGES, body_of(text("a"), system=[block(FIRST)]), "system[0].type", "system text takes no images"),
        (MESSAGES, body_of(STORED), "messages[0].content[0].type", "base64 or url"),
        (
            MESSAGES,
            body_of({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CUT}}),
            "messages[0].content[0].source.data",
            "",
        ),
        ("/api/chat", shown(CUT), "messages[0].images[0]", ""),
        ("/api/chat", {"messages": [{"role": "user", "content": WRITTEN}]}, "messages[0]", "stands for an image"),
        ("/api/generate", {"prompt": "a", "system": WRITTEN}, "system", "stands for an image"),
        ("/api/generate", {"prompt": WRITTEN, "system": "a"}, "prompt", "stands for an image"),
        ("/api/generate", {"prompt": "a", "images": [base64_of(FIRST), CUT]}, "images[1]", ""),
        ("/api/generate", {"prompt": "a", "images": ["data:,"]}, "images[0]", "base64"),
    ],
)
def test_an_error_names_the_field_of_its_api(
    http: httpx.Client, path: str, body: dict[str, Any], place: str, words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(place) and not message.startswith((f"{place}[", f"{place}.")), message
    assert words in message
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == place


def test_the_descriptions_of_the_model(http: httpx.Client) -> None:
    assert "vision" in post(http, "/api/show", {"model": MODEL})["capabilities"]
    model = http.get("/v1/models").json()["data"][0]
    assert model["input_modalities"] == ["text", "image"]


def test_a_model_for_text_takes_no_images() -> None:
    with running_server() as running, httpx.Client(base_url=running.url, timeout=300) as http:
        assert "this model takes no images" in refused(http, CHAT, [image_url(FIRST)], "messages[0].content[0].type")
        assert "vision" not in post(http, "/api/show", {"model": MODEL})["capabilities"]
        assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text"]
