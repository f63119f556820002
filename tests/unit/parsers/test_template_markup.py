"""What a chat template says about calls and thoughts is found, and the calls that it writes are read again.

Most templates here are made of the known markups. With INFLIGHT_TEMPLATES_DIR, all templates in that folder are tried, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.interface.events import ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.markup import MARKUPS, ToolMarkup
from inflight.parsers.reasoning import Opening, find_opening
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.selector import DetectedParsers, create_output_parser, detect_parsers
from inflight.parsers.template_markup import shows_tools
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.history.call_forms import CALL_SIGNS
from tests.unit.parsers.parser_cases import parse

FOLDER = os.environ.get("INFLIGHT_TEMPLATES_DIR")
REAL = sorted(Path(FOLDER).rglob("*.jinja")) if FOLDER else []
# these templates take one call in a message, so that several are written in several messages
NOT_ALL = ("GigaChat3", "gpt-oss", "Llama-3.", "llama3_", "llama4", "granite")
QUESTION = {"role": "user", "content": "?"}
PROPERTIES = {"s": "string", "n": "integer", "o": "object", "b": "boolean"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": kind, "description": "d"} for name, kind in PROPERTIES.items()},
        },
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {"s": "New York", "n": -3, "o": {"a": [1, {"b": "x"}]}, "b": True},
    {"s": "it's <x>\n=3, (y)"},
    {},
]
HEAD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
TAIL = "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SHOWN = "{{ tools | tojson if tools else '' }}"


def read_calls(template: ChatTemplate, found: DetectedParsers, arguments: list[dict[str, Any]]) -> list[Any] | None:
    """The arguments that are read in what the template writes behind its generation prompt; None if it refuses the calls."""
    calls = [
        {"type": "function", "id": f"abcdefgh{i}", "function": {"name": "f", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        prompt = template.render([QUESTION], tools=[TOOL])
        whole = template.render([QUESTION, turn], tools=[TOOL], add_generation_prompt=False)
    except InvalidRequestError:
        return None
    opening = Opening.NONE if found.reasoning is None else find_opening(REASONING[found.reasoning], prompt)
    parser = create_output_parser(found.tool, found.reasoning, tools=[TOOL], opening=opening)
    events = parse(parser, [behind(prompt, whole)], is_cut=False)
    assert all(event.name == "f" for event in events if isinstance(event, ToolCallStart))
    return [json.loads(event.text) for event in events if isinstance(event, ToolArgumentsDelta)]


def behind(prompt: str, whole: str) -> str:
    """What `whole` has behind the prompt. A tag that only the prompt has at its end, such as <think>, is left out."""
    num_same = next((i for i, pair in enumerate(zip(prompt, whole, strict=False)) if pair[0] != pair[1]), len(prompt))
    tag = whole.rfind("<", 0, num_same)
    is_within_tag = num_same < len(prompt) and tag >= 0 and ">" not in whole[tag:num_same]
    return whole[tag if is_within_tag else num_same :]


def template_of(markup: ToolMarkup) -> ChatTemplate:
    """A template that writes calls in this markup."""
    written = "{{ c.function.arguments | tojson }}"
    if (tags := markup.arguments) is not None:
        value = "v | tojson" if tags.is_json else "v if v is string else v | tojson"
        between = f"{{{{ '' if loop.last else {tags.between!r} }}}}"
        written = (
            "{% for k, v in c.function.arguments.items() %}"
            f"{{{{ {tags.before_key!r} + k + {tags.after_key!r} + ({value}) + {tags.after_value!r}.replace('{{key}}', k) }}}}"
            f"{between}{{% endfor %}}"
        )
    begin = f"{{{{ {markup.before_name!r} + c.function.name + {markup.before_arguments!r} }}}}"
    end = markup.end + ("}]" if markup.is_list else "")
    calls = f"{{% for c in m.tool_calls or [] %}}{begin}{written}{{{{ {end!r} }}}}{{% endfor %}}"
    return ChatTemplate({"default": SHOWN + HEAD + calls + TAIL})


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: f"{markup.parser}-{markup.begin('f')}")
def test_each_markup_is_found_and_read_back(markup: ToolMarkup) -> None:
    template = template_of(markup)
    found = detect_parsers(template)
    assert found.markup is not None and found.tool == found.markup.parser
    assert found.markup.call("f", {"a": 1}) == markup.call("f", {"a": 1})
    for arguments in ARGUMENTS:
        assert read_calls(template, found, [arguments]) == [arguments]


INSTRUCTIONS = {
    "hermes": "<tool_call>\n{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>",
    "lfm2": "List of tools: [{",
    "granite": "respond only with <|tool_call|> followed by a JSON list of tools used.",
    "olmo3": "<functions>[{'name': x}]</functions>",
    "phi4_mini_json": 'formatted as functools[{"name": [function name], ...}]',
    "granite-20b-fc": 'answer with <function_call> {"name": function}',
    "pythonic": "Respond in the format [func_name1(params_name1=params_value1)]",
    "jamba": '<tool_calls>[{"name": <function-name-1>, "arguments": <args-dict-1>}]</tool_calls>',
    "internlm": "<|plugin|>",
    "nemotron_mini": "<extra_id_0>System\n\n<tool> {",
    "kimi_k2": "<|im_system|>tool_declare<|im_middle|>",
}


@pytest.mark.parametrize("name", CALL_SIGNS)
def test_instructions_are_read_and_the_history_follows_them(name: str) -> None:
    text = json.dumps(INSTRUCTIONS[name])
    template = ChatTemplate({"default": f"{{% if tools %}}{{{{ {text} }}}}{SHOWN}{{% endif %}}{HEAD}{TAIL}"})
    found = detect_parsers(template)
    assert found.tool == name and found.markup is not None
    for arguments in ([ARGUMENTS[0]], ARGUMENTS):
        assert read_calls(template, found, arguments) == arguments


THOUGHT = "{% if m.reasoning_content %}{{ BEGIN + m.reasoning_content + END }}{% endif %}"
CUT = "{% set last = messages | selectattr('role', 'equalto', 'assistant') | list | last %}"
SPLIT = "{{ m.content.split(END)[-1] if m.role == 'assistant' and WHERE else m.content }}"


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("form", ["field", "parts", "earlier answers", "all answers", "opened"])
def test_tags_of_thoughts(name: str, form: str) -> None:
    """By the field of a message, by a content part, by what is left out of answers, by the prompt."""
    markup = REASONING[name]
    body = {
        "field": THOUGHT + "{{ m.content }}",
        "parts": "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ BEGIN + p.thinking + END if p.type == 'thinking' else p.text }}{% endfor %}{% endif %}",
        "earlier answers": SPLIT.replace("WHERE", "m.content != last.content"),
        "all answers": SPLIT.replace("WHERE", "true"),
        "opened": "{{ m.content }}",
    }[form]
    source = f"{CUT}{{% for m in messages %}}<{{{{ m.role }}}}>{body}{TAIL}"
    if form == "opened":
        source = source.replace("<assistant>", f"<assistant>{{{{ {markup.begin!r} }}}}")
    source = source.replace("BEGIN", repr(markup.begin)).replace("END", repr(markup.end))
    source += "".join(f"{{# {tag} #}}" for tag in (*markup.answer_begins, *markup.answer_ends))
    found = detect_parsers(ChatTemplate({"default": source})).reasoning
    assert found is not None
    assert (REASONING[found].begin, REASONING[found].end) == (markup.begin, markup.end)


def test_whether_tools_are_shown() -> None:
    shown = {
        SHOWN + HEAD + TAIL: True,
        HEAD + TAIL: False,
        HEAD.replace("messages", "xml_tools or messages") + TAIL: False,
        "{{ raise_exception('no') }}": True,  # not known
    }
    assert {source: shows_tools(ChatTemplate({"default": source})) for source in shown} == shown


@pytest.mark.skipif(not REAL, reason="INFLIGHT_TEMPLATES_DIR names no folder with *.jinja files")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_templates(path: Path) -> None:
    """A template that shows tools has a parser, and the parser reads what the template writes."""
    template = ChatTemplate({"default": path.read_text(encoding="utf-8")}, {"bos_token": "<s>", "eos_token": "</s>"})
    found = detect_parsers(template)
    if found.tool is None:
        known = ("muse", "firefunction")  # no parser reads them; the last refuses every chat
        assert not shows_tools(template) or any(name in path.name for name in known)
        return
    for arguments in ([ARGUMENTS[0]], [ARGUMENTS[1]], [ARGUMENTS[2]], ARGUMENTS):
        read = read_calls(template, found, arguments)
        is_partial = len(arguments) > 1 and any(name in path.name for name in NOT_ALL)
        assert read is None or read == arguments or (is_partial and read == arguments[:1])
    if found.reasoning is not None and (markup := REASONING[found.reasoning]).begin:
        text = f"{markup.begin}Hm{markup.end}\nSo."
        events = parse(create_output_parser(None, found.reasoning, tools=None), [text], is_cut=False)
        assert ReasoningDelta("Hm") in events or markup.whole_parser is not None
