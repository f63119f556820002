"""What models of further families write, and what must come of it. In all of these cases the model has ended the text."""

from __future__ import annotations

from inflight.interface.events import Event, ToolArgumentsDelta, ToolCallStart
from tests.unit.parsers.parser_cases import INSIDE, Case, calls, content, hermes, thought, xml

PYTHON = {
    "lfm2": ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": ("<function_calls>\n", "\n</function_calls>"),
    "pythonic": ("[", "]"),
}


def python(text: str, *arguments: str) -> list[Case]:
    """The call with these texts as arguments, in each family that writes calls as in Python."""
    found = calls(*(("f", each) for each in arguments))
    return [Case(tool, f"{begin}{text}{end}", found) for tool, (begin, end) in PYTHON.items()]


def doubtful(text: str, begun: str, rest: str) -> list[Case]:
    """A call with a doubtful place: from there on, everything is passed on as it was written."""
    after = {"lfm2": "]", "olmo3": "\n", "pythonic": "]"}  # it ends at the closing tag
    return [
        Case(tool, f"{begin}{text}{end}", calls(("f", begun + rest + after[tool])))
        for tool, (begin, end) in PYTHON.items()
    ]


PYTHONIC = [
    *python("f()", "{}"),
    *python(
        'f(s="x", n=-3, b=[1, 2.5, None], o={"a": True, \'k\': "it\'s"})',
        '{"s": "x", "n": -3, "b": [1, 2.5, null], "o": {"a": true, "k": "it\'s"}}',
    ),
    *python("f(s='a'), f( n = 1 , )", '{"s": "a"}', '{"n": 1}'),
    *python("f(s='a')\nf(n=1)", '{"s": "a"}', '{"n": 1}'),
    *python("f(n=1);f(n=2)", '{"n": 1}', '{"n": 2}'),
    # values of Python
    *python("f(b=(1, 'x'), n=0x1F, o={1: (), True: [[]]})", '{"b": [1, "x"], "n": 31, "o": {"1": [], "true": [[]]}}'),
    *python("f(b=(1,), n=1_000)", '{"b": [1], "n": 1000}'),
    *python("f(b=[.5, 5., +2, 1e3, -0.5e-2])", '{"b": [0.5, 5.0, 2, 1e3, -0.5e-2]}'),
    *python("f(b=[true, false, null])", '{"b": [true, false, null]}'),
    *python(
        'f(s="""a "b" \'c\'\n""", b=r"\\d\\n", o={\'\'\'k\'\'\': u"é"})',
        '{"s": "a \\"b\\" \'c\'\\n", "b": "\\\\d\\\\n", "o": {"k": "é"}}',
    ),
    *python(
        "f(s='\\x41\\u00e9\\U0001F600\\101\\'\\\"\\d\\\\', b='\\ud83d\\ude00')",
        '{"s": "\\u0041\\u00e9😀\\u0041\'\\"\\\\d\\\\", "b": "\\ud83d\\ude00"}',
    ),
    *python("f(s='a', # note)\n n=1)", '{"s": "a", "n": 1}'),
    # arguments without a name, and a dict in place of the arguments
    *python("f('x', 3, b=1)", '{"s": "x", "n": 3, "b": 1}'),
    *python("f({'n': 1, 'x.y': [2]})", '{"n": 1, "x.y": [2]}'),
    *python("f(**{'n': 1})", '{"n": 1}'),
    *python("f(x.y-z=1, 東=2)", '{"x.y-z": 1, "東": 2}'),
    # beside Python
    *python("f(s='it's \"so\"\nhere')", '{"s": "it\'s \\"so\\"\\nhere"}'),
    *python('f(s="x" n=1)', '{"s": "x", "n": 1}'),
    *python("f(n=1 s='x',, b=[1,,2])", '{"n": 1, "s": "x", "b": [1, 2]}'),
    *python("f(s=hello, n: 1)", '{"s": "hello", "n": 1}'),
    *python("f(n=1", '{"n": 1}'),
    *python("f(s='x'", '{"s": "x"}'),
    # doubtful
    *doubtful('f(s="x, n="y")', '{"s": "x, n=', '"y")'),
    *doubtful('f(b=["a" "b"])', '{"b": ["a', '" "b"])'),
    *doubtful("f(n=1+ 2)", '{"n": ', "1+ 2)"),
    *doubtful("f(n=g(2))", '{"n": ', "g(2))"),
    *doubtful("f(b=f'{x}')", '{"b": ', "f'{x}')"),
    *doubtful("f(n=1, n=2)", '{"n": 1', "n=2)"),
    *doubtful("f(n=1, 'x')", '{"n": 1', "'x')"),
    *doubtful("f(b=[1, 2)", '{"b": [1, 2', ")"),
    *doubtful("f(b=(1))", '{"b": [1', ")"),
    *doubtful("f(n=two)", '{"n": ', "two)"),
    *(Case(tool, text, content(text)) for tool in PYTHON for text in ("f(n=1)", "[f](x) and [1]", "[f", "a [f()]")),
    *(
        Case(tool, text, content(text))
        for tool, (begin, end) in PYTHON.items()
        for text in (f"{begin}{end}", f"{begin}f{end}", f"{begin}1, 2{end}", f"{begin}f g(){end}")
    ),
    Case("pythonic", "[g(n=1)]", content("[g(n=1)]")),
    Case("lfm2", "<|tool_call_start|>[g(n=1)]<|tool_call_end|>", calls(("g", '{"n": 1}'))),
    Case("lfm2", "<|tool_call_start|>f(n=1)<|tool_call_end|>", calls(("f", '{"n": 1}'))),
    Case(
        "lfm2", '<|tool_call_start|>[{"name": "f", "arguments": {"n": 1}}]<|tool_call_end|>', calls(("f", '{"n": 1}'))
    ),
    Case("lfm2", '<|tool_call_start|>{"name": "f", "arguments": {}}<|tool_call_end|>', calls(("f", "{}"))),
    Case(
        "lfm2",
        "So: <|tool_call_start|>[f()]<|tool_call_end|>\nWell",
        [*content("So:"), *calls(("f", "{}")), *content("\nWell")],
    ),
    Case("olmo3", "<function_calls>[f(), f(n=1)]</function_calls>", calls(("f", "{}"), ("f", '{"n": 1}'))),
    Case("pythonic", "[f(), g(n=1)]\n\nDone.", [*calls(("f", "{}"), ("g", '{"n": 1}')), *content("\n\nDone.")]),
    Case("llama4_pythonic", "<|python_start|>[f(n=1)]<|python_end|>", calls(("f", '{"n": 1}'))),
    Case("pythonic", "[f(n=1)]\n[f(n=2)]", calls(("f", '{"n": 1}'), ("f", '{"n": 2}'))),
]


