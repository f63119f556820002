"""`BudgetContext`: the variables of one rendering, with its budget."""

from typing import Any

from jinja2.runtime import Context

from inflight.tokenizer.sandbox.budget import TemplateBudget


class BudgetContext(Context):
    """Attributes:
    budget: set by who renders.
    """

    budget: TemplateBudget

    def derived(self, locals: dict[str, Any] | None = None) -> "BudgetContext":
        derived = super().derived(locals)
        assert isinstance(derived, BudgetContext)
        derived.budget = self.budget
        return derived
