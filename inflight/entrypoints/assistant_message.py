"""Makes the assistant's message from a completion of `LLM.chat`: content, reasoning and tool calls, in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.entrypoints.written_answer import REASONING_FIELDS, written_answer
from inflight.outputs import CompletionOutput
from inflight.parsers.reasoning import Opening, find_opening
from inflight.parsers.selector import DetectedParsers, create_output_parser, reasoning_markup
from inflight.tokenizer.tokenizer import Tokenizer

_PROMPT_END = 16  # tokens at the end of the prompt: the template may open or close the reasoning there


def assistant_message(
    completion: CompletionOutput,
    prompt_token_ids: Sequence[int],
    tokenizer: Tokenizer,
    parsers: DetectedParsers,
    tools: Sequence[Mapping[str, Any]] | None,  # Any: JSON
    reasoning_field: str = "reasoning_content",
) -> dict[str, Any]:  # Any: JSON
    """Returns {"role": "assistant", "content": ...}, with the reasoning and "tool_calls" if the text has some. The message
    can be put behind the messages of the chat as it is.

    Args:
        prompt_token_ids: the prompt of the completion.
        parsers: the parsers of the model.
        tools: the tools of the chat. Without tools, no text is a call.
        reasoning_field: a key of `REASONING_FIELDS`.
    """
    markup = reasoning_markup(parsers.reasoning)
    opening = Opening.NONE
    if markup is not None:
        end = list(prompt_token_ids[-_PROMPT_END:])
        opening = find_opening(markup, tokenizer.decode(end, skip_special_tokens=False))
    parser = create_output_parser(parsers.tool, parsers.reasoning, tools=tools, opening=opening)
    text = _text_with_markup(completion, tokenizer) if parser.needs_special_tokens else completion.text
    events = parser.push(text) + parser.finish(is_cut=completion.finish_reason != "stop")
    return written_answer(events).as_message(REASONING_FIELDS[reasoning_field])


def _text_with_markup(completion: CompletionOutput, tokenizer: Tokenizer) -> str:
    """The text with its special tokens, which the markup may consist of. The text ends where the completion's text ends."""
    token_ids, stop = completion.token_ids, completion.stop_reason
    if completion.finish_reason == "stop" and not isinstance(stop, str):
        token_ids = token_ids[:-1]  # the end token
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    if isinstance(stop, str) and (start := text.rfind(stop)) >= 0:
        return text[: start + len(stop) * completion.text.endswith(stop)]
    return text
