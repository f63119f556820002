"""Calls that leave the format as models do: tags and brackets are missing, values have another notation, or text stands where
none belongs. In all of these cases the model has ended the text, and not a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.interface.events import Event
from inflight.parsers.reasoning import Opening
from tests.unit.parsers.parser_cases import Case, calls, content, hermes, thought

CODER_END = "\n</parameter>\n</function>\n</tool_call>"


def coder(text: str, *expected: Event, reasoning: str | None = None, **options: object) -> Case:
    return Case("qwen3_coder", text, list(expected), reasoning, options)


def called(tool: str, text: str, *arguments: str) -> Case:
    return Case(tool, text, calls(*(("f", each) for each in arguments)))


def typed(schema: dict[str, Any], *pairs: tuple[str, str]) -> list[Case]:
    """Cases of an argument with this schema. `pairs`: the text of the argument, and the JSON that it becomes."""
    return [_typed(schema, text, value) for text, value in pairs]


def _typed(schema: dict[str, Any], text: str, value: str) -> Case:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"s": {"type": "string"}, "loop": LOOP}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    return Case("glm45", body, calls(("f", f'{{"x": {value}}}')), None, {"tools": tools})


LOOP = {"anyOf": [*[{"$ref": "#/$defs/loop"}] * 20, {"type": "integer"}]}  # 20 ways for each level
SLOW = "a" * 40 + "!"  # Python's `re` would need hours to find that "^(a+)+$" does not match
TYPES: Sequence[Case] = [
    *typed(
        {"anyOf": [{"type": "string"}, {"type": "null"}]}, ("10001", '"10001"'), ("true", '"true"'), ("null", "null")
    ),
    *typed({"type": ["string", "null"]}, ('{"a": 1}', '"{\\"a\\": 1}"'), ("None", "null"), ("nullable", '"nullable"')),
    *typed({"type": "string", "nullable": True}, ("1", '"1"'), ("nul", '"nul"'), ("null", "null"), ("", '""')),
    *typed({"enum": ["1", "2"]}, ("1", '"1"')),
    *typed({"enum": [1, 2, None]}, ("1", "1"), ("None", "null")),
    *typed({"const": "7"}, ("7", '"7"')),
    *typed({"$ref": "#/$defs/s"}, ("3", '"3"')),
    *typed({"allOf": [{"$ref": "#/$defs/s"}, {"maxLength": 9}]}, ("3", '"3"')),
    *typed({"$ref": "#/$defs/loop"}, ("3", "3")),
    *typed({"$ref": "#/$defs/none"}, ("3", "3")),
    *typed({"allOf": [{}], "$ref": "#/properties/x/allOf/" + "9" * 5000}, ("3", "3")),
    *typed({"type": ["string", {}]}, ("3", '"3"')),
    Case(
        "glm45",
        f"<tool_call>f<arg_key>{SLOW}</arg_key><arg_value>1</arg_value></tool_call>",
        calls(("f", f'{{"{SLOW}": "1"}}')),
        None,
        {"tools": [{"function": {"name": "f", "parameters": {"patternProperties": {"^(a+)+$": {"type": "integer"}}}}}]},
    ),
    *typed({"oneOf": [{"enum": ["a", "b"]}, {"type": "integer"}]}, ("3", "3"), ("a", '"a"'), ("c", '"c"')),
    *typed({"type": ["integer", "string"]}, ("3", '"3"')),
    *typed({"type": "boolean"}, ("True", "true"), ("FALSE", "false"), ("yes", '"yes"')),
    *typed({"type": "array", "items": {"type": "string"}}, ("['a', True]", '["a", true]'), ("a, b", '"a, b"')),
    *typed({"type": ["object", "null"]}, ("{'x': True}", '{"x": true}'), ("None", "null")),
    *typed({}, ("10001", "10001"), ("[1", "[1]"), ("[1 }", '"[1 }"'), ("{a: 1,}", '{"a": 1}')),
]

TAGGED: Sequence[Case] = [
    # no opening tag; then only a call of a known tool counts, and not in other markup
    coder(f"So:\n<function=f>\n<parameter=s>\na{CODER_END}", *content("So:"), *calls(("f", '{"s": "a"}'))),
    coder(f"<function=g>\n<parameter=s>\na{CODER_END}", *content(f"<function=g>\n<parameter=s>\na{CODER_END}")),
    called("qwen3_coder", "<function=f>\n</function>\n<function=f>\n<parameter=n>\n1\n</parameter>", "{}", '{"n": 1}'),
    called("seed_oss", "<function=f><parameter=s>a</parameter></function></seed:tool_call>", '{"s": "a"}'),
    called("minimax_m2", '<invoke name="f">\n<parameter name="s">a</parameter>\n</invoke>', '{"s": "a"}'),
    # names and keys as attributes, and in quotes
    *(
        called(
            "qwen3_coder",
            f"<tool_call>\n<function{name}>\n<parameter{key}>\na\n</parameter>\n</function>\n</tool_call>",
            '{"s": "a"}',
        )
        for name in ("=f", ' name="f"', '="f"', "='f'")
        for key in ("=s", ' name="s"', '="s"', " name='s'")
    ),
    # closing tags that are missing
    called(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n3\n</function>",
        '{"s": "a", "n": 3}',
    ),
    called("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n</tool_call>", '{"s": "a"}'),
    called("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\na\n</tool_call>\n", '{"s": "a"}'),
    called("qwen3_coder", "<tool_call>\n<function=f>\n</tool_call>", "{}"),
    called(
        "qwen3_coder", "<tool_call><function=f><parameter=s>a</parameter><function=f></function>", '{"s": "a"}', "{}"
    ),
    called("minimax_m2", '<minimax:tool_call><invoke name="f"></minimax:tool_call>', "{}"),
    called("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="s">a</parameter>', '{"s": "a"}'),
    called("minimax_m2", '<minimax:tool_call><invoke name="f"><parameter name="s">a</minimax:tool_call>', '{"s": "a"}'),
    called(
        "glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>a<arg_key>n</arg_key><arg_value>3", '{"s": "a", "n": 3}'
    ),
    called(
        "glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>a</tool_call><tool_call>f</tool_call>", '{"s": "a"}', "{}"
    ),
    called("seed_oss", "<seed:tool_call><function=f><parameter=s>a</function></seed:tool_call>", '{"s": "a"}'),
    # closing tags in a value
    coder(
        f"<tool_call>\n<function=f>\n<parameter=s>\n'</parameter>'\n</parameter>\n<b>\n</function>\nx{CODER_END}",
        *calls(("f", '{"s": "\'</parameter>\'\\n</parameter>\\n<b>\\n</function>\\nx"}')),
    ),
    called(
        "glm45",
        "<tool_call>f<arg_key>s</arg_key><arg_value></arg_value> </tool> a<b</arg_value></tool_call>",
        '{"s": "</arg_value> </tool> a<b"}',
    ),
    called(
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="s"></parameter></invoke>;</parameter></invoke>',
        '{"s": "</parameter></invoke>;"}',
    ),
    # text between arguments
    coder(
        f"<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\nand <b>\n<parameter=s>\na{CODER_END}",
        *calls(("f", '{"n": 1, "s": "a"}')),
    ),
    coder(
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\nand <b>",
        *calls(("f", '{"n": 1}')),
        *content("\nand <b>"),
    ),
]

JSON: Sequence[Case] = [
    called("hermes", hermes("f", '"{\\"a\\": 1}"'), '{"a": 1}'),
    called("hermes", hermes("f", '" "'), "{}"),
    called("hermes", hermes("f", "null"), "{}"),
    called("hermes", '<tool_call>{"why": [{"a": "}"}, "]"], "name": "f", "arguments": {}, "k": 1}</tool_call>', "{}"),
    # perhaps an argument that came too late
    called("hermes", '<tool_call>{"name": "f", "arguments": {}, "n": 1}</tool_call>', '{}, "n": 1'),
    called("hermes", '<tool_call>{"name": "f"; "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>{"name: "f", "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>{/* so */ name: "f", arguments: {"a": 1}}</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "id": 7, "name": "f"}</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]</tool_call>', '{"a": 1}', "{}"),
    called(
        "hermes", "<tool_call>{'name': 'f', 'arguments': {'a': 'it\\'s \"x\"'}}</tool_call>", '{"a": "it\'s \\"x\\""}'
    ),
    # brackets and tags that are missing or too much
    called("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": 2}</tool_call>', '{"a": [1, {"b": 2}]}'),
    called("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call><tool_call>{"name": "f"}', "{}", "{}"),
    called("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>', '{"a": 1}'),
    called("hermes", '<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "{}"),
    called("hermes", f"{hermes('f', '{}')}\n<tool_call>\n{hermes('f', '{}')[12:-13]}", "{}", "{}"),
    called("hermes", '{"name": "f", "arguments": {}}\n</tool_call>\n{"name": "f", "arguments": {}}', "{}", "{}"),
    Case("hermes", '{"name": "g", "arguments": {}}', content('{"name": "g", "arguments": {}}')),
    Case("hermes", '```json\n{"name": "f", "age": 3}\n```', content('```json\n{"name": "f", "age": 3}\n```')),
    called(
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
        '{"a": 1}',
    ),
    called("hermes", '<tool_call>{"id": "x", "function": {"name": "f"}}</tool_call>', "{}"),
    called(
        "hermes",
        '<tools>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n</tools>',
        '{"a": 1}',
        "{}",
    ),
    Case(
        "hermes",
        '<tools>{"name": "g", "arguments": {}}</tools>',
        content('<tools>{"name": "g", "arguments": {}}</tools>'),
    ),
    Case(
        "hermes",
        'I look:\n```json\n{"name": "f", "parameters": {}}\n```\nSo.',
        [*content("I look:"), *calls(("f", "{}")), *content("So.")],
    ),
    Case("hermes", 'So:\n```json\n{"a": 1}\n```', content('So:\n```json\n{"a": 1}\n```')),
    called("hermes", '```json\n{"name": "f", "arguments": {}}\n```', "{}"),
    called("hermes", '{"name": "f", "arguments": {}}}\n{"name": "f", "arguments": {}}', "{}", "{}"),
    called("llama3_json", '{"name": "f", "parameters": "{\\"a\\": 1}"}', '{"a": 1}'),
    *(
        called(
            "llama3_json",
            f'{before}{{"name": "f", "parameters": {{"a": 1}}}}{between}{{"name": "f", "parameters": {{}}}}{after}',
            '{"a": 1}',
            "{}",
        )
        for before, between, after in (
            ("", "\n", ""),
            ("", " ", "\n"),
            ("", ";\n", ""),
            ("", ",\n", ""),
            ("", "\n<|python_tag|>", ""),
            ("[", ", ", "]"),
            ("```json\n", "\n", "\n```"),
            ("```json\n[", ", ", "]\n```\n"),
        )
    ),
    called("llama3_json", '<function=f>{"a": 1}</function>\n<function=f>{}</function>', '{"a": 1}', "{}"),
    called("llama3_json", '<|python_tag|><function=f>{"a": 1}', '{"a": 1}'),
    Case("llama3_json", 'I look. {"name": "f", "parameters": {}}', [*content("I look."), *calls(("f", "{}"))]),
    Case("llama3_json", 'So:\n```json\n{"name": "f", "parameters": {}}\n```', [*content("So:"), *calls(("f", "{}"))]),
    Case("llama3_json", "a `b` ```py\n{}\n``` <function=g>", content("a `b` ```py\n{}\n``` <function=g>")),
    called(
        "mistral", '[TOOL_CALLS]f{"a": "b[TOOL_CALLS]", "c": 1[TOOL_CALLS]f{}', '{"a": "b[TOOL_CALLS]", "c": 1}', "{}"
    ),
    called("mistral", '[TOOL_CALLS]{"name": "f", "arguments": null}', "{}"),
    called("mistral", '[TOOL_CALLS]f"{}"[TOOL_CALLS]f"{\\"a\\": 1}"', "{}", '{"a": 1}'),
    called("llama3_json", '{"name": "f"," parameters": {"a": 1}}', '{"a": 1}'),
    called("mistral", '[TOOL_CALLS]f"{"a": 1}', '{"a": 1}'),
    called("mistral", '[TOOL_CALLS]f"{"n: [{}], "b": 1}', '{"n: [{}], "b": 1}'),
    called("hermes", '<tool_call>{"name": "f", "arguments": "{"a": 1}}</tool_call>', '{"a": 1}'),
    called(  # damaged: what is written before the fault is the same in every split
        "gemma4",
        f'<|tool_call>call:f{{s:<|"|>a "b" c<|"|>,o:{{s:<|"|>{"x" * 97}<|"|>,b:[1]]}}}}<tool_call|>',
        f'{{"s": "a \\"b" c<|"|>,o:{{s:<|"|>{"x" * 97}<|"|>,b:[1]]}}}}',
    ),
    called(
        "deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁begin｜>f<｜tool▁sep｜>null", "{}", "{}"
    ),
    called("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{"a": 1```<｜tool▁calls▁end｜>', '{"a": 1}'),
    called("openai", '<|channel|>commentary to=functions.f<|message|>{"a": 1<|call|>', '{"a": 1}'),
    called("openai", "<|channel|>commentary to=functions.f<|message|><|call|>", "{}"),
    called("openai", "commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "{}"),
    called("openai", "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", "{}"),
    called("mistral", r'[TOOL_CALLS] [{"name": "f", "arguments": "{\"a\": \"\ud800\"}"}]', r'{"a": "\ufffd"}'),
    Case("openai", "analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b", [*thought("a"), *content("b")]),
    *(Case("openai", text, content(text)) for text in ("final", "final <", "analysis of a<|end", "assistants")),
]

# what a model writes as arguments -> the JSON that it means
ARGUMENT_TEXTS = [
    ('{"a": "x\ny\tz\x07"}', '{"a": "x\\ny\\tz\\u0007"}'),
    ('{"a": "\\d+ \\x41 \\u12 \\\'"}', '{"a": "\\\\d+ \\u0041 \\\\u12 \'"}'),
    ('{"a": "say "hi" now", "b": ""}', '{"a": "say \\"hi\\" now", "b": ""}'),
    ("{'a': 'b', 'c': [True, False, None]}", '{"a": "b", "c": [true, false, null]}'),
    ('{"a": 1, "b": [1, 2, ], }', '{"a": 1, "b": [1, 2 ] }'),
    ("{a: 1, b: Oslo in May}", '{"a": 1, "b": "Oslo in May"}'),
    ('{"a": 1 "b": 2}', '{"a": 1, "b": 2}'),
    ('{"a": "x"; "b": (1, 2)}', '{"a": "x", "b": [1, 2]}'),
    ('{"a": "x" /* why, */, // so\n "b": 2 # end\n}', '{"a": "x" , \n "b": 2 \n}'),
    ('{"a": "x" // why}', '{"a": "x" }'),
    ('{"a": 1,, "b": 2}', '{"a": 1, "b": 2}'),
    ('{"a" "x"}', '{"a" :"x"}'),
    ('{"a": "x, "b": 1}', '{"a": "x", "b": 1}'),
    ('{"a: "x"}', '{"a": "x"}'),
    ('{"a": "x}', '{"a": "x"}'),
    ('{"a": [1, 2, "b": 3}', '{"a": [1, 2], "b": 3}'),
    ('{"a" 1, :"b": 2}', '{"a" :1, "b": 2}'),
    ("{'a': 'it's'}", '{"a": "it\'s"}'),
    ('{"a": {"b": 1', '{"a": {"b": 1}}'),
    # more than one reading, or none: as the model wrote it
    *(
        (text, text)
        for text in (
            '{"c": NaN}',
            '{"c": http://x}',
            '{"c": C#}',
            '{"c": tru}',
            '{"a": 1 "b": "x, y"}',
            '{"a": 1, "c"}',
            '{"d": }',
            "{: 3}",
            '{"a": [1, {"b": 2}, "c": (3)}',
            '{"a": {"b": 1]}, "c": 2}',
            '{"a": [1]], "b": 2}',
            '{"a": "b": 1}, "c": 2}',
            '{"a": {"b": 1, "c": 2}',
            '{"a": "b',
            '{"a": "b\\',
            '{"a": [tru',
            '{"a"',
            '{"a":[12,]}',
        )
    ),
    ('{\u00a0"a":\u00a0"x\u00a0",\u3000b\u3000: 1\u00a0\n}', '{"a":"x\u00a0","b": 1\n}'),
    ('{"a": 1,\n', '{"a": 1\n}'),
    ("{", "{}"),
    ('{"a": 1 ,  \n "b" :  [ ] , "c":{ } , "d": -1.5E+3 , "e": "\\u00e9\\/" }', ""),  # valid JSON stays as it is
]

GEMMA: Sequence[Case] = [
    called(
        "gemma4", '<|tool_call>call:f{o:{"mode": "fast", \'k\':[1,]}}<tool_call|>', '{"o": {"mode": "fast", "k": [1]}}'
    ),
    called(
        "gemma4", '<|tool_call>call:f{s:10001,n:<|"|>4<|"|>,b:None}<tool_call|>', '{"s": "10001", "n": 4, "b": null}'
    ),
    called("gemma4", '<|tool_call>call:f{s:<|"|>a<|"|>b<|"|>,o:{s:3,k:x', '{s:<|"|>a<|"|>b<|"|>,o:{s:3,k:x'),
    called("gemma4", "<|tool_call>call:f{s:at 10:30 <b>,n:1<tool_call|>", '{"s": "at 10:30 <b>", "n": 1}'),
    called("gemma4", "call:f{n:1}<tool_call|>", '{"n": 1}'),
    Case("gemma4", "call:g{n:1}", content("call:g{n:1}")),
]

INSIDE = {"opening": Opening.OPEN}
AGAIN = "<think>a</think>b <think>c</think>"
IN_REASONING: Sequence[Case] = [
    # reasoning that comes again
    Case(
        "hermes",
        f"{AGAIN}{hermes('f', '{}')}<think>d</think>\n{hermes('f', '{}')}",
        [
            *thought("a"),
            *content("b"),
            *thought("\n\nc"),
            *calls(("f", "{}")),
            *thought("\n\nd"),
            *calls(("f", "{}"), ("f", "{}"))[2:],
        ],
        "qwen3",
    ),
    Case(None, f"{AGAIN}d", [*thought("a"), *content("b "), *thought("\n\nc"), *content("d")], "qwen3"),
    Case(None, "b<think>c</think>", [*content("b"), *thought("c")], "qwen3", {"is_constrained": False}),
    Case(None, "b<think>c</think>", content("b<think>c</think>"), "qwen3", {"is_constrained": True}),
    Case("gemma4", "b<|channel>thought\nc<channel|>d", [*content("b"), *thought("c"), *content("d")], "gemma4"),
    Case("mistral", "b[THINK]c[/THINK]d", [*content("b"), *thought("c"), *content("d")], "mistral"),
    Case("llama3_json", "b<think>c</think>d", [*content("b"), *thought("c"), *content("d")], "qwen3"),
    *(
        Case(tool, text, content(text), "qwen3")
        for tool in ("hermes", None)
        for text in (
            "Use `<think>x</think>` here",
            'Say "<think>x</think>"',
            "So:\n```\n<think>x</think>\n```\nend",
            "the <think> tag",
            "<b> <think> <think>",
        )
    ),
    Case("hermes", hermes("f", '{"a": "<think>x</think>"}'), calls(("f", '{"a": "<think>x</think>"}')), "qwen3"),
    Case("llama3_json", '<think>Hm.\n{"name": "f", "parameters": {}}', [*thought("Hm."), *calls(("f", "{}"))], "qwen3"),
    Case("hermes", f"<think>Hm.\n{hermes('f', '{}')}", [*thought("Hm."), *calls(("f", "{}"))], "qwen3"),
    Case(
        "hermes",
        f"Hm.{hermes('f', '{}')}\n{hermes('f', '{}')}",
        [*thought("Hm."), *calls(("f", "{}"), ("f", "{}"))],
        "qwen3",
        INSIDE,
    ),
    Case("hermes", "<think>I use <tool_call> or", thought("I use <tool_call> or"), "qwen3"),
    Case("hermes", '<think>as <tool_call>{"a": 1} so', thought('as <tool_call>{"a": 1} so'), "qwen3"),
    coder(
        f"a\n<tool_call>\n<function=f>\n<parameter=s>\nb{CODER_END}",
        *thought("a"),
        *calls(("f", '{"s": "b"}')),
        reasoning="qwen3",
        **INSIDE,
    ),
    coder(
        f"<think>a <function=f>\n<parameter=s>\nb{CODER_END}",
        *thought("a"),
        *calls(("f", '{"s": "b"}')),
        reasoning="qwen3",
    ),
    coder(
        f"<think>a <function=f>\n<parameter=s>\nb{CODER_END}</think>c",
        *thought(f"a <function=f>\n<parameter=s>\nb{CODER_END}"),
        *content("c"),
        reasoning="qwen3",
    ),
    Case(
        "gemma4",
        "<|channel>thought\nHm.<|tool_call>call:f{}<tool_call|>",
        [*thought("Hm."), *calls(("f", "{}"))],
        "gemma4",
    ),
    Case("mistral", "[THINK]Hm. [TOOL_CALLS]f{}", [*thought("Hm."), *calls(("f", "{}"))], "mistral"),
    Case("glm45", "<think>Hm.<tool_call>f</tool_call>", [*thought("Hm."), *calls(("f", "{}"))], "glm45"),
]

HABITS = [
    *TYPES,
    *TAGGED,
    *JSON,
    *GEMMA,
    *IN_REASONING,
    *(called("mistral", f"[TOOL_CALLS]f{text}", expected or text) for text, expected in ARGUMENT_TEXTS),
]
