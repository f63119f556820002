"""Runs the chat template of a stranger, so that it ends: in time, in memory, and without reaching Python.

jinja2's own sandbox keeps a template from Python's internals. It bounds neither time nor memory. Here every rendering has a
`TemplateBudget`, and each way in which a template can do work spends from it:

- `charges`: loops, macros and blocks, by statements that are added to the template's tree before it is compiled;
- `operators`: operators, comparisons, subscripts and what is printed;
- `methods`: methods of text, numbers and containers, and `text_format`: formats;
- `filters`: filters and tests.

What one operation of Python does cannot be interrupted, so its work and its result are bounded before it begins.
"""
