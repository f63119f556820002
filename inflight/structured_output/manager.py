"""`StructuredOutputManager`: what the engine loop asks about grammars. Owns the compiled grammars, matchers and mask buffers.

A request's life, all on the engine's thread but for the compiling:

1. `submit` at arrival: its grammar is compiled on another thread, or found. It may be scheduled once `status` is READY.
2. `fill` for each step, when the tokens before it are committed and its forward runs: the masks of all its rows at once.
3. `advance` at commit, with the tokens that the step emitted. This alone changes where a request stands.
4. `drop` when it ends, however it ends.

Matchers follow the committed tokens, and drafts are tried and taken back within one call. So a step that is voided, and a
request that is preempted and resumed with all its tokens, need no call at all.

An error is one request's: `fill` and `advance` name it, its rows forbid nothing, and the caller ends it. No other is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from inflight.errors import ConfigError, InvalidRequestError, OverloadedError
from inflight.sampling_params import StructuredOutputsParams
from inflight.structured_output.backend import (
    ALL_ALLOWED,
    CompiledGrammar,
    GrammarBackend,
    MaskJob,
    MaskRows,
    num_mask_words,
)
from inflight.structured_output.grammar_cache import GrammarCache
from inflight.structured_output.request_grammar import RequestGrammar
from inflight.structured_output.spec import GrammarSpec


class GrammarStatus(StrEnum):
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"  # `failure` says why


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """The masks of one step.

    `masks` lies in one of the manager's buffers: it is overwritten by the `num_buffers`-th `fill` after this one.
    """

    masks: MaskRows  # [num_rows_total, num_words] of int32; the rows of each request in turn, as the call named them
    errors: Mapping[str, str]  # request id -> why it has to end; its rows forbid nothing


@dataclass(slots=True)
class _Entry:
    """One request between `submit` and `drop`."""

    spec: GrammarSpec
    future: Future[CompiledGrammar]
    reasoning_end_ids: tuple[int, ...]
    grammar: RequestGrammar | None = None  # made when it is first needed
    error: str = ""  # of its grammar, since it was compiled


class MaskRequest(NamedTuple):
    """A row of a step: draws behind a request's emitted tokens, and behind each of its drafts.

    `known` are the last of the emitted tokens, where a grammar forced them after the step was planned: it draws them again.
    """

    request_id: str
    draft_token_ids: Sequence[int] = ()
    known: Sequence[int] = ()


def _allow_only(masks: MaskRows, token_ids: Sequence[int]) -> None:
    """Row i admits `token_ids[i]` only."""
    masks.fill(0)
    bits = masks.view(np.uint32)
    for row, token_id in zip(bits, token_ids, strict=False):
        row[token_id // 32] = 1 << (token_id % 32)


class StructuredOutputManager:
    """Used by the engine's thread. See the module for the order of calls.

    Args:
        create_backend: called on a compile thread when the first grammar comes; a `ConfigError` of its fails the request.
        vocab_size: of the model, as the backend's.
        num_buffers: how many `fill`s a step's masks must outlive. With d steps in flight older and younger ones may be filled
            after it, before it draws: twice d are enough.
        num_threads: grammars that are compiled at a time, in each of the two lanes of `GrammarCache`.
        max_cached_grammars, max_cached_bytes: what the cache of compiled grammars may hold; the least recently used go.
    """

    def __init__(
        self,
        create_backend: Callable[[], GrammarBackend],
        vocab_size: int,
        *,
        num_buffers: int,
        num_threads: int = 2,
        max_cached_grammars: int = 512,
        max_cached_bytes: int = 256 * 2**20,
    ) -> None:
        self._cache = GrammarCache(
            create_backend, num_threads=num_threads, max_count=max_cached_grammars, max_bytes=max_cached_bytes
        )
        self._entries: dict[str, _Entry] = {}
        self._num_words = num_mask_words(vocab_size)
        self._buffers = [np.empty((0, self._num_words), dtype=np.int32) for _ in range(num_buffers)]
        self._num_fills = 0

    def submit(
        self, request_id: str, params: StructuredOutputsParams, *, reasoning_end_ids: Sequence[int] = ()
    ) -> Future[CompiledGrammar]:
        """Begin to compile a request's grammar; returns at once.

        Args:
            reasoning_end_ids: the tokens of the end-of-thinking marker, after which the grammar starts; none, and it starts
                at once (a prompt that holds the marker already has none to wait for).

        Returns:
            a future that ends when `status` changes, to wake a loop that sleeps. It is shared: do not cancel it.
        """
        assert request_id not in self._entries, f"{request_id} was submitted before"
        spec = GrammarSpec.from_params(params)
        future = self._cache.get(spec)
        self._entries[request_id] = _Entry(spec, future, tuple(reasoning_end_ids))
        return future

    def status(self, request_id: str) -> GrammarStatus:
        entry = self._entries[request_id]
        if not entry.future.done():
            return GrammarStatus.COMPILING
        return GrammarStatus.FAILED if self.failure(request_id) else GrammarStatus.READY

    def failure(self, request_id: str) -> str:
        """Why the grammar cannot be used, at compilation or since; "" if it can, or is being compiled."""
        entry = self._entries[request_id]
        if not entry.future.done():
            return ""
        if entry.future.cancelled():
            return "the engine was closed"
        error = entry.future.exception()
        if error is None:
            return entry.error
        if isinstance(error, InvalidRequestError | ConfigError | OverloadedError):
            return str(error)
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"

    def advance(self, request_id: str, token_ids: Sequence[int]) -> tuple[int, str]:
        """Commit emitted tokens, drafts that were accepted too.

        Returns:
            how many of them the grammar admits, and why not all: ("" if all). After an error the request cannot go on.
        """
        entry = self._entries[request_id]
        grammar = self._grammar(entry)
        num_accepted = grammar.advance(token_ids)
        if num_accepted < len(token_ids):
            reason = grammar.matcher.error() or f"it does not admit token {token_ids[num_accepted]}"
            entry.error = f"the grammar failed after {len(grammar.token_ids)} tokens: {reason}"
            return num_accepted, entry.error
        return num_accepted, ""

    def has_ended(self, request_id: str) -> bool:
        """Whether the last token that a READY request emitted was an EOS that its grammar admits: its text is complete."""
        return self._grammar(self._entries[request_id]).matcher.is_terminated()

    def forced_tokens(self, request_id: str, limit: int) -> list[int]:
        """The next tokens of a READY request, as long as its grammar admits exactly one at each position; at most `limit`.

        Exactly: the mask at each of the positions has one bit. Empty before the grammar starts, and after an error.
        """
        entry = self._entries[request_id]
        grammar = self._grammar(entry)
        return grammar.matcher.forced_tokens(limit) if grammar.has_started and not entry.error else []

    def fill(self, rows: Sequence[MaskRequest]) -> FilledMasks:
        """The masks of a step: for each request, with its drafts, `len(drafts) + 1` rows in a row.

        Row i is the mask behind the request's emitted tokens (without those that are `known`) and its first i drafts. A request
        that was dropped or has failed, and one whose grammar has not started, has rows that forbid nothing. The interpreter
        lock is released for most of it.
        """
        row_starts = [0]
        for wanted in rows:
            row_starts.append(row_starts[-1] + len(wanted.draft_token_ids) + 1)
        masks = self._next_buffer(row_starts[-1])
        jobs: list[MaskJob] = []
        job_requests: list[str] = []
        for (request_id, drafts, known), first_row in zip(rows, row_starts, strict=False):
            if known:
                num_known = min(len(known), len(drafts) + 1)
                _allow_only(masks[first_row : first_row + num_known], known)
                first_row += num_known
                if num_known > len(drafts):
                    continue
                drafts = drafts[num_known:]  # should one of them be wrong, the rows behind it are for nobody
            entry = self._entries.get(request_id)
            num_free = None
            if entry is not None and not entry.error and entry.future.done() and not self.failure(request_id):
                num_free = self._grammar(entry).num_free_drafts(drafts)
            num_rows = len(drafts) + 1 if num_free is None else num_free
            masks[first_row : first_row + num_rows].fill(ALL_ALLOWED)
            if num_free is not None:
                assert entry is not None
                jobs.append(MaskJob(self._grammar(entry).matcher, first_row + num_free, drafts[num_free:]))
                job_requests.append(request_id)
        if jobs:
            self._cache.backend().fill_masks(jobs, masks)
        return FilledMasks(masks, self._find_errors(jobs, job_requests, masks))

    def drop(self, request_id: str) -> None:
        """Forget a request, whatever its status. Does nothing for an unknown request. Gives up a compilation that only this
        request waits for."""
        if (entry := self._entries.pop(request_id, None)) is not None:
            self._cache.release(entry.spec, entry.future)

    def check_integrity(self, request_ids: Sequence[str]) -> None:
        """Assert that these are the requests between `submit` and `drop`. For tests."""
        assert self._entries.keys() == set(request_ids), (list(self._entries), request_ids)

    def close(self) -> None:
        """Ends the compile threads. Idempotent."""
        self._entries.clear()
        self._cache.close()

    def _grammar(self, entry: _Entry) -> RequestGrammar:
        if entry.grammar is None:
            assert entry.future.done(), "the grammar is still being compiled"
            entry.grammar = RequestGrammar(entry.future.result().matcher(), entry.reasoning_end_ids)
        return entry.grammar

    def _next_buffer(self, num_rows: int) -> MaskRows:
        index = self._num_fills % len(self._buffers)
        self._num_fills += 1
        if len(self._buffers[index]) < num_rows:
            self._buffers[index] = np.empty((num_rows, self._num_words), dtype=np.int32)
        return self._buffers[index][:num_rows]

    def _find_errors(self, jobs: Sequence[MaskJob], request_ids: Sequence[str], masks: MaskRows) -> dict[str, str]:
        """Matchers that failed, and requests that can emit nothing. Their rows are opened: a draw needs one token at least.

        An empty row behind drafts is no error yet: whether the request comes to stand there is known at commit only. What is
        drawn from it is refused by `advance` then.
        """
        errors: dict[str, str] = {}
        is_empty = np.logical_not(masks.any(axis=1))
        for job, request_id in zip(jobs, request_ids, strict=True):
            reason = job.matcher.error()
            if not reason and is_empty[job.first_row]:
                reason = "it admits no token here"
            if reason:
                entry = self._entries[request_id]
                num_tokens = len(self._grammar(entry).token_ids)
                errors[request_id] = entry.error = f"the grammar failed after {num_tokens} tokens: {reason}"
                is_empty[job.first_row : job.first_row + len(job.draft_token_ids) + 1] = True
        masks[is_empty] = ALL_ALLOWED
        return errors
