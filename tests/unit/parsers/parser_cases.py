"""What models write, family by family, and what must come of it: texts that are right, odd, malformed and cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from inflight.interface.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.reasoning import Opening
from inflight.parsers.selector import create_output_parser

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}, "b": {}},
            },
        },
    }
]


def content(text: str) -> list[Event]:
    return [ContentDelta(text)]


def thought(text: str) -> list[Event]:
    return [ReasoningDelta(text)]


def calls(*pairs: tuple[str, str]) -> list[Event]:
    events: list[Event] = []
    for i, (name, arguments) in enumerate(pairs):
        events += [ToolCallStart(i, f"id{i}", name), ToolArgumentsDelta(i, arguments)]
    return events


@dataclass(frozen=True)
class Case:
    tool: str | None
    text: str
    expected: list[Event]
    reasoning: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def parser(self) -> OutputParser:
        options = {"tools": TOOLS, **self.options}
        return with_ids(create_output_parser(self.tool, self.reasoning, **options), counted_ids())


def with_ids(parser: OutputParser, make_id: Callable[[], str]) -> OutputParser:
    """The same parser, but `make_id` makes the ids of its calls, so that they can be compared."""
    parser._writer._make_id = make_id
    return parser


def counted_ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def parse(parser: OutputParser, pieces: Sequence[str], *, is_cut: bool = True) -> list[Event]:
    """All events, neighbouring deltas joined. `is_cut`: a limit ends the text, as in the cases that are cut short."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return join_deltas(events + parser.finish(is_cut=is_cut))


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TRICKY = '{"s": "}</tool_call> \\"{[\\\\", "u": "caf\\u00e9 東京 🙂", "l": [[{}], "]", null, 1.5e3], "[TOOL_CALLS]": "<think>"}'

