"""Images, with LiteLLM and LlamaIndex."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from pictures import QUESTION, data_url, png

IMAGE = png(1)
MODEL = "images"


@pytest.fixture(scope="module")
def answers(images_url: str, api_key: str) -> list[str]:
    """Of LiteLLM with OpenAI's and with vLLM's API."""
    content = [{"type": "image_url", "image_url": {"url": data_url(IMAGE), "format": "image/png"}}]
    content.append({"type": "text", "text": QUESTION})
    found = []
    for provider in ("openai", "hosted_vllm"):
        answer: Any = litellm.completion(
            model=f"{provider}/{MODEL}",
            messages=[{"role": "user", "content": content}],
            api_base=f"{images_url}/v1",
            api_key=api_key,
            temperature=0,
            max_tokens=8,
            max_retries=0,
            timeout=120,
        )
        found.append(answer.choices[0].message.content)
        assert answer.usage.prompt_tokens > 60
    return found


def test_litellm(answers: list[str]) -> None:
    assert answers[0] and answers[0] == answers[1]


def test_llama_index(images_url: str, api_key: str, answers: list[str]) -> None:
    model = OpenAILike(
        model=MODEL,
        api_base=f"{images_url}/v1",
        api_key=api_key,
        is_chat_model=True,
        temperature=0,
        max_tokens=8,
        max_retries=0,
        timeout=120,
    )
    blocks = [ImageBlock(image=IMAGE, image_mimetype="image/png"), TextBlock(text=QUESTION)]
    assert model.chat([ChatMessage(role="user", blocks=blocks)]).message.content == answers[0]
