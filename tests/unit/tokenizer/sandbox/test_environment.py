"""Templates that would never end, or fill the memory, end with one error; others are rendered as jinja2 renders them."""

from __future__ import annotations

import json
import resource
from typing import Any

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.errors import InvalidRequestError, TokenizerError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.sandbox.budget import TemplateBudget, TemplateLimitError
from inflight.tokenizer.sandbox.charges import INNER
from inflight.tokenizer.sandbox.environment import MAX_SOURCE, TemplateSandbox

SANDBOX = TemplateSandbox()
STEPS = 2**17  # for bombs: few enough that a test is fast, and enough for the work before the bomb
MEMORY = 300 * 2**10  # KiB
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "  What is <b>this</b>? "},
    {"role": "assistant", "content": "A & B", "calls": [{"name": "f", "arguments": {"a": [1, 2.5, None, "ü"]}}]},
    {"role": "user", "content": "c\td\ne"},
]


def render(source: str, budget: TemplateBudget, **variables: Any) -> str:
    return TemplateSandbox.render(SANDBOX.make(SANDBOX.read(source)), variables, budget)


def doubled(value: str, then: str, pair: str = "[ns.x, ns.x]") -> str:
    """A value that holds a value twice, which holds one twice, and so on."""
    return (
        f"{{% set ns = namespace(x={value}) %}}{{% for i in range(60) %}}{{% set ns.x = {pair} %}}{{% endfor %}}{then}"
    )


TWICE = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}"
LONG = "{% set a = 'a' * 10**6 %}"
NUMBERS = (
    "{% set ns = namespace(x=[]) %}{% for i in range(2000) %}{% set ns.x = ns.x + [i * (2**61 - 1)] %}{% endfor %}"
)