HERMES = [
    Case("hermes", "", []),
    Case(
        "hermes",
        " plain <b>text</b> < tool_call> <<tool_cal \n",
        content(" plain <b>text</b> < tool_call> <<tool_cal \n"),
    ),
    Case("hermes", hermes("f", "{}"), calls(("f", "{}"))),
    Case(
        "hermes",
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        content('<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
    ),
    Case(
        "hermes",
        '<tool_call>{"type": "function", "id": "x", "name": "f", "arguments": {}}</tool_call>',
        calls(("f", "{}")),
    ),
    Case("hermes", hermes("f", TRICKY), calls(("f", TRICKY))),
    Case(
        "hermes",
        f"Wait. \n{hermes('f', '{}')}\n{hermes('g', TRICKY)} \n",
        [*content("Wait."), *calls(("f", "{}"), ("g", TRICKY))],
    ),
    Case("hermes", f"{hermes('f', '{}')}\n\nand", [*calls(("f", "{}")), *content("\n\nand")]),
    Case("hermes", '<tool_call>{"arguments":{"a":[1]},"name":"f"}</tool_call>', calls(("f", '{"a":[1]}'))),
    Case(
        "hermes",
        '<tool_call> { "id" : "x" , "name" : "\\u0066\\"" , "parameters" : { } } </tool_call>',
        calls(('f"', "{ }")),
    ),
    Case("hermes", '<tool_call>{"name": "f"}</tool_call>', calls(("f", "{}"))),
    Case("hermes", "a <tool_call> b </tool_call> c", content("a <tool_call> b </tool_call> c")),
    Case("hermes", f"<tool_call>\n{hermes('f', '{}')}", [*content("<tool_call>"), *calls(("f", "{}"))]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {}} oops', [*calls(("f", "{}")), *content("} oops")]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a', calls(("f", '{"s": "a'))),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\\', calls(("f", '{"s": "a\\'))),
    *(
        Case("hermes", f'a <tool_call>\n{{"name": "f", "arguments": {{}}{end}', [*content("a"), *calls(("f", "{}"))])
        for end in ("", " ", "}", "}\n", "}\n</", "}\n</tool_call", ", ", ', "id": "')
    ),
    Case("hermes", f'{hermes("f", "{}")}\n<tool_call>\n{{"na', [*calls(("f", "{}")), *content('\n<tool_call>\n{"na')]),
    Case("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool', [*calls(("f", "{}")), *content("}<tool")]),
    Case("hermes", "</tool_call> <tool_call", content("</tool_call> <tool_call")),
    *(
        Case("hermes", f"x\n<tool_call>{body}</tool_call>\n", content(f"x\n<tool_call>{body}</tool_call>\n"))
        for body in (
            "",
            "{}",
            "[]",
            '{"name": ""}',
            '{"name": 3, "arguments": {}}',
            '{"name": "f", "arguments": "a"}',
            '{"name": "f", "arguments": 3}',
            '{"name": "f", "other": {}}',
            '{"arguments": {}}',
            '{"name": "a\\ud800", "arguments": {}}',
            '{"name": "\\x", "arguments": {}}',
            '{"name" "f"}',
            '{"arguments": {"a": 1}, "kind": "f"',
            '{"name": "f',
        )
    ),
    Case(
        "hermes",
        f"a{hermes('f', '{}')}b{hermes('g', TRICKY)}",
        [*content("a"), *calls(("f", "{}")), *content("b")],
        options={"max_tool_calls": 1},
    ),
    Case("hermes", hermes("f", "{}"), content(hermes("f", "{}")), options={"tools": None}),
    Case(None, f"a \n{hermes('f', '{}')}", content(f"a \n{hermes('f', '{}')}")),
]

LLAMA = [
    Case("llama3_json", '{"name": "f", "parameters": {"a": "; {"}}', calls(("f", '{"a": "; {"}'))),
    Case("llama3_json", ' <|python_tag|> {"name": "f", "parameters": {}}', calls(("f", "{}"))),
    Case(
        "llama3_json",
        f'{{"type": "function", "name": "f", "parameters": {TRICKY}}}; {{"name":"g","arguments":{{}}}}\n',
        calls(("f", TRICKY), ("g", "{}")),
    ),
    Case("llama3_json", '{"name": "f", "parameters": {}} and more; {', [*calls(("f", "{}")), *content(" and more; {")]),
    Case("llama3_json", '{"name": "f", "parameters": {}}; more', [*calls(("f", "{}")), *content("; more")]),
    *(
        Case("llama3_json", text, content(text))
        for text in (
            'I say {"name": "g", "parameters": {}}',
            '{"name": "Bob", "age": 3}',
            '{"name": "Bob"}',
            '  {"answer": {"a": 1}}  ',
            "<|python_tag|>print(1)",
            "<|python",
            "{",
            "; {}",
        )
    ),
]

MISTRAL = [
    Case("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', calls(("f", '{"a": "]"}'))),
    Case(
        "mistral",
        f'Hi [TOOL_CALLS][{{"name": "f", "arguments": {TRICKY}, "id": "abcdefghi"}}, {{"name": "g", "arguments": {{}}}}] x',
        [*content("Hi"), *calls(("f", TRICKY), ("g", "{}")), *content(" x")],
    ),
    Case("mistral", f"[TOOL_CALLS]f{TRICKY}[TOOL_CALLS]g-2{{}}", calls(("f", TRICKY), ("g-2", "{}"))),
    Case(
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS] g[CALL_ID]abcdefghi[ARGS] {}',
        calls(("f", '{"a": 1}'), ("g", "{}")),
    ),
    *(
        Case("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{}}{end}', calls(("f", "{}")))
        for end in ("", "}", "} ", "},", '}, {"name')
    ),
    Case("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]', [*calls(("f", "{}")), *content("}, 3]")]),
    *(
        Case("mistral", text, content(text))
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALL [TOOL_CALLS] []",
            "[TOOL_CALLS] f g{}",
            "[TOOL_CALLS]{}",
            "[TOOL_CALLS]f[CALL_ID]a{}",
            "a [b] [TOOL_CALLS]f",
        )
    ),
]


def xml(name: str, *arguments: tuple[str, str], nl: str = "\n") -> str:
    body = "".join(f"<parameter={key}>{nl}{value}{nl}</parameter>{nl}" for key, value in arguments)
    return f"<tool_call>{nl}<function={name}>{nl}{body}</function>{nl}</tool_call>"


