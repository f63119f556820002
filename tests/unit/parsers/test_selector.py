"""Which parsers a chat template calls for, and that each reads back what its family's templates write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inflight.config.reasoning import ReasoningConfig
from inflight.errors import ConfigError
from inflight.interface.events import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.parsers.markup import MARKUPS, default_markup
from inflight.parsers.reasoning import ReasoningMarkup
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.selector import (
    AUTO,
    TOOL_PARSERS,
    DetectedParsers,
    call_beginnings,
    choose_reasoning_parser,
    create_output_parser,
    detect_parsers,
    read_tags,
    reasoning_markup,
    reasoning_with_end,
    resolve_parsers,
)
from inflight.tokenizer.chat_template import ChatTemplate
from tests.unit.parsers.parser_cases import TOOLS, counted_ids, parse, with_ids
from tests.unit.structured_output.grammar_case import MODEL

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
END = "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
QWEN_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
)
HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n{ \"arguments\": ' + c.function.arguments | tojson + "
    "', \"name\": \"' + c.function.name + '\"}\\n</tool_call> ' }}{% endfor %}"
)
LLAMA_CALLS = (
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + c.name + \'", "parameters": \' + c.arguments | tojson + "}" }}{% endif %}'
)
MISTRAL_CALLS = (
    "{% if m.tool_calls %}[TOOL_CALLS]SPACE[{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('id') }}"
    "{% endif %}{{ (c.function | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}]{% endif %}"
)
MISTRAL_NEW_CALLS = (
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}ARGS"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endfor %}"
)
CODER_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}"
)
UNKNOWN_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}<key>a</key></call>{% endfor %}"
GLM_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}BREAK"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>BREAK"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>BREAK{% endfor %}</tool_call>{% endfor %}"
)
MINIMAX_CALLS = (
    "{% if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}{% for c in m.tool_calls %}"
    "{{ '<invoke name=\"' + c.function.name + '\">\\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\\n' }}{% endfor %}"
    "{{ '</invoke>\\n' }}{% endfor %}</minimax:tool_call>{% endif %}"
)
V3_CALLS = (
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}{{ '' if loop.first else '\\n' }}"
    "<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + (c.function.arguments | tojson) }}"
    "{{ '\\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
V31_CALLS = (
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}"
    "<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
)
GEMMA_CALLS = (
    '{% macro show(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}{{ v | lower }}'
    "{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}{{ k }}:{{ show(x) }}{{ '' if loop.last else ',' }}"
    "{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for x in v %}{{ show(x) }}{{ '' if loop.last else ',' }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
    "{{ '<|channel>thought\\n' + m.reasoning_content + '\\n<channel|>' }}{% endif %}{{ m.content.split('<channel|>')[-1] }}"
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name + show(c.function.arguments) }}<tool_call|>"
    "{% endfor %}"
)
HARMONY_TURNS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.content %}<|start|>assistant<|channel|>CONTENT<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
QWEN_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and loop.last %}"
    "{{ '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content }}"
)
R1_THOUGHT = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}"
MAGISTRAL_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}"
)

# these accept a call only with its arguments as text, and only with its result behind it
TEXT_CALLS = QWEN_CALLS.replace(
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "{{ c.function.arguments + '' }}",
)
ANSWERED_CALLS = "{% if m.tool_calls and loop.last %}{{ raise_exception('no result') }}{% endif %}" + QWEN_CALLS

SEED_CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n<seed:tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>' + (v | string) + '</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</seed:tool_call>' }}{% endfor %}"
)
SEED_THOUGHT = QWEN_THOUGHT.replace("think>", "seed:think>")
WRAPPED_CALLS = LLAMA_CALLS.replace("{{ '{", "<tool>{{ '{").replace('"}" }}', '"}" }}</tool>')
# as Mistral's generator writes them: the filter makes the texts around the arguments escape their quotes
GENERATED_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
    "{% if a is not string %}{% set a = a | tojson | safe %}{% endif %}"
    "{{ '[TOOL_CALLS] [{\"name\": \"' + c.function.name + '\", \"arguments\": ' + a + '}]' }}{% endfor %}"
)
JOINED_CALLS = V3_CALLS.replace("(c.function.arguments | tojson)", "c.function.arguments")
# as SmolLM3: calls are not written, but explained; thinking is on by default, and shows only if it is off
SMOLLM3 = (
    "{% if xml_tools %}<tools>{{ xml_tools }}</tools>, within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{ \'{"name": <function-name>, "arguments": <args-json-object>}\' }}\n</tool_call>{% endif %}'
    + TURN
    + "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}{% endif %}"
)
# as Ministral 3 Reasoning: thoughts are parts of the content
PART_THOUGHT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)

GLM_47 = next(each for each in MARKUPS if each.parser == "glm45" and not each.separator)
TEMPLATES: dict[str, tuple[str, DetectedParsers]] = {
    "qwen, arguments as text": (TURN + TEXT_CALLS + END, DetectedParsers("hermes", None, MARKUPS[0])),
    "qwen, with results": (TURN + ANSWERED_CALLS + END, DetectedParsers("hermes", None, MARKUPS[0])),
    "qwen": (TURN + QWEN_CALLS + END, DetectedParsers("hermes", None, MARKUPS[0])),
    "qwen, thinking": (QWEN_THOUGHT + QWEN_CALLS + END, DetectedParsers("hermes", "qwen3", MARKUPS[0])),
    "hermes": (TURN + HERMES_CALLS + END, DetectedParsers("hermes", None, MARKUPS[0])),
    "llama": (TURN + LLAMA_CALLS + END, DetectedParsers("llama3_json", None, MARKUPS[1])),
    "mistral": (TURN + MISTRAL_CALLS.replace("SPACE", " ") + END, DetectedParsers("mistral", None, MARKUPS[2])),
    "mistral, tekken": (TURN + MISTRAL_CALLS.replace("SPACE", "") + END, DetectedParsers("mistral", None, MARKUPS[3])),
    "mistral, v13": (
        TURN + MISTRAL_NEW_CALLS.replace("ARGS", "[ARGS]") + END,
        DetectedParsers("mistral", None, MARKUPS[4]),
    ),
    "mistral, v11": (TURN + MISTRAL_NEW_CALLS.replace("ARGS", "") + END, DetectedParsers("mistral", None, MARKUPS[5])),
    "mistral, call id": (
        TURN + MISTRAL_NEW_CALLS.replace("ARGS", "[CALL_ID]{{ c.id }}[ARGS]") + END,
        DetectedParsers("mistral", None, MARKUPS[4]),
    ),
    "magistral": (MAGISTRAL_THOUGHT + END, DetectedParsers(None, "mistral", None)),
    "coder": (TURN + CODER_CALLS + END, DetectedParsers("qwen3_coder", None, default_markup("qwen3_coder"))),
    "r1": (R1_THOUGHT + END.replace("<assistant>", "<assistant><think>\\n"), DetectedParsers(None, "qwen3", None)),
    "r1, old": (R1_THOUGHT + END, DetectedParsers(None, "qwen3", None)),
    "v3.1": (TURN + END.replace("<assistant>", "<assistant></think>"), DetectedParsers(None, "qwen3", None)),
    "unknown": (TURN + UNKNOWN_CALLS + END, DetectedParsers(None, None, None)),
    "glm": (
        QWEN_THOUGHT + GLM_CALLS.replace("BREAK", "\n") + END,
        DetectedParsers("glm45", "qwen3", default_markup("glm45")),
    ),
    "glm 4.7": (TURN + GLM_CALLS.replace("BREAK", "") + END, DetectedParsers("glm45", None, GLM_47)),
    "minimax": (
        QWEN_THOUGHT + MINIMAX_CALLS + END,
        DetectedParsers("minimax_m2", "qwen3", default_markup("minimax_m2")),
    ),
    "deepseek v3": (TURN + V3_CALLS + END, DetectedParsers("deepseek_v3", None, MARKUPS[6])),
    "deepseek v3, no end": (
        TURN + V3_CALLS.replace("<｜tool▁calls▁end｜>", "") + END,
        DetectedParsers("deepseek_v3", None, MARKUPS[6]),
    ),
    "deepseek v3.1": (QWEN_THOUGHT + V31_CALLS + END, DetectedParsers("deepseek_v31", "qwen3", MARKUPS[7])),
    "gemma 4": (GEMMA_CALLS + END, DetectedParsers("gemma4", "gemma4", default_markup("gemma4"))),
    "functiongemma": (
        GEMMA_CALLS.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>")
        + END,
        DetectedParsers("functiongemma", "gemma4", default_markup("functiongemma")),
    ),
    "gpt-oss": (
        HARMONY_TURNS.replace("CONTENT", "final"),
        DetectedParsers("openai", "openai_gptoss", default_markup("openai")),
    ),
    "gpt-oss, preamble": (
        HARMONY_TURNS.replace("CONTENT", "commentary"),
        DetectedParsers("openai", "openai_gptoss", default_markup("openai")),
    ),
    "plain": (TURN + END, DetectedParsers(None, None, None)),
    "seed oss": (SEED_THOUGHT + SEED_CALLS + END, DetectedParsers("seed_oss", "seed_oss", default_markup("seed_oss"))),
    "llama, wrapped": (TURN + WRAPPED_CALLS + END, DetectedParsers(None, None, None)),
    "mistral, generated": (TURN + GENERATED_CALLS + END, DetectedParsers("mistral", None, MARKUPS[2])),
    "deepseek v3, joined": (TURN + JOINED_CALLS + END, DetectedParsers("deepseek_v3", None, MARKUPS[6])),
    "smollm3": (SMOLLM3, DetectedParsers("hermes", "qwen3", MARKUPS[0])),
    "ministral 3": (PART_THOUGHT + END, DetectedParsers(None, "mistral", None)),
    "refuses all": ("{{ raise_exception('no') }}", DetectedParsers(None, None, None)),
    "says how": ('Call as <tool_call>\n{"name": ...} <think>' + TURN + END, DetectedParsers(None, None, None)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_calls_for(name: str) -> None:
    source, expected = TEMPLATES[name]
    assert detect_parsers(ChatTemplate({"default": source})) == expected


def test_the_embedded_model_and_a_model_without_a_template() -> None:
    assert detect_parsers(ChatTemplate.from_folder(MODEL)) == DetectedParsers("hermes", None, MARKUPS[0])
    for template in (None, ChatTemplate({})):
        assert detect_parsers(template) == DetectedParsers(None, None, None)


def rendered(template: ChatTemplate, turn: dict[str, Any]) -> str:
    """What the model would have written: what the template makes of the turn behind its generation prompt."""
    question = {"role": "user", "content": "?"}
    prompt = template.render([question], tools=TOOLS)
    whole = template.render([question, turn], tools=TOOLS, add_generation_prompt=False)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("</assistant>").removesuffix("<|im_end|>\n")


ARGUMENTS = [
    {"s": 'a "b"\n<x> 東京 🙂', "n": -3, "o": {"a": [1, {"b": None}]}, "b": True},
    {},
    {"s": "</tool_call> [TOOL_CALLS] }; {"},
]


READS_BACK = [
    name for name, (_, found) in TEMPLATES.items() if found.tool and not name.startswith(("qwen, ", "smollm3"))
]


@pytest.mark.parametrize("name", [*READS_BACK, "qwen, thinking", "embedded"])
def test_a_templates_own_rendering_of_calls_parses_back(name: str) -> None:
    template = ChatTemplate.from_folder(MODEL) if name == "embedded" else ChatTemplate({"default": TEMPLATES[name][0]})
    found = detect_parsers(template)
    for arguments in ([ARGUMENTS[0]], [ARGUMENTS[1]], [ARGUMENTS[2]], ARGUMENTS):
        calls = [
            {"type": "function", "id": f"abcdefgh{i}", "function": {"name": "f", "arguments": each}}
            for i, each in enumerate(arguments)
        ]
        turn = {"role": "assistant", "content": "" if name == "llama" else "Wait.", "tool_calls": calls}
        turn |= {"reasoning_content": "I think\nso."} if found.reasoning else {}
        text = rendered(template, turn)
        if name == "llama" and len(calls) > 1:  # it takes one call in a turn, so each is a turn of its own
            assert text.count('{"name": "f", "parameters": ') == len(calls)
            continue
        parser = with_ids(create_output_parser(found.tool, found.reasoning, tools=TOOLS), counted_ids())
        events = parse(parser, list(text))
        assert [event.text for event in events if isinstance(event, ContentDelta)] == ["Wait."] * bool(turn["content"])
        assert [event.text for event in events if isinstance(event, ReasoningDelta)] == (
            ["I think\nso."] if found.reasoning else []
        )
        assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["f"] * len(calls)
        deltas = [json.loads(event.text) for event in events if isinstance(event, ToolArgumentsDelta)]
        assert deltas == arguments


def test_settings_are_resolved() -> None:
    template = ChatTemplate({"default": TEMPLATES["mistral, v13"][0]})
    assert resolve_parsers("auto", "auto", template) == DetectedParsers("mistral", None, MARKUPS[4])
    assert resolve_parsers("mistral", "qwen3", template) == DetectedParsers("mistral", "qwen3", MARKUPS[4])
    assert resolve_parsers("hermes", "none", template) == DetectedParsers("hermes", None, MARKUPS[0])
    assert resolve_parsers("qwen3_coder", "none", None) == DetectedParsers(
        "qwen3_coder", None, default_markup("qwen3_coder")
    )
    assert resolve_parsers("none", "auto", template) == DetectedParsers(None, None, None)
    for name in TOOL_PARSERS:
        assert resolve_parsers(name, "none", None).tool == name
    for name in REASONING:
        assert resolve_parsers("none", name, None).reasoning == name
    with pytest.raises(ConfigError, match=r"tool_call_parser='x' .*deepseek_v3"):
        resolve_parsers("x", "auto", template)
    with pytest.raises(ConfigError, match=r"reasoning_parser='x' .*deepseek_r1"):
        resolve_parsers("auto", "x", template)


def test_with_what_calls_begin() -> None:
    beginnings = {name: call_beginnings(name) for name in (None, "hermes", "mistral", "llama3_json", "qwen3_coder")}
    assert beginnings[None] == beginnings["llama3_json"] == ()  # a call of the latter begins as any object
    assert beginnings["hermes"][0] == beginnings["qwen3_coder"][0] == "<tool_call>"
    assert beginnings["mistral"][0] == "[TOOL_CALLS]"
    assert all(all(call_beginnings(name)) for name in TOOL_PARSERS)


def test_the_tags_of_a_parser() -> None:
    assert reasoning_markup(None) is None
    assert reasoning_markup("mistral") == REASONING["mistral"]
    assert reasoning_with_end("</think>") == REASONING["qwen3"]
    assert reasoning_with_end(";;") == ReasoningMarkup("", ";;")


def test_tags_that_an_operator_names_choose_a_parser() -> None:
    def chosen(setting: str = AUTO, template: ChatTemplate | None = None, **config: str) -> str:
        return choose_reasoning_parser(setting, ReasoningConfig(**config), template)

    end = "I answer now.</think>"
    assert chosen() == AUTO
    assert chosen(reasoning_parser="mistral", reasoning_end_str=end) == "mistral"
    assert chosen("none", reasoning_end_str=end) == "none"
    assert chosen("seed_oss", reasoning_parser="mistral") == "seed_oss"
    assert read_tags("", chosen_end := "x</seed:think>").message == "x"
    assert chosen(reasoning_end_str=chosen_end) == "seed_oss"
    tags = read_tags("<think>", end)
    assert (tags.markup.begin, tags.markup.end, tags.message) == ("<think>", "</think>", "I answer now.")
    assert not tags.markup.starts_inside
    assert chosen(reasoning_end_str=end) == tags.parser == "qwen3", "a family with these tags and nothing else"
    thinking = ChatTemplate({"default": "{{ messages }}{% if add_generation_prompt %}<think>{% endif %}"})
    assert chosen(template=thinking, reasoning_end_str=end) == AUTO, "the parser that is found reads these tags"
    harmony = read_tags("", "Enough.<|end|><|start|>assistant<|channel|>final<|message|>")
    assert (harmony.parser, harmony.message) == ("openai_gptoss", "Enough.")
    assert read_tags("<a>", "</a>") == (None, ReasoningMarkup("<a>", "</a>"), "")
    with pytest.raises(ConfigError):
        chosen(reasoning_start_str="<a>", reasoning_end_str="</a>")


def test_the_page_of_models_says_for_each_type_which_parsers_are_found() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("| family: types |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) \| ?(.*?) ?\|$", table, re.MULTILINE)
    named = [re.findall(r"`([^`]+)`", cell) for row in rows for cell in row]
    types, tools, reasoning = ([each for cell in named[i::3] for each in cell] for i in range(3))
    assert len(types) == len(set(types)), "each type stands in one row"
    of_all = page[page.index("<!-- made by benchmarks.coverage -->") :]
    in_all_columns = re.findall(r"`([^`]+)`", of_all.partition("Exact or close in all columns:")[2].partition("\n")[0])
    assert set(types) == {*in_all_columns, *re.findall(r"^\| `([^`]+)` \| exact \|", of_all, re.MULTILINE)}
    assert set(tools) <= TOOL_PARSERS.keys() and set(reasoning) <= REASONING.keys()