def named(*arguments: str, name: str = "name", key: str = "arguments", more: str = "") -> str:
    """JSON calls of f, with commas between them."""
    return ", ".join(f'{{{more}"{name}": "f", "{key}": {each}}}' for each in arguments)


ONE, TWO = '{"s": "]}</tool_calls>"}', '{"n": 1}'
ID, TOOL_ID = '"id": 0, ', '"tool_call_id": "0", '
BETWEEN = {
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    "minimax": ("<tool_calls>", "</tool_calls>"),
    "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
    "nemotron_mini": ("<toolcall> ", " </toolcall>"),
    "granite": ("<|tool_call|>", ""),
    "phi4_mini_json": ("<|tool_call|>", "<|/tool_call|>"),
    "internlm": ("<|action_start|><|plugin|>", "<|action_end|>"),
    "cohere_command3": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "command_r": ("Action:\n```json\n", "```"),
}
LISTS = [
    *(
        Case(tool, f"{begin}{text}{end}", calls(("f", ONE), ("f", TWO)))
        for tool, (begin, end) in BETWEEN.items()
        for text in (
            f"[{named(ONE, TWO)}]",
            f"[\n    {named(ONE)},\n    {named(TWO)}\n]",
            f"\n{named(ONE)}\n{named(TWO)}\n",
            f"[{named(ONE, TWO, key='parameters', more=ID)}]\n",
        )
    ),
    *(
        Case(tool, f"Well. {begin}[{named(ONE)}]{end}\nSo.", [*content("Well."), *calls(("f", ONE)), *content("\nSo.")])
        for tool, (begin, end) in BETWEEN.items()
    ),
    *(Case(tool, f"{begin}{end}", content(f"{begin}{end}")) for tool, (begin, end) in BETWEEN.items()),
    *(Case(tool, f"{begin}[1, 2]{end}", content(f"{begin}[1, 2]{end}")) for tool, (begin, end) in BETWEEN.items()),
    Case(
        "cohere_command3",
        f"<|START_ACTION|>[\n{named(ONE, name='tool_name', key='parameters', more=TOOL_ID)}\n]<|END_ACTION|>",
        calls(("f", ONE)),
    ),
    Case("phi4_mini_json", f"functools[{named(ONE, TWO)}]", calls(("f", ONE), ("f", TWO))),
    Case("granite-20b-fc", f"<function_call> {named(ONE)} <function_call> {named(TWO)}", calls(("f", ONE), ("f", TWO))),
    Case("gigachat3", f"<|function_call|>{named(ONE)}<|message_sep|>", calls(("f", ONE))),
    Case(
        "gigachat3",
        f"Hm<|message_sep|>\n\nfunction call<|role_sep|>\n{named(ONE)}",
        [*content("Hm"), *calls(("f", ONE))],
    ),
    Case("apertus", f'<|tools_prefix|>[{{"f": {ONE}}}, {{"g": {{}}}}]<|tools_suffix|>', calls(("f", ONE), ("g", "{}"))),
    Case("apertus", "<|tools_prefix|>[3]<|tools_suffix|>", content("<|tools_prefix|>[3]<|tools_suffix|>")),
    *(
        Case("xlam", f"{begin}[{named(ONE, TWO)}]{end}", calls(("f", ONE), ("f", TWO)))
        for begin, end in (("", ""), ("```json\n", "\n```"), ("[TOOL_CALLS] ", ""), ("<tool_call>", "</tool_call>"))
    ),
    *(Case("xlam", text, content(text)) for text in ("[1, 2]", '[{"name": "Bob", "arguments": {}}]', "Call f")),
    Case("llama4_json", f"<|python_start|><|python_end|>{named(ONE, key='parameters')}", calls(("f", ONE))),
    Case("llama4_json", "<|python_start|>1 + 1<|python_end|>", content("<|python_start|>1 + 1<|python_end|>")),
]

KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SOLAR = "<|tool_call:begin|>{}<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>"


def with_ids(*ids: str) -> list[Event]:
    return [event for i, each in enumerate(ids) for event in (ToolCallStart(i, each, "f"), ToolArgumentsDelta(i, TWO))]


NAMED = [
    Case(
        "kimi_k2",
        f"So.<|tool_calls_section_begin|>{KIMI.format('f:0', TWO)}{KIMI.format('f:1', TWO)}<|tool_calls_section_end|>",
        [*content("So."), *with_ids("functions.f:0", "functions.f:1")],
    ),
    Case("kimi_k2", f"{KIMI.format('f:0', TWO)}{KIMI.format('f:0', TWO)}", with_ids("functions.f:0", "id0")),
    Case("kimi_k2", f"<|tool_calls_section_begin|>{KIMI.format('f', TWO)}", with_ids("id0")),
    Case("kimi_k2", "<|tool_calls_section_begin|>x", content("<|tool_calls_section_begin|>x")),
    Case("kimi_k2", KIMI.format("f:0", "[]"), content(KIMI.format("f:0", "[]"))),
    Case(
        "solar_open", f"<|tool_calls|>{SOLAR.format('a1', TWO)}{SOLAR.format('a2', TWO)}<|calls|>", with_ids("a1", "a2")
    ),
    Case("solar_open", f"{SOLAR.format('a1', TWO)} x", [*with_ids("a1"), *content("x")]),
    Case(
        "functionary_v3_1",
        f"Hm <function=f>{ONE}</function><function=f>{TWO}</function>",
        [*content("Hm"), *calls(("f", ONE), ("f", TWO))],
    ),
    Case("functionary_v3_1", "<function=f>x</function>", content("<function=f>x</function>")),
    Case(
        "functionary_v3_2",
        f"all\nI look.\n>>>f\n{ONE}\n>>>f\n{TWO}",
        [*content("I look."), *calls(("f", ONE), ("f", TWO))],
    ),
    Case("functionary_v3_2", f"f\n{ONE}", calls(("f", ONE))),
    Case("functionary_v3_2", "all\n>>> 1 + 1\n2", content(">>> 1 + 1\n2")),
    Case("functionary_v3_2", "Plain text", content("Plain text")),
]

