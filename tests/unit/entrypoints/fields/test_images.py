"""Images in the bodies of the four APIs: each becomes a part with a number, and its source is kept with its place."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.entrypoints.anthropic.protocol import MessagesRequest
from inflight.entrypoints.anthropic.translation import read_messages
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.images import ImageSource
from inflight.entrypoints.http.chat_request import ChatPrompt
from inflight.entrypoints.ollama import protocol as ollama
from inflight.entrypoints.ollama.translation import read_chat as read_ollama
from inflight.entrypoints.ollama.translation import read_text
from inflight.entrypoints.openai.chat import read_chat
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.responses_api.conversation import _read_chat
from inflight.entrypoints.responses_api.kept import WholeInput
from inflight.entrypoints.responses_api.protocol import ResponsesRequest
from inflight.entrypoints.responses_api.tools import PromptTools
from tests.unit.entrypoints.openai.test_chat import server
from tests.unit.entrypoints.refusals import refused

URL = "data:image/png;base64,aGk="
WEB = "https://example.com/a.png"
SEES = server(takes_images=True)


def of_chat(*messages: dict[str, Any], here: Any = SEES) -> ChatPrompt:
    return read_chat(here, ChatCompletionRequest.model_validate({"messages": [*messages]})).prompt


def of_responses(*items: dict[str, Any], here: Any = SEES) -> ChatPrompt:
    asked = ResponsesRequest.model_validate({"input": [*items]})
    whole = WholeInput(earlier=(), own=asked.input)
    return _read_chat(here, asked, PromptTools((), enforces_patterns=False), whole).prompt


def of_anthropic(*messages: dict[str, Any], here: Any = SEES, **more: Any) -> ChatPrompt:
    return read_messages(
        here, MessagesRequest.model_validate({"messages": [*messages], "max_tokens": 5, **more})
    ).prompt


def of_ollama(*messages: dict[str, Any], here: Any = SEES) -> ChatPrompt:
    return read_ollama(here, ollama.ChatRequest.model_validate({"messages": [*messages]})).prompt


def text(given: str) -> dict[str, str]:
    return {"type": "text", "text": given}


def placed(number: int) -> dict[str, Any]:
    return {"type": "image", "number": number}


def source(url: str | None, where: str, uuid: str | None = None) -> ImageSource:
    return ImageSource(url=url, where=where, uuid=uuid)


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, source(URL, "messages[0].content[1].image_url.url")),
        (
            {"type": "image_url", "image_url": {"url": WEB, "detail": "high", "format": "image/png"}, "uuid": "u"},
            source(WEB, "messages[0].content[1].image_url.url", "u"),
        ),
        ({"type": "image_url", "image_url": WEB}, source(WEB, "messages[0].content[1].image_url")),
        ({"type": "input_image", "image_url": WEB}, source(WEB, "messages[0].content[1].image_url")),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, source(None, "messages[0].content[1].uuid", "u")),
        ({"type": "image_url", "uuid": "u"}, source(None, "messages[0].content[1].uuid", "u")),
    ],
)
def test_the_forms_of_a_part_of_a_chat(part: dict[str, Any], wanted: ImageSource) -> None:
    prompt = of_chat({"role": "user", "content": [text("Look:"), part, text("?")]})
    assert prompt.messages == [{"role": "user", "content": [text("Look:"), placed(0), text("?")]}]
    assert prompt.images == [wanted]


def test_images_of_all_messages_of_a_chat_are_kept() -> None:
    part = {"type": "image_url", "image_url": {"url": URL}}
    prompt = of_chat(
        {"role": "system", "content": [part]},
        {"role": "user", "content": [part, text("a"), part]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [text("b"), part]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    )
    assert [message.get("content") for message in prompt.messages] == [
        [placed(0)],
        [placed(1), text("a"), placed(2)],
        None,
        [text("b"), placed(3)],
        "c",
        "d",
    ]
    assert [each.where for each in prompt.images] == [
        f"messages[{place}].image_url.url" for place in ("0].content[0", "1].content[0", "1].content[2", "3].content[1")
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": 5},
        {"type": "input_image", "file_id": "file-1"},
    ],
)
def test_a_part_without_an_image_is_refused_or_a_text(part: dict[str, Any]) -> None:
    question = {"role": "user", "content": [part]}
    with refused("messages[0].content[0]"):
        of_chat(question)
    prompt = of_chat(question, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
    assert prompt.messages[0]["content"] == [text("[image: left out, because this model cannot read it]")]
    assert not prompt.images
    with refused("messages[0].content[0].type"):
        of_chat(question, here=server())


def test_other_media_are_refused_by_a_model_that_takes_images() -> None:
    for kind in ("input_audio", "video_url", "file"):
        with refused("messages[0].content[0].type"):
            of_chat({"role": "user", "content": [{"type": kind, kind: {}}]})


def test_the_responses_api() -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "high"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    prompt = of_responses(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": [image]},
        image,
    )
    assert [message.get("content") for message in prompt.messages] == [
        [text("a"), placed(0)],
        None,
        [placed(1)],
        [placed(2)],
    ]
    assert [(each.url, each.where) for each in prompt.images] == [
        (URL, "input[0].content[1].image_url"),
        (URL, "input[2].output[0].image_url"),
        (URL, "input[3].content[0].image_url"),
    ]
    with refused("input[0].content[0]"):
        of_responses({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]})


def test_anthropics_api() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    web = {"type": "image", "source": {"type": "url", "url": WEB}, "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [image, text("b"), text("c")]}
    document = {"type": "document", "source": {"type": "content", "content": [text("d"), web]}, "title": "T"}
    prompt = of_anthropic(
        {"role": "user", "content": [image, text("a")]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, document, text("e")]},
        system=[text("s")],
    )
    assert [message.get("content") for message in prompt.messages] == [
        "s",
        [placed(0), text("a")],
        None,
        [text("Error: "), placed(1), text("b\nc")],
        [text("T\nd"), placed(2), text("e")],
    ]
    assert [(each.url, each.where) for each in prompt.images] == [
        (URL, "messages[0].content[0].source.data"),
        (URL, "messages[2].content[0].content[0].source.data"),
        (WEB, "messages[2].content[1].source.content[1].source.url"),
    ]


def test_what_anthropics_api_refuses() -> None:
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    with refused("messages[0].content[0].type"):
        of_anthropic({"role": "user", "content": [stored]})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with refused("system[0].type"):
        of_anthropic({"role": "user", "content": "a"}, system=[image])
    with refused("messages[0].content[0].type"):
        of_anthropic({"role": "user", "content": [image]}, here=server())


def test_ollamas_api() -> None:
    prompt = of_ollama(
        {"role": "user", "content": "a", "images": ["aG\r\nk=\n", URL]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "", "tool_name": "look", "images": ["aGk="]},
    )
    assert [message["content"] for message in prompt.messages] == [[placed(0), placed(1), text("a")], "", [placed(2)]]
    assert [(each.url, each.where) for each in prompt.images] == [
        ("data:;base64,aGk=", "messages[0].images[0]"),
        (URL, "messages[0].images[1]"),
        ("data:;base64,aGk=", "messages[2].images[0]"),
    ]


def test_a_prompt_of_ollamas_api() -> None:
    body = ollama.GenerateRequest(prompt="a", system="s", images=["aGk="])
    prompt = read_ollama(SEES, body).prompt
    assert [message["content"] for message in prompt.messages] == ["s", [placed(0), text("a")]]
    assert prompt.images == [source("data:;base64,aGk=", "images[0]")]
    for here in (SEES, server()):
        with pytest.raises(FieldError) as raised:
            read_text(here, ollama.GenerateRequest(prompt="a", raw=True, images=["aGk="]))
        assert raised.value.param == "images"