CODER = [
    Case(
        "qwen3_coder",
        xml("f", ("s", 'a "b"\n\\ </p> 東京'), ("n", "3")),
        calls(("f", '{"s": "a \\"b\\"\\n\\\\ </p> 東京", "n": 3}')),
    ),
    Case(
        "qwen3_coder",
        xml("f", ("o", '{"a": [1, "<x>"]}'), ("b", "True"), ("n", "about 3"), nl=""),
        calls(("f", '{"o": {"a": [1, "<x>"]}, "b": true, "n": "about 3"}')),
    ),
    Case(
        "qwen3_coder",
        f"So: {xml('g')}\n{xml('g', ('x', ''), ('n', '1'))}",
        [*content("So:"), *calls(("g", "{}"), ("g", '{"x": "", "n": "1"}'))],
    ),
    Case("qwen3_coder", xml("f", ("n", "NaN"), ("b", "None")), calls(("f", '{"n": "NaN", "b": null}'))),
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nab\n</para",
        calls(("f", '{"s": "ab\n</para'.replace("\n", "\\n"))),
    ),
    Case("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=n>\n12", calls(("f", '{"n": 12'))),
    *(
        Case(
            "qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n{end}", calls(("f", arguments))
        )
        for end, arguments in (
            ("</func", '{"n": 1'),
            ("<param", '{"n": 1'),
            ("</function>", '{"n": 1}'),
            ("</function>\n</tool", '{"n": 1}'),
        )
    ),
    Case("qwen3_coder", "<tool_call>\n<function=>", content("<tool_call>\n<function=>")),
    Case("qwen3_coder", "<tool_call>\n<func", content("<tool_call>\n<func")),
]

INSIDE = {"opening": Opening.OPEN}


def seed(name: str, *arguments: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments)
    return f"<seed:tool_call>\n<function={name}>\n{body}</function>\n</seed:tool_call>"


SEED = [
    Case(
        "seed_oss",
        "<seed:think>Hm.</seed:think>OK\n\n" + seed("f", ("s", "\na\n"), ("n", "3")) + "\n" + seed("g"),
        [*thought("Hm."), *content("OK"), *calls(("f", '{"s": "\\na\\n", "n": 3}'), ("g", "{}"))],
        "seed_oss",
    ),
    Case(
        "seed_oss",
        seed("f", ("o", """{'a': [1, None], 'it': "it's"}"""), ("b", "True")),
        calls(("f", '{"o": {"a": [1, null], "it": "it\'s"}, "b": true}')),
    ),
    Case("seed_oss", xml("f", ("n", "1")), content(xml("f", ("n", "1")))),
    Case("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=n>12", calls(("f", '{"n": 12'))),
    Case("seed_oss", "<seed:tool_call>\n<func", content("<seed:tool_call>\n<func")),
]


def glm(name: str, *arguments: tuple[str, str], nl: str = "\n") -> str:
    body = "".join(f"<arg_key>{key}</arg_key>{nl}<arg_value>{value}</arg_value>{nl}" for key, value in arguments)
    return f"<tool_call>{name}{nl}{body}</tool_call>"


GLM = [
    Case(
        "glm45",
        "So:\n" + glm("f", ("s", "a </tool_call>\n"), ("n", "3")) + "\n" + glm("g"),
        [*content("So:"), *calls(("f", '{"s": "a </tool_call>\\n", "n": 3}'), ("g", "{}"))],
    ),
    Case("glm45", glm("f", ("o", '{"a": "<"}'), ("b", "two"), nl=""), calls(("f", '{"o": {"a": "<"}, "b": "two"}'))),
    Case("glm45", glm("g", ("x", "1"), ("y", ""), nl=""), calls(("g", '{"x": "1", "y": ""}'))),
    Case("glm45", glm("f", (" n ", "1"), (" s\n", "1"), nl=""), calls(("f", '{"n": 1, "s": "1"}'))),
    # a tool whose fields are not in an object "function"
    Case(
        "glm45",
        glm("f", ("n", "1"), ("s", "1"), nl=""),
        calls(("f", '{"n": 1, "s": "1"}')),
        options={"tools": [TOOLS[0]["function"]]},
    ),
    Case("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>ab</arg", calls(("f", '{"s": "ab</arg'))),
    Case("glm45", "<tool_call>f<arg_key>s</arg_key><arg_value>ab</arg_value></tool", calls(("f", '{"s": "ab"'))),
    *(
        Case("glm45", text, content(text))
        for text in (
            "<tool_call>",
            "a <tool_call> two words </tool_call> b",
            "<tool_call>f\n<arg",
            "<tool_call></tool_call>",
            "<tool_call>f <b> </tool_call>",
            "<tool_call>f\x07</tool_call>",
        )
    ),
    Case("glm45", f"<think>x</think>\n{glm('g')}", [*thought("x"), *calls(("g", "{}"))], "glm45"),
]


