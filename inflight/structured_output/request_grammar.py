"""`RequestGrammar`: the grammar of one request, and its position in it."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property

from inflight.errors import ConfigError, InvalidRequestError, OverloadedError, TokenizerError
from inflight.structured_output import pace
from inflight.structured_output.answer_frame_reader import FrameReader, Position, Section
from inflight.structured_output.backend import ALL_ALLOWED, CompiledGrammar, GrammarMatcher, MaskRows
from inflight.structured_output.spec import GrammarSpec


class RequestGrammar:
    """One request between `submit` and `drop` of the manager: its compilation, its emitted tokens, and its matcher.

    The position depends only on the emitted tokens. `read_frame` must be called before the first token if the request has a
    frame; without a frame, all of its text is constrained.
    """

    def __init__(self, spec: GrammarSpec, future: Future[CompiledGrammar], *, has_frame: bool) -> None:
        self.spec = spec
        self.future = future
        self._has_frame = has_frame
        self._reader: FrameReader | None = None
        self._position = Position(Section.ANSWER)
        self._token_ids: list[int] = []  # emitted
        self._error = ""
        self._is_compiled = False  # known after the compilation; asking a future needs locks

    def read_frame(self, reader: FrameReader) -> None:
        self._reader = reader
        self._position = reader.start

    @property
    def failure(self) -> str:
        """Why the grammar cannot be used. "" if it can be used, or if its compilation has not ended."""
        if self._error or self._is_compiled or not self.future.done():
            return self._error
        if self.future.cancelled():
            return "the engine was closed"
        error = self.future.exception()
        if isinstance(error, InvalidRequestError | ConfigError | TokenizerError | OverloadedError):
            return str(error)
        self._is_compiled = error is None
        if error is None:
            return ""
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"

    @property
    def failure_param(self) -> str:
        """The parameter that a compilation has refused; "" if it is not known."""
        error = self.future.exception() if self.future.done() and not self.future.cancelled() else None
        return error.param if isinstance(error, InvalidRequestError) else ""

    @property
    def was_refused(self) -> bool:
        """Whether it was not compiled because another client's grammar needed its place in the queue."""
        is_done = self.future.done() and not self.future.cancelled()
        return is_done and isinstance(self.future.exception(), OverloadedError)

    @property
    def is_ready(self) -> bool:
        return self.future.done() and not self.failure and (self._reader is not None or not self._has_frame)

    @property
    def is_inside_answer(self) -> bool:
        """Whether it is certain that the next token belongs to the constrained text, or ends it."""
        return self._position.is_inside_answer

    @cached_property
    def matcher(self) -> GrammarMatcher:
        """Follows the constrained text. Before this text has certainly begun, it may be behind the emitted tokens."""
        assert self.future.done(), "the grammar is still being compiled"
        return self.future.result().matcher()

    def fail(self, reason: str) -> str:
        self._error = f"the grammar failed after {len(self._token_ids)} tokens: {reason}"
        return self._error

    def advance(self, token_id: int) -> str:
        """Add an emitted token. Returns "", or why the grammar does not admit the token."""
        if self._reader is None or self.is_inside_answer:
            is_admitted = self.matcher.accept(token_id)
        else:
            position = self._reader.advance(self._position, token_id, self.matcher)
            is_admitted = position is not None
            self._position = position or self._position
        if not is_admitted:
            return self.fail(self.matcher.error() or f"it does not admit token {token_id}")
        self._token_ids.append(token_id)
        return ""

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance over the emitted tokens of a resumed request. Stop if the grammar does not admit a token, or needs more
        processor time than `MAX_TOTAL_SECONDS`. Call this once, when the compilation has ended. No other thread may use the
        request meanwhile."""
        begin = time.thread_time()
        for token_id in token_ids:
            if self.failure or self.advance(token_id):
                return
            if time.thread_time() - begin > pace.MAX_TOTAL_SECONDS:
                self.fail(pace.TOO_SLOW)
                return

    def has_ended(self) -> bool:
        """Whether the last token was an EOS that ends the constrained text."""
        return self._position.section is Section.ANSWER and self.matcher.is_terminated()

    def forced_tokens(self, limit: int) -> list[int]:
        """The next tokens, as long as exactly one is admitted; at most `limit` tokens."""
        if self.is_inside_answer:
            return self.matcher.forced_tokens(limit)
        if self._reader is None:
            return []
        return list(self._reader.forced(self._position)[:limit])

    def num_free(self) -> int:
        """A number of next tokens that certainly need no mask."""
        if self._reader is None:
            return 0
        return self._reader.num_free(self._position)

    def fill(self, draft_token_ids: Sequence[int], rows: MaskRows) -> str:
        """Write the `len(draft_token_ids) + 1` masks of a request that is not certainly inside the answer: row i is the mask
        after the first i drafts. The position does not change. Returns "", or why the matcher failed."""
        reader, position, matcher = self._reader, self._position, self.matcher
        assert reader is not None
        if draft_token_ids:
            matcher = self._copy_of_matcher()
        for i, row in enumerate(rows):
            reader.fill(position, matcher, row)
            if i == len(draft_token_ids):
                break
            following = reader.advance(position, draft_token_ids[i], matcher)
            if following is None:  # the draft is never accepted, so nothing is drawn after it
                rows[i + 1 :].fill(ALL_ALLOWED)
                break
            position = following
        return matcher.error()

    def _copy_of_matcher(self) -> GrammarMatcher:
        copy = self.future.result().matcher()
        if self._position.is_answer and self.matcher.num_accepted:
            copy.accept_tokens(self._token_ids[-self.matcher.num_accepted :])
        return copy
