"""`RequestGrammar`: one request's tokens, and its matcher from the point on where its grammar starts."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.structured_output.backend import GrammarMatcher


class RequestGrammar:
    """A grammar that starts at once, or after the first occurrence of `reasoning_end_ids` among the emitted tokens.

    Tokens up to the end of the marker are free; `num_free` of them once it has come.
    """

    def __init__(self, matcher: GrammarMatcher, reasoning_end_ids: tuple[int, ...]) -> None:
        self.matcher = matcher
        self._marker = reasoning_end_ids
        self.token_ids: list[int] = []  # emitted
        self._num_free: int | None = None if reasoning_end_ids else 0

    @property
    def has_started(self) -> bool:
        return self._num_free is not None

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take emitted tokens; how many the grammar admits. The first that it does not is not taken."""
        for i, token_id in enumerate(token_ids):
            if self._num_free is not None and not self.matcher.accept(token_id):
                return i
            self.token_ids.append(token_id)
            if self._num_free is None and self._ends_with_marker(self.token_ids):
                self._num_free = len(self.token_ids)
        return len(token_ids)

    def rollback_to(self, num_tokens: int) -> None:
        """Back to the first `num_tokens` emitted tokens."""
        assert 0 <= num_tokens <= len(self.token_ids)
        if self._num_free is not None:
            self.matcher.rollback(len(self.token_ids) - max(num_tokens, self._num_free))
            if num_tokens < self._num_free:
                self._num_free = None
        del self.token_ids[num_tokens:]

    def num_free_drafts(self, draft_token_ids: Sequence[int]) -> int | None:
        """How many of the drafts are free: those before the grammar starts. None if it does not start within them."""
        if self._num_free is not None:
            return 0
        tail = self.token_ids[-len(self._marker) :]
        for i, token_id in enumerate(draft_token_ids):
            tail = [*tail, token_id]
            if self._ends_with_marker(tail):
                return i + 1
        return None

    def _ends_with_marker(self, token_ids: list[int]) -> bool:
        return tuple(token_ids[-len(self._marker) :]) == self._marker
