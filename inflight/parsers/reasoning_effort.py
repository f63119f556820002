"""`writes_efforts`: whether a chat template tells the model how much to think."""

from collections.abc import Mapping
from typing import Any

from inflight.parsers.template_markup import render_or_nothing
from inflight.tokenizer.chat_template import ChatTemplate

_QUESTION = {"role": "user", "content": "?"}


def writes_efforts(template: ChatTemplate | None, default_kwargs: Mapping[str, Any] | None) -> bool:  # Any: JSON
    """Whether an effort changes what the chat template writes. `default_kwargs`: the server's variables of the template."""
    if template is None or template.default_source is None:
        return False
    prompts = {
        render_or_nothing(
            template,
            [_QUESTION],
            add_generation_prompt=True,
            variables={**(default_kwargs or {}), "reasoning_effort": effort},
        )
        for effort in ("low", "high")
    }
    return len(prompts) > 1