# of 1 MB or less in the source: what each would do takes minutes or gigabytes
BOMBS = {
    # turns
    "loops": FOREVER + "{% endfor %}{% endfor %}",
    "loop with a test": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1, x - 1]) }}{% endif %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "captured block": "{% set x %}" + FOREVER + "text{% endfor %}{% endfor %}{% endset %}",
    "captured texts": LONG + "{% set x %}{% for i in range(9999) %}{{ a }}{% endfor %}{% endset %}",
    "macros kept": "{% macro m() %}" + "x" * 10**5 + "{% endmacro %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + [m() ~ i] %}{% endfor %}",
    "filter block": "{% filter upper %}" + FOREVER + "a{% endfor %}{% endfor %}{% endfilter %}",
    "block": "{% block b %}{% for i in range(99999) %}{% if i < 9 %}{{ self.b() }}{% endif %}{% endfor %}{% endblock %}",
    "call block": "{% macro m(n) %}{% if n %}"
    + 2 * "{% call m(n - 1) %}{% endcall %}"
    + "{% else %}{{ caller() }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "generators": "{% for i in range(99999) %}{{ range(99999) | reject('integer') | first }}{% endfor %}",
    "generators in generators": "{% set ns = namespace(x=[1]) %}{% for i in range(9999) %}{% set ns.x = ns.x | map('string') %}"
    "{% endfor %}",
    "length of a loop": "{% for i in range(9999) %}{% for x in range(99999) | map('string') %}{% if loop.length %}{% break %}"
    "{% endif %}{% endfor %}{% endfor %}",
    # results of methods and filters
    **{name: f"{{% set x = 'a'.{name}(10**10) %}}" for name in ("ljust", "rjust", "center", "zfill")},
    "center filter": "{% set x = 'a' | center(10**10) %}",
    "expandtabs": "{% set x = ('\\t' * 1000).expandtabs(10**8) %}",
    "replace": LONG + "{% set x = a.replace('a', a) %}",
    "replace filter": LONG + "{% set x = a | replace('a', a) %}",
    "join": LONG + "{% set x = a.join(['', ''] * 1000) %}",
    "join of an iterator": LONG + "{% set x = a.join(range(9999) | map('string')) %}",
    "join filter": LONG + "{% set x = range(9999) | join(a) %}",
    "join of attributes": "{% set x = [{'a': 'a' * 10**6}] * 10**5 | int %}{{ x | join(attribute='a') | length }}",
    "translate": LONG + "{% set x = a.translate({97: a}) %}",
    "maketrans": "{% set x = ''.maketrans('a' * 10**6, 'b' * 10**6) %}",
    "to_bytes": "{% set x = (5).to_bytes(10**11, 'big') %}",
    "bytes": "{% set x = ('é' * 10**6).encode() * 10**6 %}",
    "concat": doubled("'a'", "", "ns.x ~ ns.x"),
    "plus": doubled("'a'", "", "ns.x + ns.x"),
    "lists": doubled("[1]", "", "ns.x + ns.x"),
    "times": "{% set x = [1] * 10**12 %}",
    "batch": "{% set x = [1] | batch(10**11, 1) | list %}",
    "slice filter": "{% set x = [1] | slice(10**9) | list %}",
    "indent": "{% set x = ('a\\n' * 10000) | indent(10**7) %}",
    "tojson": "{% set x = [[[1]]] | tojson(indent=10**10) %}",
    "separators": LONG + "{% set x = range(9999) | list | tojson(separators=(a, a)) %}",
    "round": "{{ 5 | round(-10**9) }}",
    "sum": "{{ ([[1] * 1000] * 10**5) | sum(start=[]) | length }}",
    "arguments": "{{ dict(*('a' * 10**6)) }}",
    "list of a text": "{% set x = ('ሴ' * 2**24) | list %}",
    "sorted text": "{% set x = ('ሴ' * 2**24) | sort %}",
    "split": "{% set x = ('a ' * 2**23).split() %}",
    "splitlines": "{% set x = ('\\n' * 2**23).splitlines() %}",
    "autoescape": "{% autoescape true %}{% set a = '\"' * 2**23 %}{{ a }}{% endautoescape %}",
    "escape": "{% set x = '\"' * 2**23 %}{% set y = x | e %}",
    "markup": "{% set x = ('a' | safe) + '\"' * 2**23 %}",
    "error": "{{ raise_exception(range(99999) | list * 10**3) }}",
    # formats
    **{
        text: f"{{% set x = '{text}' % {values} %}}"
        for text, values in (
            ("%9999999999d", "1"),
            ("%*d", "(10**9, 1)"),
            ("%.999999999f", "1.5"),
            ("%(a)9999999999s", "{'a': 1}"),
        )
    },
    "format filter": "{% set x = '%.999999999f' | format(1.5) %}",
    "format of a dict": LONG + "{% set x = ('%(a)s' * 1000) % {'a': a} %}",
    "format": "{% set x = '{:9999999999}'.format(1) %}",
    "nested format": "{% set x = '{:{}}'.format(1, 10**10) %}",
    "format_map": "{% set x = '{a:9999999999}'.format_map({'a': 1}) %}",
    "format by attr": "{% set x = ('{:9999999999}' | attr('format'))(1) %}",
    # values that hold each other
    "printed": doubled("[1]", "{{ ns.x }}"),
    "as text": doubled("[1]", "{{ ns.x | string | length }}"),
    "concatenated": doubled("[1]", "{{ ns.x ~ 'a' }}"),
    "as JSON": doubled("[1]", "{{ ns.x | tojson | length }}"),
    "key": doubled("(1,)", "{{ {ns.x: 1} | length }}", "(ns.x, ns.x)"),
    "subscript": doubled("(1,)", "{{ {}[ns.x] }}", "(ns.x, ns.x)"),
    "get": doubled("(1,)", "{{ {}.get(ns.x) }}", "(ns.x, ns.x)"),
    "in": doubled("(1,)", "{{ ns.x in {} }}", "(ns.x, ns.x)"),
    "name of a filter": doubled("(1,)", "{{ [1] | map(ns.x) | list }}", "(ns.x, ns.x)"),
    "is filter": doubled("(1,)", "{{ ns.x is filter }}", "(ns.x, ns.x)"),
    "unique": doubled("(1,)", "{{ [ns.x] | unique | list | length }}", "(ns.x, ns.x)"),
    "raised": doubled("[1]", "{{ raise_exception(ns.x) }}"),
    "of a dict": doubled("{'a': 1}", "{{ ns.x | tojson | length }}", "{'a': ns.x, 'b': ns.x}"),
    "of a cycler": doubled("1", "{{ ns.x | string | length }}", "cycler(ns.x, ns.x).items"),
    "varargs": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs | string | length }}{% endif %}"
    "{% endmacro %}{{ m(100, 1) }}",
    "equal": TWICE + "{{ ns.x == ns.y }}",
    "equal by a test": TWICE + "{{ [ns.x] | select('eq', ns.y) | list | length }}",
    "in a list": TWICE + "{{ ns.x in [ns.y] }}",
    "index": TWICE + "{{ [ns.x].index(ns.y) }}",
    "sort": TWICE + "{{ [ns.x, ns.y] | sort | length }}",
    "changed": TWICE + "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
    "deep": "{% set ns = namespace(x=()) %}"
    "{% for i in range(2000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} | length }}",
    # time that grows with the square
    "rfind": "{{ ('a' * 10**7).rfind('ab' + 'a' * 10**6) }}",
    "rsplit": "{{ ('a' * 10**7).rsplit('ab' + 'a' * 10**6) }}",
    "strip": "{{ ('a' * 10**7).strip('bcdefghijk' * 10**5 + 'a') | length }}",
    "trim": "{{ ('é' * 10**6) | trim('bcdefghijü' * 10**5 + 'é') | length }}",
    "wordwrap": "{{ ('a' * 10**6) | wordwrap(1) }}",
    "urlize": "{{ (')' * 60000 + 'a)') | urlize }}",
    "striptags": "{{ ('<!--' * 10**6) | striptags }}",
    "striptags of markup": "{{ (('<a>' * 10**6) | safe).striptags() }}",
    "pprint": "{{ range(5000) | list | pprint | length }}",
    "encode": "{% set x = ('é' * 10**6).encode('punycode') %}",
    "long attribute": "{{ messages | map(attribute='a.' * 10**6) | list }}",
    "keys": NUMBERS + "{{ dict.fromkeys(ns.x) | length }}",
    "keys of a dict's method": NUMBERS + "{{ {}.fromkeys(ns.x) | length }}",
    "unique numbers": NUMBERS + "{{ ns.x | unique | list | length }}",
    # numbers
    "integers": doubled("3", "", "ns.x * ns.x"),
    "sums of integers": "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "differences": "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = ns.x - (0 - ns.x) %}{% endfor %}",
    "hexadecimal": "{% set x = ('f' * 10**6) | int(0, 16) %}",
    "from_bytes": "{% set x = (1).from_bytes(('a' * 10**6).encode(), 'big') %}",
    "power": "{% set x = 9**9**9 %}",
    "time": "{% set x = strftime_now('%999Y' * 10**5) %}",
    # one operation again and again
    **{
        f"again: {expression}": LONG + f"{{% for i in range(99999) %}}{{% set x = {expression} %}}{{% endfor %}}"
        for expression in (
            "'b' in a",
            "a == a ~ ''",
            "a.upper()",
            "a[1:]",
            "a | reverse",
            "a is upper",
            "a | truncate(10**5)",
            "'a' in range(9999)",
            "range(9999).count('a')",
            "range(9999) | max",
            "range(99999) | groupby('real') | length",
            "('{0" + ".real" * 999 + "}').format(1)",
            "range(999) | map('string') | list",
        )
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateLimitError, RecursionError)) as caught:
        render(BOMBS[name], TemplateBudget(STEPS, seconds=30.0), messages=MESSAGES)
    assert "seconds" not in str(caught.value), "the work is not counted, and only the clock has ended it"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def num_steps(expression: str, count: int) -> int:
    """With a list `v` of so many entries, and a text `t` of three times as many characters."""
    budget = TemplateBudget()
    values = f"{{% set v = range({count}) | list %}}{{% set t = 'ab ' * {count} %}}"
    render(f"{values}{{% set x = {expression} %}}", budget)
    return budget.max_steps - budget.num_left


