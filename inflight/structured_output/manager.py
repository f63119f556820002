"""`StructuredOutputManager`: the grammars of the engine's requests. It owns the matchers, the mask buffers and the cache.

The engine's thread makes all calls. Compilations and replays of emitted tokens run in other threads. The calls for one request
are:

1. `submit` when the request arrives: its grammar is compiled, or found in the cache. If the request has emitted tokens before
   (it was resumed), another thread advances its matcher over these tokens. The request may be scheduled when the future that
   `submit` returned has ended and `failure` returns "".
2. `fill` for each step, while the step's forward runs. By then, all tokens before the step must be committed (passed to
   `advance`). One call makes the masks of all rows of the step.
3. `advance` for each token that a step emitted (added to the request's output), when the engine processes the results of the
   step. After `submit`, only this call changes the request's position in its grammar.
4. `drop` when the request ends, for whatever reason.

Matchers follow only the committed tokens. Drafts are accepted and rolled back within one call. So no call is needed if a step
is voided (its results are dropped), or if a request is preempted and resumed with all its tokens.

An error concerns only one request. `fill` or `advance` returns the error, and the caller ends the request. Until then, the
request's mask rows allow all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from inflight.errors import ConfigError, InvalidRequestError, OverloadedError
from inflight.sampling_params import StructuredOutputsParams
from inflight.structured_output.backend import (
    ALL_ALLOWED,
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    MaskJob,
    MaskRows,
    num_mask_words,
)
from inflight.structured_output.grammar_cache import GrammarCache
from inflight.structured_output.spec import GrammarSpec

# The most that the cache of compiled grammars may hold. If there is more, it evicts the least recently used grammars.
MAX_CACHED_GRAMMARS, MAX_CACHED_BYTES = 512, 256 * 2**20


class FilledMasks(NamedTuple):
    """The masks of one step.

    `masks` is in one of the manager's `num_buffers` buffers, which are used one after another. So the `num_buffers`-th later
    `fill` overwrites it.
    """

    masks: MaskRows  # [num_rows_total, num_words] of int32; the requests' rows in the order of the call
    errors: Mapping[str, str]  # request id -> why the request must end; its rows allow all tokens


class MaskRequest(NamedTuple):
    """One request of a step. The step draws `len(draft_token_ids) + 1` tokens for it: one at its first position without a
    token, then one after each draft. Each of these draws has its own row of the mask.

    `known`: tokens that the grammar forced after the step was planned. They are already emitted, but the planned step draws at
    their positions again. So the rows of these positions allow only these tokens.
    """

    request_id: str
    draft_token_ids: Sequence[int] = ()
    known: Sequence[int] = ()


class _RequestGrammar:
    """One request between `submit` and `drop`: its compilation, its emitted tokens, and its matcher.

    If `marker` is empty, the grammar starts at once. Otherwise it starts after the first occurrence of these tokens in the
    output, and the tokens before its start are not constrained.
    """

    def __init__(self, spec: GrammarSpec, future: Future[CompiledGrammar], marker: tuple[int, ...]) -> None:
        self.spec = spec
        self.future = future
        self.has_started = not marker
        self._marker = marker
        self._token_ids: list[int] = []  # emitted
        self._error = ""

    @property
    def failure(self) -> str:
        """Why the grammar cannot be used. "" if it can be used, or if its compilation has not ended."""
        if self._error or not self.future.done():
            return self._error
        if self.future.cancelled():
            return "the engine was closed"
        error = self.future.exception()
        if isinstance(error, InvalidRequestError | ConfigError | OverloadedError):
            return str(error)
        return "" if error is None else f"the grammar could not be compiled: {type(error).__name__}: {error}"

    @property
    def is_ready(self) -> bool:
        return self.future.done() and not self.failure

    @cached_property
    def matcher(self) -> GrammarMatcher:
        assert self.future.done(), "the grammar is still being compiled"
        return self.future.result().matcher()

    def fail(self, reason: str) -> str:
        self._error = f"the grammar failed after {len(self._token_ids)} tokens: {reason}"
        return self._error

    def advance(self, token_id: int) -> str:
        """Add an emitted token. Returns "", or why the grammar does not admit the token."""
        if self.has_started and not self.matcher.accept(token_id):
            return self.fail(self.matcher.error() or f"it does not admit token {token_id}")
        self._token_ids.append(token_id)
        self.has_started = self.has_started or self._ends_with_marker(self._token_ids)
        return ""

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advance over the emitted tokens of a resumed request. Stop if the grammar does not admit a token. Call this once,
        when the compilation has ended. No other thread may use the request meanwhile."""
        for token_id in token_ids:
            if self.failure or self.advance(token_id):
                return

    def num_free_drafts(self, draft_token_ids: Sequence[int]) -> int | None:
        """How many of the drafts come before the start of the grammar. None if the grammar has not started after the last
        draft."""
        if self.has_started:
            return 0
        tail = self._token_ids[-len(self._marker) :]
        for i, token_id in enumerate(draft_token_ids):
            tail = [*tail, token_id]
            if self._ends_with_marker(tail):
                return i + 1
        return None

    def _ends_with_marker(self, token_ids: list[int]) -> bool:
        return tuple(token_ids[-len(self._marker) :]) == self._marker


