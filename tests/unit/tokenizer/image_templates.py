"""Small chat templates that write images as those of real models do, and conversations with images for them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]  # Any: JSON

CALLS = "{% for c in m.tool_calls or [] %}[call {{ c.function.arguments.text }}]{% endfor %}"
# as SmolVLM's and Idefics 3's: they read lists only, in each role
LISTS_ONLY = (
    "<s>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# as Qwen3-VL's and Qwen3.5's: a system message may have no images, results may
_BODY = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'image' or 'image' in p or 'image_url' in p %}"
    "{% if m.role == 'system' %}{{ raise_exception('no images') }}{% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
ALL_BUT_SYSTEM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n" + _BODY + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Gemma's: the system message is a part of the question, roles alternate, there are no calls, and texts are trimmed
TWO_ROLES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% elif p.type == 'text' %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
)
# as Gemma 4's: of results, only the texts are written
NO_IMAGES_IN_RESULTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' and m.role == 'user' %}<|image|>{% endif %}{% endfor %}"
    "{% endif %}" + CALLS + "{% endfor %}"
)
# as LLaVA's: all images of a message come before its texts
IMAGES_FIRST = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }} {% endfor %}{% endif %}" + CALLS + "{% endfor %}"
)
# as Pixtral's and Ministral's: another name of the type
IMAGE_URL = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image_url' %}[IMG]{% else %}{{ raise_exception('type') }}"
    "{% endif %}{% endfor %}{% endif %}" + CALLS + "{% endfor %}"
)
TEXT_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}" + CALLS + "{% endfor %}"
AS_JSON = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"
)

# name -> source, the text of an image, the token of the model
TEMPLATES = {
    "lists only": (LISTS_ONLY, "<image>", "<image>"),
    "all but system": (ALL_BUT_SYSTEM, "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"),
    "two roles": (TWO_ROLES, "<start_of_image>", "<image_soft_token>"),
    "no images in results": (NO_IMAGES_IN_RESULTS, "<|image|>", "<|image|>"),
    "images first": (IMAGES_FIRST, "<image>", "<image>"),
    "image_url": (IMAGE_URL, "[IMG]", "[IMG]"),
    "text only": (TEXT_ONLY, "<|image_pad|>", "<|image_pad|>"),
    "as JSON": (AS_JSON, "<image>", "<image>"),
}


def conversations(seed: int, count: int) -> Iterator[list[Message]]:
    """Conversations with images at random places. Each text is a word like "Word7.", each call has the argument "Call7."."""
    draw = random.Random(seed)
    for _ in range(count):
        numbers, words = iter(range(1000)), iter(range(1000))

        def content(*, many: bool = True, numbers: Iterator[int] = numbers, words: Iterator[int] = words) -> Any:
            if not many or draw.random() < 0.3:
                return f"Word{next(words)}."
            kinds = draw.choices(["text", "image"], k=draw.randint(1, 4))
            return [
                {"type": "text", "text": f"Word{next(words)}."}
                if kind == "text"
                else {"type": "image", "number": next(numbers)}
                for kind in kinds
            ]

        messages: list[Message] = []
        if draw.random() < 0.4:
            messages.append({"role": "system", "content": content(many=draw.random() < 0.3)})
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": content()})
            if draw.random() < 0.2:  # clients may send two questions in a row
                messages.append({"role": "user", "content": content()})
            for k in range(draw.choice([0, 0, 1, 2])):
                call_id = f"call{len(messages):04}{k}"
                function = {"name": "look", "arguments": {"text": f"Call{next(words)}."}}
                call = {"id": call_id, "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content()})
            messages.append({"role": "assistant", "content": content(many=False)})
        if draw.random() < 0.7:
            messages.append({"role": "user", "content": content()})
        yield messages


def pieces_of(messages: list[Message]) -> list[str]:
    """The words and the numbers of the images, in their order."""
    found = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        found += [part["text"] if part["type"] == "text" else str(part["number"]) for part in parts]
        found += [call["function"]["arguments"]["text"] for call in message.get("tool_calls", ())]
    return found


def pieces_in(prompt: str, images: tuple[int, ...], image_text: str) -> list[str]:
    """The same of a prompt."""
    numbers = iter(images)
    pattern = re.compile(r"(?:Word|Call)\d+\." + (f"|{re.escape(image_text)}" if image_text else ""))
    return [str(next(numbers)) if piece == image_text else piece for piece in pattern.findall(prompt)]
