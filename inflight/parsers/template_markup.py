"""Finds in a chat template how the model writes calls and reasoning: short invented conversations are rendered with it."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.parsers.markup import MARKUPS, ToolMarkup, default_markup
from inflight.parsers.reasoning_families import REASONING
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.history.call_forms import CALL_SIGNS
from inflight.tokenizer.probes import CALL_ID, QUESTION

_NAME = "get_probe"
_ARGUMENTS = {"a": 1}
_THOUGHT = "probed thought"
_ANSWER = "probed answer"
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": ""}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "", "parameters": _PARAMETERS}}
# Further variables with which templates are asked for thinking, or for no thinking
_THINKING: Sequence[Mapping[str, Any] | None] = (
    None,
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": True},
    {"reasoning": True},
)

# parser name -> pattern. If no markup fits, but a rendered call matches, the parser can read the model's calls.
_SIGNS = {
    "qwen3_coder": re.compile(rf"<tool_call>\s*<function={_NAME}>"),
    "zaya_xml": re.compile(rf"<zyphra_tool_call>\s*<function={_NAME}>"),
    "seed_oss": re.compile(rf"<seed:tool_call>\s*<function={_NAME}>"),
    "glm45": re.compile(rf"<tool_call>{_NAME}\s*<arg_key>"),
    "minimax_m2": re.compile(rf'<minimax:tool_call>\s*<invoke name="{_NAME}">'),
    "minimax_m3": re.compile(rf'\]<\]minimax\[>\[<invoke name="{_NAME}">'),
    "gemma4": re.compile(rf"<\|tool_call>call:{_NAME}\{{"),
    "functiongemma": re.compile(rf"<start_function_call>call:{_NAME}\{{"),
    "openai": re.compile(rf"to=functions\.{_NAME}\b"),
    "deepseek_v3": re.compile(f"function<｜tool▁sep｜>{_NAME}"),
    "deepseek_v31": re.compile(f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>"),
    "hermes": re.compile(rf'<tool_call>\s*\{{\s*"(name": "{_NAME}"|arguments": )'),
    "mistral": re.compile(rf"\[TOOL_CALLS\]\s*(\[\{{|{_NAME})"),
    "lfm2": re.compile(rf"<\|tool_call_start\|>\s*\[?\s*{_NAME}\("),
    "minicpm3": re.compile(rf"<\|tool_call_start\|>\s*```python\s*{_NAME}\("),
    "olmo3": re.compile(rf"<function_calls>\s*\[?\s*{_NAME}\("),
    "llama4_pythonic": re.compile(rf"<\|python_start\|>\s*\[\s*{_NAME}\("),
    "jamba": re.compile(rf'<tool_calls>\s*\[?\s*\{{\s*"name": "{_NAME}"'),
    "nemotron_json": re.compile(rf'<TOOLCALL>\s*\[?\s*\{{\s*"name": "{_NAME}"'),
    "nemotron_mini": re.compile(rf'<toolcall>\s*\{{\s*"name": "{_NAME}"'),
    "granite": re.compile(rf'<\|tool_call\|>\s*\[?\s*\{{\s*"name": "{_NAME}"'),
    "phi4_mini_json": re.compile(rf'functools\[\s*\{{"name": "{_NAME}"'),
    "internlm": re.compile(rf'<\|plugin\|>\s*\{{\s*"name": "{_NAME}"'),
    "gigachat3": re.compile(rf'(function call<\|role_sep\|>|<\|function_call\|>)\s*\{{"name": "{_NAME}"'),
    "cohere_command3": re.compile(rf'<\|START_ACTION\|>\s*\[.{{,80}}"tool_name": "{_NAME}"', re.DOTALL),
    "command_r": re.compile(rf'Action:\s*```json\s*\[\s*\{{\s*"tool_name": "{_NAME}"'),
    "apertus": re.compile(rf'<\|tools_prefix\|>\s*\[\s*\{{\s*"{_NAME}"'),
    "llama4_json": re.compile(rf'<\|python_end\|>\s*\{{"name": "{_NAME}"'),
    "kimi_k2": re.compile(rf"<\|tool_call_begin\|>\s*(functions\.{_NAME}|{CALL_ID})"),
    "kimi_k3": re.compile(rf'<\|open\|>call tool="{_NAME}"'),
    "solar_open2": re.compile(rf"<\|tool_call:start\|>\s*{_NAME}\s*<\|tool_arg:start"),
    "solar_open": re.compile(rf"<\|tool_call:name\|>{_NAME}"),
    "deepseek_v32": re.compile(rf'<｜DSML｜function_calls>\s*<｜DSML｜invoke name="{_NAME}"'),
    "deepseek_v4": re.compile(rf'<｜DSML｜tool_calls>\s*<｜DSML｜invoke name="{_NAME}"'),
    "minicpm5": re.compile(rf'<function name="{_NAME}">\s*<param name'),
    "hy_v3": re.compile(rf"<tool_call:opensource>{_NAME}"),
    "longcat": re.compile(rf"<longcat_tool_call>{_NAME}"),
    "functionary_v3_1": re.compile(rf"<function={_NAME}>\s*\{{"),
    "functionary_v3_2": re.compile(rf">>>{_NAME}\n\{{"),
}
# Tokens in the text of a template that neither writes calls nor explains them.
_TOKENS = {
    "kimi_k2": "<|tool_calls_section_begin|>",
    "phi4_mini_json": "'<|tool|>'",
    "minicpm3": "<|tool_call_start|>\\n```python",
}
# reasoning parser -> a pattern of the instructions with which a template says how to think
_THOUGHT_INSTRUCTIONS = {
    "granite3_3": re.compile(r"<think></think>.{,80}<response></response>", re.DOTALL),
    "granite": re.compile(r"Here is my thought process:.{,200}Here is my response:", re.DOTALL),
    "apriel": re.compile(r"\[BEGIN FINAL RESPONSE\]"),
    "minicpm3": re.compile(r"<\|thought_start\|>"),
}


def find_tool_markup(template: ChatTemplate) -> tuple[str | None, ToolMarkup | None]:
    """Returns the name of the parser and the markup for the calls that `template` writes. Each may be None.

    An invented call is rendered with its arguments as a JSON object. If nothing fits, it is rendered with its arguments as JSON
    text, and with content that is null instead of empty. Some templates write calls of one of these forms only. If the template
    writes no calls at all, its instructions about calls are read.
    """
    in_each_form: tuple[Mapping[str, Any] | str, ...] = (_ARGUMENTS, json.dumps(_ARGUMENTS))
    for content, arguments in product(("", None), in_each_form):
        text = _render_call(template, arguments, content)
        for markup in MARKUPS:
            call = markup.call(_NAME, _ARGUMENTS)
            if call in text and not (markup.whole_message and _is_wrapped(template, text.partition(call)[0])):
                return markup.parser, markup
        for parser, sign in _SIGNS.items():
            if sign.search(text):
                similar = (each for each in MARKUPS if each.parser == parser and each.before_arguments in text)
                return parser, next(similar, default_markup(parser))
    instructions = render_or_nothing(template, [QUESTION], tools=[_TOOL])
    source = template.default_source or ""
    by_instruction = (parser for parser, sign in CALL_SIGNS.items() if sign.search(instructions))
    by_token = (parser for parser, token in _TOKENS.items() if token in source)
    found = next(by_instruction, None) or next(by_token, None)
    return (None, None) if found is None else (found, default_markup(found))


def shows_tools(template: ChatTemplate) -> bool:
    """Whether the template writes a request's tools into the prompt. Also True if it refuses to be rendered."""
    prompt = render_or_nothing(template, [QUESTION], tools=[_TOOL])
    return not prompt or _NAME in prompt


