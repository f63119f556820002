"""What models write, family by family, and what must come of it: texts that are right, odd, malformed and cut short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from inflight.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
    join_deltas,
)
from inflight.parsers.output_parser import OutputParser
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
        return create_output_parser(self.tool, self.reasoning, make_call_id=counted_ids(), **options)


def counted_ids() -> Callable[[], str]:
    numbers = count()
    return lambda: f"id{next(numbers)}"


def parse(parser: OutputParser, pieces: Sequence[str]) -> list[Event]:
    """All events, neighbouring deltas joined."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return join_deltas(events + parser.finish())


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
            '{"name": "f", "arguments": "{}"}',
            '{"name": "f", "arguments": null}',
            '{"name": "f", "other": {}}',
            '{"arguments": {}}',
            '{"name": "a\\ud800", "arguments": {}}',
            '{"name": "\\x", "arguments": {}}',
            '{"name" "f"}',
            '{"arguments": {"a": 1}, "name": "f"',
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
            'I say {"name": "f", "parameters": {}}',
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
    Case(
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=n>\n12",
        calls(("f", '{"n": 12')),
    ),
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

INSIDE = {"prompt_ends_in_reasoning": True}
REASONING = [
    Case(
        "hermes",
        f"<think>\nLet me {hermes('f', '{}')} </thin\n</think>\n\n{hermes('g', '{}')}",
        [*thought(f"Let me {hermes('f', '{}')} </thin"), *calls(("g", "{}"))],
        "qwen3",
    ),
    Case(None, "\n<think>\n\n</think>\n\nHi <think>x</think> \n", content("Hi <think>x</think> \n"), "qwen3"),
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
]

CASES = [*HERMES, *LLAMA, *MISTRAL, *CODER, *REASONING]