@pytest.mark.parametrize(
    ("steps", "expression"),
    [
        *((2.0, each) for each in ("v | sum", "v | join", "v | tojson", "v | max", "v | map('string') | list")),
        *((0.12, f"t{each}") for each in (".find('zz')", ".count('zz')", ".partition('zz')", ".replace('zz', '')")),
        *((0.12, each) for each in ("'zz' in t", "t | int(0)", "t | indent", "t | replace('zz', '')")),
        *((0.3, each) for each in ("t.split(' ')", "t.split()", "t | list")),
        (6.0, "(t | safe).split(' ')"),
    ],
)
def test_what_takes_longer_for_longer_values_counts_more_steps(steps: float, expression: str) -> None:
    """Else a template that repeats it runs until the clock ends it."""
    few, many = (num_steps(expression, count) - num_steps("1", count) for count in (100, 10_100))
    assert many - few >= 10_000 * steps


def test_the_last_limit_is_a_few_times_what_all_steps_take() -> None:
    short, long = TemplateBudget(), TemplateBudget.of_chat(1000, 1000)
    assert TemplateBudget(2**22)._seconds < short._seconds < long._seconds <= 30.0


def test_a_test_of_a_number_does_not_format_a_text() -> None:
    for test in ("odd", "even", "divisibleby(1)"):
        with pytest.raises(TypeError):
            render(f"{{{{ '%999999999d' is {test} }}}}", TemplateBudget())


