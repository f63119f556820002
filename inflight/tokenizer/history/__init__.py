"""Rules that bring the history of a chat into the form that a model's template takes.

A rule says which conversations it is about, and asks the template by an invented conversation whether it takes them as they
are. If not, it changes them without losing anything. What a rule does depends on the template and on neighbouring messages,
so the prompt of a history stays the same when messages are added.
"""
