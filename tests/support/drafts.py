"""For tests of whole engines with drafts (guesses of the next tokens)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from unittest import mock

from inflight.spec_decode import adaptive


def verify_all_drafts() -> AbstractContextManager[object]:
    """Proposers that are made inside propose all drafts that they find, also those that are rarely right. Otherwise tests that
    compare tokens would see hardly any wrong drafts. It has no effect on ranks that are processes of their own."""
    stack = ExitStack()
    stack.enter_context(mock.patch.dict(adaptive.FREE_TOKENS, dict.fromkeys(adaptive.FREE_TOKENS, 1e30)))
    stack.enter_context(mock.patch.object(adaptive, "best_num_passes", lambda probabilities, most, *costs: most))
    return stack