def test_what_counts_cannot_be_called_by_name() -> None:
    for name in INNER:
        with pytest.raises(jinja2.TemplateRuntimeError):
            render("{{ [-(10**15)] | map(name) | list }}", TemplateBudget(), name=name)


def test_namespaces_can_hold_each_other_and_are_printed_short() -> None:
    made = "{% for i in range(60) %}{% set ns.n = namespace(a=ns.n, b=ns.n) %}{% endfor %}"
    source = "{% set ns = namespace(n=1) %}" + made + "{{ ns.n }}"
    assert len(render(source, TemplateBudget())) < 100


def test_one_error_that_names_the_template() -> None:
    template = ChatTemplate({"default": "{% if messages[-1].content == 'now' %}" + BOMBS["tojson"] + "{% endif %}ok"})
    assert template.render([{"role": "user", "content": "later"}]) == "ok"
    with pytest.raises(InvalidRequestError, match="chat template of the model"):
        template.render([{"role": "user", "content": "now"}])
    long = ChatTemplate({"default": "{{ raise_exception('a' * 10**6) }}"})
    with pytest.raises(InvalidRequestError) as caught:
        long.render(MESSAGES[:1])
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("source", ["x" * (MAX_SOURCE + 1), "{{ 0x" + "f" * 5000 + " }}"])
def test_what_is_refused_when_it_is_compiled(source: str) -> None:
    with pytest.raises(TokenizerError):
        ChatTemplate({"default": source})


def test_nothing_runs_while_a_template_is_compiled() -> None:
    for name in ("tojson", "center filter", "%9999999999d", "replace filter"):
        ChatTemplate({"default": "{% if false %}" + BOMBS[name] + "{% endif %}{{ 'a' | center(10**10) if false }}"})


# -- what is not changed ------------------------------------------------------------------------------------------------