def minimax(*invokes: tuple[str, Sequence[tuple[str, str]]]) -> str:
    body = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
        + "</invoke>\n"
        for name, arguments in invokes
    )
    return f"<minimax:tool_call>\n{body}</minimax:tool_call>"


MINIMAX = [
    Case(
        "minimax_m2",
        "Hm.</think>\nOK\n\n" + minimax(("f", [("s", '</invoke>\n"'), ("n", "3")]), ("g", [])) + "\n",
        [*thought("Hm."), *content("OK"), *calls(("f", '{"s": "</invoke>\\n\\"", "n": 3}'), ("g", "{}"))],
        "minimax_m2",
        INSIDE,
    ),
    Case(
        "minimax_m2",
        f"{minimax(('g', []))}{minimax(('f', [('n', 'null'), ('b', '[1, 2]')]))} x",
        [*calls(("g", "{}"), ("f", '{"n": null, "b": [1, 2]}')), *content(" x")],
    ),
    Case(
        "minimax_m2",
        '<minimax:tool_call><invoke name="g"></invoke><invoke name=g>',
        [*calls(("g", "{}")), *content("<invoke name=g>")],
    ),
    Case("minimax_m2", '<minimax:tool_call><invoke name="g"></invoke><invoke na', calls(("g", "{}"))),
    *(
        Case("minimax_m2", text, content(text))
        for text in (
            "<minimax:tool_call>\n</minimax:tool_call>",
            '<minimax:tool_call><invoke name="">',
            '<tool_call><invoke name="f"></invoke></tool_call>',
            '<minimax:tool_call>\n<invoke name="f">\n<para',
        )
    ),
]


def deepseek(*bodies: str, between: str = "") -> str:
    inner = between.join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"


