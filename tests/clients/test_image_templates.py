"""Conversations with images in the chat templates of real models: the prompt's tokens are those of transformers' processor.

The truth is `apply_chat_template` of the family's processor, with the same template, tokenizer and images. The conversations
are those that the template itself takes; `test_templates.py` has all others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer

from inflight.multimodal.expansion import expand_text
from inflight.multimodal.family_processor import FamilyProcessor
from inflight.multimodal.messages import Start
from inflight.tokenizer.chat_template import ChatTemplate
from tests.clients.real_templates import FOLDER, templates
from tests.support.image_models import drawing, processor_of_transformers, write_image_model

# template -> the family whose processor reads its prompts
READERS = {
    "qwen2_vl": "qwen2_5_vl",
    "Qwen3.5-4B": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "gemma3": "gemma3",
    "smolvlm2": "smolvlm",
}
TEMPLATES = {name: source for name, source in templates().items() if name in READERS}
IMAGES = [drawing(*size, seed) for seed, size in enumerate([(60, 40), (30, 90), (200, 100), (33, 33)])]
NUM_CONVERSATIONS = 150

pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason=f"no *.jinja in {FOLDER}: make test-clients reads them from packages"
)


def conversations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Conversations of a user and an assistant, with images among the texts of the user. All contents are lists of parts."""
    draw = random.Random(seed)
    words = "Look here. What is it?|A cat\nand a dog.|  spaces  |Ünïcödé 漢字|{{ not a variable }}|1 < 2".split("|")

    def texts(most: int) -> list[dict[str, Any]]:
        return [{"type": "text", "text": draw.choice(words)} for _ in range(draw.randint(1, most))]

    for _ in range(NUM_CONVERSATIONS):
        messages = [{"role": "system", "content": texts(1)}] if draw.random() < 0.4 else []
        for turn in range(draw.randint(1, 3)):
            if turn:
                messages.append({"role": "assistant", "content": texts(1)})
            parts = texts(3) + [
                {"type": "image", "image": draw.randrange(len(IMAGES))} for _ in range(draw.randint(0, 3))
            ]
            draw.shuffle(parts)
            messages.append({"role": "user", "content": parts})
        yield messages


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_the_processor(name: str, tmp_path: Path) -> None:
    family = write_image_model(tmp_path / "model", READERS[name])
    truth = processor_of_transformers(tmp_path / "model", family)
    truth.chat_template = TEMPLATES[name]
    own = FamilyProcessor(Start(folder=tmp_path / "model", tokenizer=tmp_path / "model"))
    processed = [own.process(image, {}) for image in IMAGES]
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    template = ChatTemplate({"default": TEMPLATES[name]}, image_token=family.image_token)
    num_compared = 0
    for messages in conversations(seed=0):
        given = [
            {**message, "content": [_for_transformers(part) for part in message["content"]]} for message in messages
        ]
        try:
            expected = truth.apply_chat_template(given, tokenize=True, return_dict=True, add_generation_prompt=True)
        except TemplateError:  # this template does not take it
            continue
        shown = [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
        numbers = iter(range(len(shown)))
        numbered = [
            {**message, "content": [_numbered(part, numbers) for part in message["content"]]} for message in messages
        ]
        rendered = template.render_chat(numbered)
        images = [processed[shown[number]] for number in rendered.images]
        text = expand_text(rendered.text, images) if images else rendered.text
        assert tokenizer.encode(text, add_special_tokens=False).ids == list(expected["input_ids"][0]), messages
        num_compared += bool(images)
    assert num_compared > NUM_CONVERSATIONS / 2


def _for_transformers(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "image": IMAGES[part["image"]]}


def _numbered(part: dict[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": "image", "number": next(numbers)}