def find_reasoning(template: ChatTemplate) -> str | None:
    """Returns the name of the parser for the template's reasoning tags, or None if no parser fits. A parser fits if the
    template writes the parser's tags around reasoning or at the start of an answer, also of an answer without thinking, or if
    it removes the text between these tags from an earlier answer, or if its instructions name the tags. Some templates write
    tags that are special tokens only around content parts of a type of their own. There the tags are found in the text of the
    template."""
    prompts = [
        render_or_nothing(template, [QUESTION], add_generation_prompt=True, variables=variables).rstrip()
        for variables in _THINKING
    ]
    explained = "\n".join(
        [*prompts, *(render_or_nothing(template, [QUESTION], tools=[_TOOL], variables=each) for each in _THINKING[:2])]
    )
    for name, sign in _THOUGHT_INSTRUCTIONS.items():
        if sign.search(explained):
            return name
    written = _written_thoughts(template)
    source = template.default_source or ""
    known = "\n".join([source, *prompts, *written])  # some templates put tags together from parts
    for name, markup in REASONING.items():
        if markup.starts_inside or any(tag not in known for tag in (*markup.answer_begins, *markup.answer_ends)):
            continue
        begin = markup.begin
        end = markup.end
        thought = re.compile(rf"{re.escape(begin)}\s*({_THOUGHT}|{re.escape(end)}\s*{_ANSWER})")
        if any(text.endswith((begin, end)) for text in prompts) or any(map(thought.search, written)):
            return name
        if _is_removed(template, f"{begin}\n{_THOUGHT}\n{end}\n\n{_ANSWER}"):
            return name
    special = (name for name, markup in REASONING.items() if markup.needs_special_tokens)
    return next((name for name in special if REASONING[name].begin in source and REASONING[name].end in source), None)