DEEPSEEK = [
    Case(
        "deepseek_v31",
        f"a</think>Look. {deepseek(f'f<｜tool▁sep｜>{TRICKY}', 'g<｜tool▁sep｜>{}')}",
        [*thought("a"), *content("Look."), *calls(("f", TRICKY), ("g", "{}"))],
        "deepseek_v3",
        INSIDE,
    ),
    Case(
        "deepseek_v3",
        "a</think>Look.\n\n" + deepseek(v3("f", TRICKY), v3("g", "{}"), between="\n") + "\n",
        [*thought("a"), *content("Look."), *calls(("f", TRICKY), ("g", "{}"))],
        "deepseek_r1",
    ),
    *(
        Case("deepseek_v31", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{rest}", calls(("f", "{}")))
        for rest in ("{}", "{}<｜tool▁call", "{}<｜tool▁call▁end｜>", "{}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜")
    ),
    Case(
        "deepseek_v31",
        deepseek("f<｜tool▁sep｜>{}", "g"),
        [
            *calls(("f", "{}")),
            *content("<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
        ],
    ),
    *(
        Case("deepseek_v3", deepseek(v3("f", "{}")).partition("```<")[0] + rest, calls(("f", "{}")))
        for rest in ("", "``", "```", "```<｜tool▁call▁end｜><｜tool▁c")
    ),
    Case("deepseek_v3", deepseek("f<｜tool▁sep｜>{}"), content(deepseek("f<｜tool▁sep｜>{}"))),
    Case("deepseek_v3", deepseek(v3("f", "[]")), content(deepseek(v3("f", "[]")))),
    Case("deepseek_v31", deepseek(), content(deepseek())),
    Case("deepseek_v31", deepseek("two words<｜tool▁sep｜>{}"), content(deepseek("two words<｜tool▁sep｜>{}"))),
]

GEMMA = [
    Case(
        "gemma4",
        '<|channel>thought\nHm, <tool>\n<channel|>Wait.<|tool_call>call:f{b:[1,-2.5e3,<|"|>x<|"|>,{}],'
        's:<|"|>a "b",}\n<\\<|"|>,o:{k:<|"|><|"|>,t:true,z:None}}<tool_call|><|tool_call>call:g{}<tool_call|>',
        [
            *thought("Hm, <tool>"),
            *content("Wait."),
            *calls(
                ("f", '{"b": [1, -2.5e3, "x", {}], "s": "a \\"b\\",}\\n<\\\\", "o": {"k": "", "t": true, "z": null}}'),
                ("g", "{}"),
            ),
        ],
        "gemma4",
    ),
    Case("gemma4", "<|channel>thought\n<channel|>Hi", content("Hi"), "gemma4"),
    Case("gemma4", "\nHm\n<channel|>Hi", [*thought("Hm"), *content("Hi")], "gemma4", INSIDE),
    Case(
        "gemma4",
        "<|tool_call> call:f { a : yes sir , <k : < }",
        content("<|tool_call> call:f { a : yes sir , <k : < }"),
    ),
    Case(
        "gemma4", "<|tool_call> call:f{ a : yes sir , <k : < }<tool_call|>", calls(("f", '{"a": "yes sir", "<k": "<"}'))
    ),
    Case(
        "gemma4", "<|tool_call>call:f{é:ü, k:1} \n<tool_call|> x", [*calls(("f", '{"é": "ü", "k": 1}')), *content(" x")]
    ),
    Case(
        "functiongemma",
        'Wait.<start_function_call>call:f{s:<escape>a {"b"}, c<escape>,n:1,o:{k:[<escape><escape>,true]}}<end_function_call>'
        "<start_function_call>call:g{}<end_function_call><start_function_response>",
        [*content("Wait."), *calls(("f", '{"s": "a {\\"b\\"}, c", "n": 1, "o": {"k": ["", true]}}'), ("g", "{}"))],
    ),
    Case("functiongemma", "<start_function_call>call:f{s:<escape>a<esc", calls(("f", '{"s": "a<esc'))),
    Case("gemma4", '<|tool_call>call:f{s:<|"|>a<|', calls(("f", '{"s": "a<|'))),
    Case("gemma4", "<|tool_call>call:f{n:12", calls(("f", '{"n": 12'))),
    Case("gemma4", "<|tool_call>call:f{n:tru", calls(("f", '{"n": tru'))),
    Case("gemma4", "<|tool_call>call:f{n:1}<tool", calls(("f", '{"n": 1}'))),
    Case("gemma4", "<|tool_call>call:f{n:1} x", [*calls(("f", '{"n": 1}')), *content(" x")]),
    *(
        Case("gemma4", text, content(text))
        for text in ("<|tool_call>", "<|tool_call>call:{}<tool_call|>", "<|tool_call>f{}", "<|tool_call>call:f")
    ),
]

ANALYSIS = "<|channel|>analysis<|message|>Let me think.\n<|end|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"s": "<|end"}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>It <rains>.\n"
HARMONY = [
    Case("openai", f"{ANALYSIS}{FINAL}", [*thought("Let me think."), *content("It <rains>.\n")], "openai_gptoss"),
    Case("openai", f"{ANALYSIS}{FINAL}", [*thought("Let me think."), *content("It <rains>.\n")]),
    Case(None, f"{ANALYSIS}{FINAL}<|return|>", [*thought("Let me think."), *content("It <rains>.\n")], "openai_gptoss"),
    Case(
        "openai",
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}"
        f" <|start|>assistant to=functions.g<|channel|>commentary json<|message|>{{}}",
        [*thought("Let me think."), *content("Wait."), *calls(("f", '{"s": "<|end"}'), ("g", "{}"))],
        "openai_gptoss",
    ),
    Case(
        "openai",
        f" to=functions.f<|channel|>commentary<|message|> {TRICKY}\n<|call|>{ANALYSIS}{FINAL}",
        [*calls(("f", TRICKY)), *thought("Let me think."), *content("It <rains>.\n")],
        "openai_gptoss",
    ),
    Case("openai", "<|channel|>analysis to=functions.f<|message|>{}<|call|>", calls(("f", "{}")), "openai_gptoss"),
    Case(None, CALL, content('{"s": "<|end"}'), "openai_gptoss"),
    Case("openai", CALL, content('{"s": "<|end"}'), "openai_gptoss", {"tools": None}),
    Case("openai", f"{CALL}{CALL}x", [*calls(("f", '{"s": "<|end"}')), *content("x")], None, {"max_tool_calls": 1}),
    Case(
        None,
        f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL.replace('It', ' It')}",
        [*thought("Let me think.\n\nLet me think."), *content("It <rains>.\n")],
        "openai_gptoss",
    ),
    Case("openai", CALL.replace("{", "["), content('["s": "<|end"}'), "openai_gptoss"),
    Case("openai", CALL.replace("functions.f", "python"), content('{"s": "<|end"}'), "openai_gptoss"),
    Case("openai", "<|channel|>analysis to=python code<|message|>1+1<|call|>", thought("1+1"), "openai_gptoss"),
    Case("openai", f"b<|end|>{FINAL}", [*thought("b"), *content("It <rains>.\n")], "openai_gptoss", INSIDE),
    Case("openai", "<|channel|>analysis<|message|>a <|channel|>final<|message|>b", [*thought("a"), *content("b")]),
    Case("openai", "<|start|>assistant<|message|>Hi", content("Hi")),
    # a receiver that is named like a channel, and one whose name cannot be shown
    Case(
        "openai",
        "<|channel|>commentary to=functions.analysis<|message|>{}<|call|>",
        content("{}"),
        "openai_gptoss",
        {"tools": None},
    ),
    Case("openai", "<|channel|>commentary to=functions.f\x07<|message|>{}<|call|>", content("{}"), "openai_gptoss"),
    *(
        Case(None, f"{FINAL}<|end|><|start|>assistant{rest}", content("It <rains>.\n"), "openai_gptoss")
        for rest in (
            "",
            "<|ch",
            "<|channel|>",
            "<|channel|>fin",
            "<|channel|>final<|message|>",
            "<|channel|>final <|con",
        )
    ),
    Case("openai", '<|channel|>commentary to=functions.f<|message|>{"s": "a', calls(("f", '{"s": "a'))),
    *(
        Case("openai", text, content(text), "openai_gptoss")
        for text in (" to you", " Hi\n", "<|channel|>two\nlines<|message|>", "<|start|>a<b<|message|>", "<|chan")
    ),
]

