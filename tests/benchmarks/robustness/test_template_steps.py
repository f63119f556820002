"""The benchmark of chat templates: each operation runs until its budget ends it, and templates are counted."""

from __future__ import annotations

import pytest

from benchmarks.robustness.template_steps import OPERATIONS, chat, seconds_a_step, steps_of, tools


@pytest.mark.parametrize("operation", OPERATIONS.strip().splitlines())
def test_operations_run_until_they_are_refused(operation: str) -> None:
    assert seconds_a_step(operation, 2**16) > 0


def test_the_steps_of_a_template() -> None:
    template = "{% for m in messages %}{% for n in messages %}{{ n.role }}{% endfor %}{% endfor %}{{ tools | length }}"
    counted = steps_of(template)
    assert counted is not None
    steps, most, _ = counted
    assert len(chat()) ** 2 < steps < most
    assert len(tools()) == 20
    assert steps_of("{{ raise_exception('no tools, please') }}") is None