EXPRESSIONS = r"""
'a' + messages[0].content + 'b'
1 + 2 + 3.5
[1] + [2] + [3]
(1,) + (2,)
'a' ~ 1 ~ none ~ [1, 'x'] ~ missing
7 % 3
'%s-%5.1f|%(a)s'[:2] % 'x'
'%s and %d' % ('a', 3)
'%(a)s' % {'a': 'ü'}
'%5s|%-4d|%.2f'|format('a', 3, 2.5)
'{} {:>5} {a!r}'.format(1, 'x', a='y')
'{a.real} {a[0]}'.format_map({'a': [1]})
'ab' * 3
[1] * 2
2 ** 10
7 // 2
5 - 7
messages[0].content|trim
messages[0].content.strip()
' a '.lstrip().rstrip(' ')
'a,b'.split(',')
'a b c'.rsplit(' ', 1)
'abc'.replace('b', 'xyz')
'abc'|replace('b', 'x')
messages|map(attribute='role')|join(', ')
messages|selectattr('role', 'eq', 'user')|list
messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list
[3, 1, 2]|sort
['b', 'A']|sort(case_sensitive=true)
messages|groupby('role')|map('first')|list
{'b': 1, 'a': 2}|dictsort
{'a': 1}|items|list
[1, 1, 2]|unique|list
[1, 2]|sum
messages|sum(attribute='n', start=1) if false else 0
range(5)|batch(2, 0)|list
range(5)|slice(2)|list
[1, 2]|reverse|list
'abc'|reverse
'a\nb\n'|indent(2, true)
'hello world'|title
'a b'|wordcount
'ab'|center(6)
'abc def ghi'|truncate(5)
'abcdefgh ij'|wordwrap(3)
'12'|int + 1
'1f'|int(0, 16)
'1.5'|float
3.14159|round(2)
'x'|default('y')
missing|default('y')
[1, 2]|first
[1, 2]|last
'<a>'|e
'<a>'|safe + '<b>'
'<a>x</a>'|striptags
'a b'|urlencode
{'a': 1}|xmlattr
'http://x.com'|urlize
{'a': [1]}|pprint
1 in [1, 2]
'a' in 'abc'
'a' in {'a': 1}
1 < 2 < 3
[1, [2]] == [1, [2]]
'a' is in(['a'])
3 is odd
4 is divisibleby(2)
{'a': 1}.get('a')
{'a': 1}.get('b', 2)
{'a': 1}.items()|list
{'a': 1}.keys()|list
[1, 2].index(2)
'abc'[1:]
[1, 2, 3][::-1]
messages[-1]['content'].expandtabs(4)
'a'.encode('utf-8').decode('utf-8')
dict(a=1)
dict([('a', 1)])
dict({'a': 1}, b=2)
'abc'.translate({97: 'x'})
'é'.encode()
'abc'.join(['1', '2'])
','.join(messages|map(attribute='role'))
'a' if 1 else 'b'
not 1
'a'.startswith(('a', 'b'))
'%d%%' % 5
messages|length
[[1, 2], [3]]|map('sum')|list
[1, 2]|map('string')|join
'A'|lower == 'a'
[none, true, 1.5, 'x']
{'a': {'b': [1]}}
namespace(a=1).a
cycler(1, 2).next()
joiner('-')()
'x'|string|length
5|filesizeformat
messages[1].calls[0].arguments.a
(1).bit_length()
'abc'.partition('b')
'a'|list
('a', 'b')|list
[2, 1]|min
[[2], [1]]|max
"""
STATEMENTS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }}{{ loop.last }}"
    "{{ loop.previtem is defined }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for x in [[1, [2]], 3] recursive %}{{ loop.depth }}"
    "{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}{% endif %}{% endfor %}",
    "{% macro m(a, b='x') %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}]{% endmacro %}"
    "{{ m(1) }}{{ m(1, 2, 3, c=4) }}{{ m(*[1, 2]) }}",
    "{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}!{% endcall %}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% set y | upper %}b{{ x }}{% endset %}{{ y }}",
    "{% filter upper | replace('A', 'x') %}abc{{ 1 }}{% endfilter %}",
    "{% block b %}a{% for i in [1] %}{{ i }}{% endfor %}{% endblock %}{{ self.b() }}",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{% set a, b = [1, 2] %}{{ a }}{{ b }}",
    "{% autoescape true %}{{ '<a>' }}{{ '<b>' ~ '<c>' }}{{ '<d>' | safe + '<e>' }}{% endautoescape %}{{ '<f>' }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = ns.a + m.role[0] %}{% endfor %}{{ ns.a }}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.cycle('x', 'y') }}{{ loop.changed(v) }}{% endfor %}",
]


def reference(source: str) -> str:
    """What jinja2 alone makes of it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    return environment.from_string(source).render(messages=MESSAGES)


@pytest.mark.parametrize(
    "source", [f"{{{{ {expression} }}}}" for expression in EXPRESSIONS.strip().splitlines()] + STATEMENTS
)
def test_what_is_written_is_what_jinja2_writes(source: str) -> None:
    assert render(source, TemplateBudget(), messages=MESSAGES) == reference(source)


@pytest.mark.parametrize(
    "options", [{}, {"indent": 2}, {"sort_keys": True}, {"separators": [",", ":"]}, {"ensure_ascii": True}]
)
def test_tojson_writes_what_json_writes(options: dict[str, Any]) -> None:
    written = render("{{ messages | tojson(**options) }}", TemplateBudget(), messages=MESSAGES, options=options)
    assert written == json.dumps(MESSAGES, **{"ensure_ascii": False, **options})
