"""Images in the real chat templates of Gemma 3 and 4, over HTTP: a server of a small model with random weights answers with the
tokens of transformers, which renders the same template, reads the same images and computes the same weights."""

from __future__ import annotations

import copy
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from tests.clients.real_templates import FOLDER, templates
from tests.clients.run import KEY, server
from tests.support.image_models import (
    FAMILIES,
    ImageFamily,
    byte_tokenizer,
    drawing,
    processor_of_transformers,
    write_image_family,
)
from tests.support.served_image_model import data_url
from tests.support.vision_models import VISION_CONFIGS, reference_model, write_vision_model

# template -> the family of its model, and what makes its images small
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3", {"size": {"height": 36, "width": 36}, "image_seq_length": 9}),
    "google-gemma-4-31B-it": ("gemma4", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
    "gemma4": ("gemma4", {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}),
}
SOURCES = {name: source for name, source in templates().items() if name in MODELS}
FIRST, SECOND = drawing(60, 40, 1), drawing(30, 90, 2)
NUM_TOKENS = 8
Parts = list[str | Image.Image]
CONVERSATIONS: list[list[Parts]] = [
    [["What is it?", FIRST]],
    [["What is it?", SECOND]],
    [[FIRST, " and ", SECOND, " differ?"]],
    [[FIRST, "What is it?"], ["A cat."], ["And this?", SECOND]],
    [["Hello."]],
]

pytestmark = pytest.mark.skipif(
    not SOURCES, reason=f"no *.jinja in {FOLDER}: make test-clients reads them from packages"
)


class Served:
    def __init__(self, url: str, truth: Any, processor: Any) -> None:  # Any: of transformers
        self.url, self.truth, self.processor = url, truth, processor

    def answer(self, conversation: list[Parts]) -> tuple[list[int], list[int]]:
        """The tokens of the prompt and of the answer."""
        messages = messages_of(conversation, lambda image: {"type": "image_url", "image_url": {"url": data_url(image)}})
        body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        found = self.post("/v1/chat/completions", {**body, "return_token_ids": True})
        return found["prompt_token_ids"], found["choices"][0]["token_ids"]

    def count(self, conversation: list[Parts]) -> int:
        """How many tokens Anthropic's API counts."""

        def block(image: Image.Image) -> dict[str, Any]:
            data = data_url(image).partition(",")[2]
            return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

        found = self.post(
            "/v1/messages/count_tokens", {"model": "m", "max_tokens": 5, "messages": messages_of(conversation, block)}
        )
        counted: int = found["input_tokens"]
        return counted

    def expected(self, conversation: list[Parts]) -> tuple[list[int], list[int]]:
        messages = messages_of(conversation, lambda image: {"type": "image", "image": image})
        inputs = self.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            tokens = self.truth.generate(
                **inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        num_tokens = inputs["input_ids"].shape[1]
        return tokens[0, :num_tokens].tolist(), tokens[0, num_tokens:].tolist()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def messages_of(conversation: list[Parts], image_part: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": ("user", "assistant")[turn % 2],
            "content": [
                {"type": "text", "text": each} if isinstance(each, str) else image_part(each) for each in parts
            ],
        }
        for turn, parts in enumerate(conversation)
    ]


@pytest.fixture(scope="module", params=SOURCES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name, small = MODELS[request.param]
    family: ImageFamily = FAMILIES[name]
    family = family._replace(
        special_tokens=[*family.special_tokens, "<bos>"],
        image_processor={**family.image_processor, **small},
        processor_config={**family.processor_config, "image_seq_length": small.get("image_seq_length", 280)},
        tokenizer_config={**family.tokenizer_config, "bos_token": "<bos>"},
        config={},
    )
    config = copy.deepcopy(VISION_CONFIGS[name][0])
    tokenizer = byte_tokenizer(family.special_tokens)
    text = config.text_config
    text.vocab_size = text.vocab_size_per_layer_input = tokenizer.get_vocab_size()
    text.max_position_embeddings = 2048
    setattr(
        config, "image_token_index" if name == "gemma3" else "image_token_id", tokenizer.token_to_id(family.image_token)
    )
    if name == "gemma4":
        config.video_token_id = config.audio_token_id = tokenizer.token_to_id("<|audio|>")
    folder = tmp_path_factory.mktemp(name) / "model"
    write_vision_model(config, folder, seed=2)  # one that sees the difference of the images
    write_image_family(folder, family)
    (folder / "chat_template.jinja").write_text(SOURCES[request.param])
    processor = processor_of_transformers(folder, family)
    processor.chat_template = SOURCES[request.param]
    options = ["--dtype", "float32", "--max-model-len", "2048", "--served-model-name", "m"]
    with server(str(folder), *options) as url:
        yield Served(url, reference_model(folder), processor)


def test_prompts_and_answers_are_those_of_transformers(served: Served) -> None:
    answers = []
    for conversation in CONVERSATIONS:
        found = served.answer(conversation)
        assert found == served.expected(conversation)
        assert served.answer(conversation) == found  # from the caches
        assert served.count(conversation) == len(found[0])
        answers.append(found[1])
    assert answers[0] != answers[1], "the model does not see the image"