def _written_thoughts(template: ChatTemplate) -> list[str]:
    """Conversations whose answer has a thought: as a field of the message, and as a part of its content."""
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]
    answers = ({"content": _ANSWER, "reasoning_content": _THOUGHT}, {"content": parts})
    return [
        render_or_nothing(template, [QUESTION, {"role": "assistant", **answer}], variables=variables)
        for answer in answers
        for variables in (None, {"enable_thinking": True})
    ]


def _is_removed(template: ChatTemplate, text: str) -> bool:
    """Whether the template leaves the thought out of an answer with this text: of the last answer, or of an earlier one."""
    inline = {"role": "assistant", "content": text}
    last = [QUESTION, inline, QUESTION]
    earlier = [*last, {"role": "assistant", "content": "."}, QUESTION]
    for conversation in (last, earlier):
        rendered = render_or_nothing(template, conversation, add_generation_prompt=True)
        if _ANSWER in rendered and _THOUGHT not in rendered:
            return True
    return False


def _is_wrapped(template: ChatTemplate, before: str) -> bool:
    """Whether the template writes more before a call than before an answer. `before`: the rendered text before the call."""
    answer = {"role": "assistant", "content": _ANSWER}
    text = render_or_nothing(template, [QUESTION, answer], tools=[_TOOL])
    return _ANSWER in text and text.partition(_ANSWER)[0].rstrip() != before.rstrip()


def _render_call(
    template: ChatTemplate,
    arguments: Mapping[str, Any] | str,  # Any: JSON
    content: str | None,
) -> str:
    """Render a conversation that ends with a call. If the template refuses it, the call's result is added, because
    some templates refuse a call without a result."""
    function = {"name": _NAME, "arguments": arguments}
    turn = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "id": CALL_ID, "function": function}],
    }
    result = {"role": "tool", "name": _NAME, "tool_call_id": CALL_ID, "content": "1"}
    conversations = ([QUESTION, turn], [QUESTION, turn, result])
    return next(filter(None, (render_or_nothing(template, each, tools=[_TOOL]) for each in conversations)), "")


def render_or_nothing(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],  # Any: JSON
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Returns the rendered messages; "" if the template refuses them. `variables`: further ones for the template."""
    try:
        return template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, chat_template_kwargs=variables
        )
    except InvalidRequestError:
        return ""
