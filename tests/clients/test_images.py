"""Images, with the SDKs of OpenAI, Anthropic and Ollama, and LangChain: each sends the same prompt to a small model with random
weights, so each gets the same answer."""

from __future__ import annotations

from typing import Any

import anthropic
import ollama
import openai
import pytest
from conversations import user
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pictures import QUESTION, base64_of, data_url, png

FIRST, SECOND = png(1), png(2, 30, 60)
MODEL = "images"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def client(images_url: str, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{images_url}/v1", api_key=api_key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def anthropics(images_url: str, api_key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=images_url, api_key=api_key, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def wanted(client: openai.OpenAI) -> tuple[str, int]:
    """The answer, and how many tokens the prompt has."""
    return ask(client, FIRST)


def ask(client: openai.OpenAI, *images: bytes, text: str = QUESTION) -> tuple[str, int]:
    content: Any = [{"type": "image_url", "image_url": {"url": data_url(each), "detail": "low"}} for each in images]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        max_tokens=NUM_TOKENS,
        temperature=0,
    )
    assert answer.choices[0].message.content is not None and answer.usage is not None
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_two_images(client: openai.OpenAI, wanted: tuple[str, int]) -> None:
    assert ask(client, SECOND)[0] != wanted[0]
    assert ask(client, FIRST, SECOND)[1] > wanted[1]


def test_the_responses_api(client: openai.OpenAI, wanted: tuple[str, int]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=NUM_TOKENS, temperature=0
    )
    assert answer.usage is not None
    assert (answer.output_text, answer.usage.input_tokens) == wanted


def test_anthropics_sdk(anthropics: anthropic.Anthropic, wanted: tuple[str, int]) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FIRST)}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
    greedy: Any = {"extra_body": {"temperature": 0}}
    answer: Any = anthropics.messages.create(model="any", messages=messages, max_tokens=NUM_TOKENS, **greedy)
    assert answer.content[0].text == wanted[0]
    counted = anthropics.messages.count_tokens(model="any", messages=messages)
    assert counted.input_tokens == wanted[1]


def test_ollamas_sdk(images_url: str, api_key: str, wanted: tuple[str, int]) -> None:
    client = ollama.Client(host=images_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=120)
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    # the SDK makes base64 of the bytes
    chat = client.chat(MODEL, messages=[{**user(QUESTION), "images": [FIRST]}], options=options)
    assert (chat.message.content, chat.prompt_eval_count) == wanted
    text = client.generate(MODEL, QUESTION, images=[FIRST], options=options)
    assert (text.response, text.prompt_eval_count) == wanted
    assert "vision" in (client.show(MODEL).capabilities or [])


def test_langchain(images_url: str, api_key: str, wanted: tuple[str, int]) -> None:
    model: Any = ChatOpenAI(
        base_url=f"{images_url}/v1", api_key=api_key, model=MODEL, max_tokens=NUM_TOKENS, temperature=0, max_retries=0
    )
    text = {"type": "text", "text": QUESTION}
    for image in (
        {"type": "image_url", "image_url": {"url": data_url(FIRST)}},
        {"type": "image", "base64": base64_of(FIRST), "mime_type": "image/png"},  # LangChain's own form
    ):
        answer = model.invoke([HumanMessage(content=[image, text])])
        assert (answer.content, answer.usage_metadata["input_tokens"]) == wanted


def test_errors(client: openai.OpenAI, anthropics: anthropic.Anthropic) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, b"no image")
    assert raised.value.param == "messages[0].content[0].image_url.url"
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source.url"):
        anthropics.messages.create(model="any", messages=[{"role": "user", "content": [image]}], max_tokens=5)