REASONING = [
    Case(
        "hermes",
        f"<think>\nLet me {hermes('f', '{}')} </thin\n</think>\n\n{hermes('g', '{}')}",
        [*thought(f"Let me {hermes('f', '{}')} </thin"), *calls(("g", "{}"))],
        "qwen3",
    ),
    Case(None, "\n<think>\n\n</think>\n\nHi <think>x</think> \n", [*content("Hi "), *thought("x")], "qwen3"),
    Case(None, "a\n</think>\n b \n", [*thought("a"), *content("b \n")], "qwen3", INSIDE),
    Case(None, "<think>a</think>b", [*thought("a"), *content("b")], "qwen3", INSIDE),
    Case(None, "a\n</think>\n b", [*thought("a"), *content("b")], "deepseek_r1"),
    Case(None, " a </think> b", content(" a </think> b"), "qwen3"),
    Case(None, "<think> cut\n off \n", thought("cut\n off"), "qwen3"),
    Case(None, "<thin", content("<thin"), "qwen3"),
    Case(
        "mistral",
        "[THINK]x [TOOL_CALLS] [/THINK] y [TOOL_CALLS]f{}",
        [*thought("x [TOOL_CALLS]"), *content("y"), *calls(("f", "{}"))],
        "mistral",
    ),
    Case(
        "llama3_json",
        '<think>t</think>\n{"name": "f", "parameters": {}}',
        [*thought("t"), *calls(("f", "{}"))],
        "qwen3",
    ),
    Case("hermes", "  \n ", content("  \n "), "qwen3"),
    # white space around a thought between two words: one side of it stays
    *(
        Case("hermes", f"a{before}<think>x</think>{behind}b", [*content("a"), *thought("x"), *content(shown)], "qwen3")
        for before, behind, shown in ((" ", " \n", " b"), ("", " ", " b"), (" ", "", " b"), ("", "", "b"))
    ),
]

CASES = [*HERMES, *LLAMA, *MISTRAL, *CODER, *SEED, *GLM, *MINIMAX, *DEEPSEEK, *GEMMA, *HARMONY, *REASONING]