class StructuredOutputManager:
    """Only the engine's thread uses it. The docstring of the module has the order of the calls.

    Args:
        create_backend: called on a compile thread for the first grammar. If it raises an error, the request fails.
        vocab_size: the vocabulary size of the model and of the backend.
        num_buffers: the masks of a step are overwritten by the `num_buffers`-th later call of `fill`. With d steps in flight,
            2 * d buffers are enough: after the masks of a step are made, and before it draws, masks may be made for up to
            d - 1 older steps (which had to wait for commits) and d - 1 later ones.
        num_threads: how many grammars are compiled at a time in each of the two queues of `GrammarCache`.
    """

    def __init__(
        self, create_backend: Callable[[], GrammarBackend], vocab_size: int, *, num_buffers: int, num_threads: int = 2
    ) -> None:
        self._cache = GrammarCache(
            create_backend, num_threads=num_threads, max_count=MAX_CACHED_GRAMMARS, max_bytes=MAX_CACHED_BYTES
        )
        self._grammars: dict[str, _RequestGrammar] = {}
        self._replays = ThreadPoolExecutor(
            1, thread_name_prefix="inflight-replay"
        )  # its thread starts when it is needed
        self._num_words = num_mask_words(vocab_size)
        self._buffers = [np.empty((0, self._num_words), dtype=np.int32) for _ in range(num_buffers)]
        self._num_fills = 0

    def submit(
        self,
        request_id: str,
        params: StructuredOutputsParams,
        *,
        reasoning_end_ids: Sequence[int] = (),
        emitted_token_ids: Sequence[int] = (),
    ) -> Future[Any]:  # Any: only the manager uses the result
        """Begin to compile a request's grammar, and return at once.

        Args:
            reasoning_end_ids: the tokens of the end-of-thinking marker, after which the grammar starts. If empty, the grammar
                starts at once.
            emitted_token_ids: the tokens that a resumed request has emitted. The grammar goes on after them.

        Returns:
            a future that ends when the grammar has been compiled and advanced over the emitted tokens, or has failed. Do not
            cancel it, because several requests may share it.
        """
        assert request_id not in self._grammars, f"{request_id} was submitted before"
        spec = GrammarSpec.from_params(params)
        future = self._cache.get(spec)
        grammar = self._grammars[request_id] = _RequestGrammar(spec, future, tuple(reasoning_end_ids))
        return self._replay(grammar, emitted_token_ids) if emitted_token_ids else future

    def _replay(self, grammar: _RequestGrammar, token_ids: Sequence[int]) -> Future[None]:
        """When the grammar is compiled, advance it over the tokens in another thread. Returns a future that ends when that is
        done."""
        replayed: Future[None] = Future()

        def replay() -> None:
            try:
                grammar.replay(token_ids)
            except Exception as error:  # a defect of the grammar library: only this request fails
                grammar.fail(f"{type(error).__name__}: {error}")
            replayed.set_result(None)

        def start(_: Future[CompiledGrammar]) -> None:
            with suppress(RuntimeError):  # the manager was closed
                self._replays.submit(replay)

        grammar.future.add_done_callback(start)
        return replayed

    def failure(self, request_id: str) -> str:
        """Why the grammar cannot be used. "" if it can be used, or if its compilation has not ended."""
        return self._grammars[request_id].failure

    def advance(self, request_id: str, token_id: int) -> str:
        """Commit an emitted token. Returns "", or why the grammar does not admit the token. In this case the request must
        end."""
        return self._grammars[request_id].advance(token_id)

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last token was an EOS that its grammar admits. If so, its text is complete."""
        return self._grammars[request_id].matcher.is_terminated()

    def forced_tokens(self, request_id: str, limit: int) -> list[int]:
        """Returns the next tokens of the request, up to the first position where the grammar does not allow exactly one token;
        at most `limit` tokens.

        The list is empty before the grammar starts, and after an error.
        """
        grammar = self._grammars[request_id]
        return grammar.matcher.forced_tokens(limit) if grammar.has_started and not grammar.failure else []

    def fill(self, rows: Sequence[MaskRequest]) -> FilledMasks:
        """Make the masks of a step: `len(draft_token_ids) + 1` rows for each request.

        Row i is the mask after the request's emitted tokens (without the `known` tokens) and its first i drafts. If the request
        was dropped or has failed, its rows allow all tokens, and so do its rows before the start of its grammar. Python's GIL
        is released for most of the work.
        """
        row_starts = [0]
        for wanted in rows:
            row_starts.append(row_starts[-1] + len(wanted.draft_token_ids) + 1)
        masks = self._next_buffer(row_starts[-1])
        jobs: dict[str, MaskJob] = {}
        for (request_id, drafts, known), first_row in zip(rows, row_starts, strict=False):
            if known:
                num_known = min(len(known), len(drafts) + 1)
                _allow_only(masks[first_row : first_row + num_known], known)
                first_row += num_known
                if num_known > len(drafts):
                    continue
                # later rows count only if the drafts equal the known tokens: otherwise a draft is rejected
                drafts = drafts[num_known:]
            grammar = self._grammars.get(request_id)
            num_free = grammar.num_free_drafts(drafts) if grammar is not None and grammar.is_ready else None
            num_rows = len(drafts) + 1 if num_free is None else num_free
            masks[first_row : first_row + num_rows].fill(ALL_ALLOWED)
            if grammar is not None and num_free is not None:
                jobs[request_id] = MaskJob(grammar.matcher, first_row + num_free, drafts[num_free:])
        if jobs:
            self._cache.backend().fill_masks(list(jobs.values()), masks)
        return FilledMasks(masks, self._find_errors(jobs, masks))

    def drop(self, request_id: str) -> None:
        """Forget a request. If no other request waits for its compilation, the compilation is given up. An unknown request is
        ignored."""
        if (grammar := self._grammars.pop(request_id, None)) is not None:
            self._cache.release(grammar.spec, grammar.future)

    def check_integrity(self, request_ids: Sequence[str]) -> None:
        """Assert that the manager has exactly these requests. For tests."""
        assert self._grammars.keys() == set(request_ids), (list(self._grammars), request_ids)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._grammars.clear()
        self._cache.close()
        self._replays.shutdown(wait=False, cancel_futures=True)

    def _next_buffer(self, num_rows: int) -> MaskRows:
        index = self._num_fills % len(self._buffers)
        self._num_fills += 1
        if len(self._buffers[index]) < num_rows:
            self._buffers[index] = np.empty((num_rows, self._num_words), dtype=np.int32)
        return self._buffers[index][:num_rows]

    def _find_errors(self, jobs: Mapping[str, MaskJob], masks: MaskRows) -> dict[str, str]:
        """Find matchers that failed and requests for which no token is allowed. All their rows, and all rows that allow no
        token, are changed to allow all tokens, because a draw needs at least one token.

        If the row after a draft allows no token, this is not an error yet, because the draft may be rejected. If the draft is
        accepted, `advance` refuses the token that is drawn there.
        """
        errors: dict[str, str] = {}
        is_empty = np.logical_not(masks.any(axis=1))
        for request_id, job in jobs.items():
            reason = job.matcher.error()
            if not reason and is_empty[job.first_row]:
                reason = "it admits no token here"
            if reason:
                errors[request_id] = self._grammars[request_id].fail(reason)
                is_empty[job.rows] = True
        masks[is_empty] = ALL_ALLOWED
        return errors


def _allow_only(masks: MaskRows, token_ids: Sequence[int]) -> None:
    """Let row i admit only `token_ids[i]`."""
    masks.fill(0)
    bits = masks.view(np.uint32)
    for row, token_id in zip(bits, token_ids, strict=False):
        row[token_id // 32] = 1 << (token_id % 32)
