"""`RequestGrammar`: one request's tokens, and its matcher from the point on where its grammar starts."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.structured_output.backend import GrammarMatcher


class RequestGrammar:
    """A grammar that starts at once, or after the first occurrence of `reasoning_end_ids` among the emitted tokens.

    Tokens up to the end of the marker are free.
    """

    def __init__(self, matcher: GrammarMatcher, reasoning_end_ids: tuple[int, ...]) -> None:
        self.matcher = matcher
        self._marker = reasoning_end_ids
        self.token_ids: list[int] = []  # emitted
        self.has_started = not reasoning_end_ids

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take emitted tokens; how many the grammar admits. The first that it does not is not taken."""
        for i, token_id in enumerate(token_ids):
            if self.has_started and not self.matcher.accept(token_id):
                return i
            self.token_ids.append(token_id)
            self.has_started = self.has_started or self._ends_with_marker(self.token_ids)
        return len(token_ids)

    def num_free_drafts(self, draft_token_ids: Sequence[int]) -> int | None:
        """How many of the drafts are free: those before the grammar starts. None if it does not start within them."""
        if self.has_started:
            return 0
        tail = self.token_ids[-len(self._marker) :]
        for i, token_id in enumerate(draft_token_ids):
            tail = [*tail, token_id]
            if self._ends_with_marker(tail):
                return i + 1
        return None

    def _ends_with_marker(self, token_ids: list[int]) -> bool:
        return tuple(token_ids[-len(self._marker) :]) == self._marker