DSML = "｜DSML｜"


def dsml(tag: str, *arguments: tuple[str, str, str]) -> str:
    body = "".join(f'<{DSML}parameter name="{key}"{kind}>{value}</{DSML}parameter>\n' for key, kind, value in arguments)
    return f'<{DSML}{tag}>\n<{DSML}invoke name="f">\n{body}</{DSML}invoke>\n</{DSML}{tag}>'


TEXT, OTHER = ' string="true"', ' string="false"'
TAGGED = [
    *(
        case
        for tool, tag in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
        for case in (
            # the tag decides, not the schema
            Case(
                tool,
                "So.\n\n" + dsml(tag, ("s", TEXT, "1 < 2\n"), ("n", TEXT, "3"), ("b", OTHER, '["x", {}]')),
                [*content("So."), *calls(("f", '{"s": "1 < 2\\n", "n": "3", "b": ["x", {}]}'))],
            ),
            Case(tool, dsml(tag, ("s", OTHER, "3"), ("n", "", "3")), calls(("f", '{"s": 3, "n": 3}'))),
            Case(tool, dsml(tag), calls(("f", "{}"))),
            Case(tool, f"<{DSML}{tag}>x", content(f"<{DSML}{tag}>x")),
        )
    ),
    Case(
        "minicpm5",
        '<function name="f"><param name="s">a & b</param><param name="n">3</param></function>',
        calls(("f", '{"s": "a & b", "n": 3}')),
    ),
    Case(
        "minicpm5",
        '<function name="f"><param name="s"><![CDATA[</param>\n<x>]]></param></function> x',
        [*calls(("f", '{"s": "</param>\\n<x>"}')), *content(" x")],
    ),
    Case("minicpm5", '<function name="f"></function><function name="g"></function>', calls(("f", "{}"), ("g", "{}"))),
    Case(
        "hy_v3",
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>s</arg_key:opensource>\n<arg_value:opensource>a\nb</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        calls(("f", '{"s": "a\\nb"}'), ("g", "{}")),
    ),
    Case(
        "longcat",
        "<longcat_tool_call>f\n<longcat_arg_key>n</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        calls(("f", '{"n": 3}')),
    ),
]

M3 = "]<]minimax[>["
SN = '{"s": "a", "n": 3}'


def element(name: str, text: str) -> str:
    return f"{M3}<{name}>{text}{M3}</{name}>"


def m3(*arguments: str) -> str:
    """A call of f in the form of MiniMax-M3."""
    return f'{M3}<tool_call>\n{M3}<invoke name="f">{"".join(arguments)}{M3}</invoke>\n{M3}</tool_call>'


def k3(*arguments: str) -> str:
    """A call of f in the form of Kimi K3."""
    body = "".join(arguments)
    return f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|><|close|>tools<|sep|>'


