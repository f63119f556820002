"""What models of further families write, and what must come of it. In all of these cases the model has ended the text."""

from __future__ import annotations

from tests.unit.parsers.parser_cases import Case, calls, content

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
FAMILIES = [*PYTHONIC]
