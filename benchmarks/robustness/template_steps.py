"""How long a chat template can run until its budget ends it, and how much of the budget real templates need.

    python -m benchmarks.template_steps [--templates FOLDER] [--steps 4194304]

A template is refused after `TemplateBudget.STEPS` steps, so no operation may take much more time than its steps say. Each of
`OPERATIONS` is repeated until a small budget ends it. The table has those that take the most time for a step, and the time for
a whole budget if a template does nothing else. Goal: at most LIMIT_SECONDS of processor time.

FOLDER has *.jinja files, as `make test-clients` puts them into .venv-clients/templates. Each is rendered with a chat of 200
messages and 20 tools, of which every fourth message calls one; the table has those that need the most steps.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2

from benchmarks.shared.report import emit, print_table, verdict
from inflight.errors import InflightError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.sandbox.budget import TemplateBudget
from inflight.tokenizer.sandbox.environment import TemplateSandbox

LIMIT_SECONDS = 2.5
SHOWN = 8
NUM_MESSAGES, NUM_TOOLS = 200, 20

VALUES = """{% set n = 2**60 %}{% set ns = namespace(x=1) %}{% set a = 'ab c' * 5 %}{% set l = [3, 1, 2] %}
{% set d = {'a': 1, 'b': 2} %}{% set long = 'ab c' * 5000 %}{% set w = 'ሴa' * 3000 %}{% set num = range(300) | list %}
{% set s = a | safe %}{% set words = (('a' * 300 ~ ' ') * 200).split() %}{% set aa = 'a' * 20000 %}
{% set end = 'a' * 500 ~ 'b' %}{% macro m(q, r=1) %}{{ q }}{% endmacro %}{% set B = """ + "*".join(["(2**60)"] * 63)
VALUES += " %}{% set C = " + "*".join(["(3**36)"] * 32) + " %}"

# One operation in each line.
OPERATIONS = """
1
n + n
n * n
-n
n // 7
n % 7
a + a
a ~ i
1.5 ~ i
l + l
a[1:]
l[::-1]
d['a']
d.a
messages[0].content
ns.x
loop.nextitem
loop.changed(i)
loop.cycle(1, 2)
m(1)
m(*[1])
namespace(a=1)
dict(a=1)
dict([(1, 2)])
cycler(1, 2).next()
strftime_now('%A %B %d %H:%M:%S %c %x %X %Z %j' * 20)
i in l
i is in l
i is odd
i is eq 3
a is upper
'upper' is filter
i is divisibleby 3
a | upper
a | trim
a | int
a | e
a | indent
a | urlize
a | wordwrap(5)
a | replace('a', 'b')
a | tojson
d | tojson
d | tojson(indent=2)
messages | tojson
'%s' | format(a)
1.567 | round(2)
l | join(',')
l | list
l | sort
l | groupby('real') | list
l | unique | list
l | map('string') | list
d | dictsort
'%s %d' % (a, i)
'%r' % (d,)
'{:>9}'.format(a)
a.join(['x', 'y'])
a.split(' ')
s + '<b>'
s % ()
s.join(['<', '>'])
s.split()
s.upper()
long.split()
long.replace('b', 'cc')
long.find('zz')
long | int(0)
long | indent
long | wordcount
long | tojson
long == long ~ ''
'zz' in long
end in aa
aa.find(end)
aa.count(end)
aa.partition(end)
aa.replace(end, '')
w | list
w | upper
w | urlencode
w | replace('a', 'bc')
w.split('a')
w.translate({97: 'bb'})
(w | safe).split('a')
num | sum
num | join
num | max
num | sort
num | tojson
num | unique | list
num | map('string') | join
num | select('odd') | list
num | groupby('real') | list
num == num | list
dict.fromkeys(num)
words | sort
words | unique | list
words | groupby(0) | list
B // C
B % C
B | string
B ~ ''
'%d' % B
"""


def seconds_a_step(operation: str, max_steps: int) -> float:
    """Seconds of processor time for each step of the budget."""
    source = f"{VALUES}{{% for i in range(99999) %}}{{% for j in range(99999) %}}{{% set x = {operation} %}}"
    sandbox = TemplateSandbox()
    template = sandbox.make(sandbox.read(f"{source}{{% endfor %}}{{% endfor %}}"))
    budget = TemplateBudget(max_steps)
    begin = time.thread_time()
    try:
        TemplateSandbox.render(template, {"messages": chat()[:3]}, budget)
    except jinja2.TemplateError:
        return (time.thread_time() - begin) / max(max_steps - budget.num_left, 1)
    raise AssertionError(f"{operation} ended before its budget was spent")


def chat() -> list[dict[str, Any]]:
    text = "The quick brown fox jumps over the lazy dog. " * 4
    messages: list[dict[str, Any]] = []
    for i in range(NUM_MESSAGES // 4):
        call = {"id": f"call{i:05}", "type": "function"}
        called = {"name": f"tool_{i % NUM_TOOLS}", "arguments": {"path": f"file {i}", "count": i}}
        messages += [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [{**call, "function": called}]},
            {"role": "tool", "tool_call_id": call["id"], "name": called["name"], "content": text},
            {"role": "assistant", "content": text},
        ]
    return [*messages[:-1], {"role": "user", "content": text}]


def tools() -> list[dict[str, Any]]:
    properties = {f"field_{i}": {"type": "string", "description": f"The field {i}."} for i in range(6)}
    schema = {"type": "object", "properties": properties, "required": ["field_0"]}
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "description": f"Does {i}.", "parameters": schema}}
        for i in range(NUM_TOOLS)
    ]


def steps_of(source: str) -> tuple[int, int, float] | None:
    """Steps, allowed steps and processor time of the long chat; None if the template refuses it."""
    budgets: list[TemplateBudget] = []

    def of_chat(num_messages: int, num_characters: int) -> TemplateBudget:
        budgets.append(made(num_messages, num_characters))
        return budgets[-1]

    made = TemplateBudget.of_chat
    try:
        template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
        begin = time.thread_time()
        with patch.object(TemplateBudget, "of_chat", of_chat):  # the budget of a rendering is not returned
            template.render(chat(), tools=tools())
    except InflightError:
        return None
    [budget] = budgets
    return budget.max_steps - budget.num_left, budget.max_steps, time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--templates", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=2**22, help="of the small budget")
    options = parser.parse_args()
    found = [(seconds_a_step(each, options.steps), each) for each in OPERATIONS.strip().splitlines()]
    rows = []
    for seconds, operation in sorted(found, reverse=True)[:SHOWN]:
        whole = seconds * TemplateBudget.STEPS
        emit(benchmark="template_steps", operation=operation, ns_a_step=round(seconds * 1e9), seconds=round(whole, 2))
        rows.append([operation, f"{seconds * 1e9:.0f}", f"{whole:.1f}", verdict(whole <= LIMIT_SECONDS)])
    print_table(["operation", "ns a step", "seconds to the limit", ""], rows)
    if options.templates is None:
        return
    counted: dict[str, tuple[int, int, float]] = {}
    for path in sorted(options.templates.rglob("*.jinja")):
        if (of_template := steps_of(path.read_text())) is not None:
            counted[path.stem] = of_template
    rows = []
    for name, (steps, most, seconds) in sorted(counted.items(), key=lambda each: -each[1][0])[:SHOWN]:
        emit(benchmark="template_steps", template=name, steps=steps, allowed=most, seconds=round(seconds, 3))
        rows.append([name, f"{steps / 1e6:.1f} M", f"{most / 1e6:.1f} M", f"{seconds:.2f}"])
    print_table([f"of {len(counted)} templates", "steps", "allowed", "seconds"], rows)


if __name__ == "__main__":
    main()
