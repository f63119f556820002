"""Turns the messages of a chat into the token ids of a prompt, off the event loop."""

from typing import Any

from inflight.entrypoints.http.chat_request import ChatPrompt
from inflight.entrypoints.http.server import ApiServer
from inflight.errors import InvalidRequestError


async def render_messages(server: ApiServer, prompt: ChatPrompt, *, behind: bool = False) -> list[int]:
    """Returns the prompt's token ids. `behind`: it may wait for the prompts of requests.

    Raises:
        InvalidRequestError: the template refuses the messages, or the engine has no tokenizer.
    """
    engine = server.engine
    template = server.engine.chat_template
    if template is None:
        raise InvalidRequestError(
            "messages need a tokenizer, but the engine runs without one: send a prompt of token ids to /v1/completions"
        )
    opens = prompt.add_generation_prompt
    arguments: dict[str, Any] = {  # Any: JSON
        "tools": prompt.tools or None,
        "documents": prompt.documents,
        "add_generation_prompt": not prompt.continue_final_message if opens is None else opens,
        "continue_final_message": prompt.continue_final_message,
        "chat_template_kwargs": {**(server.settings.default_chat_template_kwargs or {}), **prompt.variables},
    }

    def render() -> str:
        return template.render(prompt.messages, **arguments)

    text = await engine.render(render)
    return await engine.encode(text, add_special_tokens=prompt.add_special_tokens, behind=behind)


def truncated(token_ids: list[int], wanted: int | None, max_model_len: int) -> list[int]:
    """Returns the part of a prompt that `truncate_prompt_tokens` keeps, which is its end.

    Raises:
        InvalidRequestError: nothing would be left.
    """
    if wanted is None:
        return token_ids
    if wanted == 0:
        raise InvalidRequestError("truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1")
    return token_ids[-(max_model_len - 1 if wanted == -1 else wanted) :]
