"""A grammar backend whose compilations wait until the test lets them go."""

from __future__ import annotations

import threading

from inflight.structured_output.backend import CompiledGrammar, GrammarBackend
from inflight.structured_output.spec import GrammarSpec
from tests.unit.structured_output.grammar_case import backend


class SlowBackend:
    """`compile` waits for `gate`, counts, and does as the real one."""

    def __init__(self) -> None:
        self._inner: GrammarBackend = backend("embedded")
        self.gate = threading.Event()
        self.compiled: list[GrammarSpec] = []

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        assert self.gate.wait(timeout=300)
        self.compiled.append(spec)
        return self._inner.compile(spec)