def k3_argument(key: str, kind: str, text: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'


ITEMS = element("item", "1") + element("item", "x")
NEW_TAGS = [
    Case(
        "minimax_m3",
        "Hm</mm:think>So." + m3(element("s", "a <b> ]"), element("n", "3"), element("o", element("k", ITEMS))),
        [*thought("Hm"), *content("So."), *calls(("f", '{"s": "a <b> ]", "n": 3, "o": {"k": [1, "x"]}}'))],
        "minimax_m3",
        INSIDE,
    ),
    Case("minimax_m3", "</mm:think>Hi", content("Hi"), "minimax_m3"),  # the model has decided not to think
    Case("minimax_m3", m3(element("o", '{"a": 1,}'), element("b", "")), calls(("f", '{"o": {"a": 1}, "b": ""}'))),
    Case("minimax_m3", m3(element("o", ""), element("b", ITEMS)), calls(("f", '{"o": {}, "b": [1, "x"]}'))),
    # a tag of the object, of the argument, or of the call is missing
    Case("minimax_m3", m3(element("o", f"{M3}<k>1")), calls(("f", '{"o": "]<]minimax[>[<k>1"}'))),
    Case("minimax_m3", m3(f"{M3}<n>3{element('s', 'x')}"), calls(("f", '{"n": 3, "s": "x"}'))),
    Case("minimax_m3", m3(f"{M3}<o>{element('k', '1')}"), calls(("f", '{"o": {"k": 1}}'))),
    Case("minimax_m3", f"{m3()}{M3}<tool_call>x", [*calls(("f", "{}")), *content(f"{M3}<tool_call>x")]),
    Case(
        "kimi_k3",
        "Hm<|close|>think<|sep|><|open|>response<|sep|>So.<|close|>response<|sep|>"
        + k3(k3_argument("s", "string", '<"3">'), k3_argument("a&quot;", "object", '{"k": [1]}'))
        + "<|close|>message<|sep|>",
        [*thought("Hm"), *content("So."), *calls(("f", '{"s": "<\\"3\\">", "a\\"": {"k": [1]}}'))],
        "kimi_k3",
        INSIDE,
    ),
    Case("kimi_k3", k3(k3_argument("n", "number", "3")), calls(("f", '{"n": 3}'))),
    Case("kimi_k3", k3('<|open|>json type="object"<|sep|>{"n": 3}<|close|>json<|sep|>'), calls(("f", '{"n": 3}'))),
    Case("kimi_k3", f"{k3()} <|open|>tools<|sep|>x", [*calls(("f", "{}")), *content(" <|open|>tools<|sep|>x")]),
    Case("zaya_xml", xml("f", ("s", "a"), ("n", "3")).replace("tool_call", "zyphra_tool_call"), calls(("f", SN))),
    Case(
        "solar_open2",
        "<|tool_call:start|>f\n<|tool_arg:start|>s<|tool_arg:value|>a<|tool_arg:end|>\n"
        "<|tool_arg:start|>n<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>g\n<|tool_call:end|>",
        calls(("f", SN), ("g", "{}")),
    ),
]

TAGS = {
    "hunyuan_a13b": ("<think>", "</think>", "<answer>", "</answer>"),
    "ernie45": ("<think>", "</think>", "<response>", "</response>"),
    "granite3_3": ("<think>", "</think>", "<response>", "</response>"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "solar_open": ("<|think|>", "<|end|>", "<|begin|>assistant<|content|>", "<|end|>"),
    "solar_open2": ("<|think:start|>", "<|think:end|>", "", ""),
    "minimax_m3": ("<mm:think>", "</mm:think>", "", ""),
    "kimi_k3": (
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|><|close|>message<|sep|>",
    ),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "", "[END FINAL RESPONSE]"),
    "granite": ("Here is my thought process:", "Here is my response:", "", ""),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>", "", ""),
    "minicpm3": ("<|thought_start|>", "<|thought_end|>", "", ""),
    "kimi_vl": ("◁think▷", "◁/think▷", "", ""),
    "exaone_deep": ("<thought>", "</thought>", "", ""),
}
THOUGHTS = [
    case
    for name, (begin, end, opened, closed) in TAGS.items()
    for case in (
        Case(
            None,
            f"{begin}\nHm\n{end}\n{opened}\nIt rains.\n{closed}\n",
            [*thought("Hm"), *content("It rains.\n\n" if not closed else "It rains.")],
            name,
        ),
        Case(None, f"{opened}It <b>rains.{closed}", content("It <b>rains."), name),
        Case(
            "hermes",
            f"{begin}Hm{end}{opened}So.{closed}{hermes('f', '{}')}",
            [*thought("Hm"), *content("So."), *calls(("f", "{}"))],
            name,
        ),
        *([Case(None, f"a {opened} b {closed} c", content(f"a {opened} b {closed} c"), name)] if opened else []),
    )
]
FAMILIES = [*PYTHONIC, *LISTS, *NAMED, *TAGGED, *NEW_TAGS, *THOUGHTS]
