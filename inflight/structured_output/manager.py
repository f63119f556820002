"""`StructuredOutputManager`: the grammars of the engine's requests. It owns the matchers, the mask buffers and the cache.

The engine's thread makes all calls. Compilations and replays of emitted tokens run in other threads. The calls for one request
are:

1. `submit` when the request arrives: its grammar is compiled, or found in the cache. If the request has emitted tokens before
   (it was resumed), another thread advances its position over these tokens. The request may be scheduled when the future that
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

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from inflight.errors import ErrorKind, InflightError
from inflight.interface.request import AnswerFrame
from inflight.structured_output.answer_frame_reader import AnswerFrameReader, FrameReader
from inflight.structured_output.backend import (
    ALL_ALLOWED,
    CompiledGrammar,
    GrammarBackend,
    MaskJob,
    MaskRows,
    allow_only,
    num_mask_words,
)
from inflight.structured_output.free_text_reader import FREE_TEXT, FreeTextReader, free_grammar
from inflight.structured_output.grammar_cache import GrammarCache
from inflight.structured_output.pace import TOO_SLOW, GrammarPace
from inflight.structured_output.request_grammar import RequestGrammar
from inflight.structured_output.spec import GrammarSpec
from inflight.structured_output.thinking_budget import ThinkingBudget
from inflight.structured_output.token_texts import TokenTexts
from inflight.structured_outputs_params import StructuredOutputsParams

NOTHING_ADMITTED = "it admits no token here"
# The most that the cache of compiled grammars may hold. If there is more, it evicts the least recently used grammars.
MAX_CACHED_GRAMMARS = 512
MAX_CACHED_BYTES = 256 * 2**20


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


class StructuredOutputManager:
    """Only the engine's thread uses it. The docstring of the module has the order of the calls.

    Args:
        create_backend: called on a compile thread for the first grammar. If it raises an error, the request fails.
        vocab_size: the vocabulary size of the model and of the backend.
        num_buffers: the masks of a step are overwritten by the `num_buffers`-th later call of `fill`. With d steps in flight,
            2 * d buffers are enough: after the masks of a step are made, and before it draws, masks may be made for up to
            d - 1 older steps (which had to wait for commits) and d - 1 later ones.
        num_threads: how many grammars are compiled at a time in each of the two queues of `GrammarCache`.
        is_paced: False if other engines must make the same plans (`GrammarPace`).

    Attributes:
        pace: which requests have slow grammars.
    """

    def __init__(
        self,
        create_backend: Callable[[], GrammarBackend],
        vocab_size: int,
        *,
        num_buffers: int,
        num_threads: int = 2,
        is_paced: bool = True,
    ) -> None:
        self.pace = GrammarPace(is_on=is_paced)
        self._cache = GrammarCache(
            create_backend, num_threads=num_threads, max_count=MAX_CACHED_GRAMMARS, max_bytes=MAX_CACHED_BYTES
        )
        self._grammars: dict[str, RequestGrammar] = {}
        # One thread, which starts when it is needed. Only this thread changes the two attributes after it.
        self._preparations = ThreadPoolExecutor(1, thread_name_prefix="inflight-grammar-start")
        self._texts: TokenTexts | None = None
        self._readers: dict[tuple[AnswerFrame, bool, bool], FrameReader] = {}
        self._vocab_size = vocab_size
        self._num_words = num_mask_words(vocab_size)
        self._buffers = [np.empty((0, self._num_words), dtype=np.int32) for _ in range(num_buffers)]
        self._num_fills = 0

    def submit(
        self,
        request_id: str,
        params: StructuredOutputsParams | None,
        *,
        frame: AnswerFrame | None = None,
        emitted_token_ids: Sequence[int] = (),
        client: str = "",
    ) -> Future[Any]:  # Any: only the manager uses the result
        """Begin to compile a request's grammar, and return at once.

        Args:
            params: the constraint; None if the text is free and only its reasoning is bounded. Then nothing is compiled.
            frame: what may be around the constrained text; None if the whole output is constrained.
            emitted_token_ids: the tokens that a resumed request has emitted. The grammar goes on after them.
            client: whose request it is. Clients take turns in compiling.

        Returns:
            a future that ends when the grammar has been compiled and advanced over the emitted tokens, or has failed. Do not
            cancel it, because several requests may share it.

        Raises:
            OverloadedError: too many grammars wait, and no client has more of them than this one.
        """
        assert request_id not in self._grammars, f"{request_id} was submitted before"
        if params is None:
            spec = FREE_TEXT
            future = free_grammar()
        else:
            spec = GrammarSpec.from_params(params)
            future = self._cache.get(spec, client)
        grammar = self._grammars[request_id] = RequestGrammar(spec, future, has_frame=frame is not None)
        if params is None and frame is not None and not emitted_token_ids:
            reader = self._readers.get(_reader_key(frame, spec))
            if reader is not None:  # as for most requests with a budget: nothing has to be prepared
                grammar.read_frame(ThinkingBudget(reader, frame))
                return future
        if frame is None and not emitted_token_ids:
            return future
        return self._prepare(grammar, frame, emitted_token_ids)

    def _prepare(
        self, grammar: RequestGrammar, frame: AnswerFrame | None, emitted_token_ids: Sequence[int]
    ) -> Future[None]:
        """When the grammar is compiled, prepare the reader of its frame and advance it over the tokens, in another thread.
        Returns a future that ends when that is done."""
        prepared: Future[None] = Future()

        def prepare() -> None:
            try:
                if frame is not None and not grammar.failure:
                    grammar.read_frame(self._reader(frame, grammar.spec))
                grammar.replay(emitted_token_ids)
            except InflightError as error:
                grammar.fail(str(error))
            except Exception as error:  # a defect of the grammar library: only this request fails
                grammar.fail(f"{type(error).__name__}: {error}")
            prepared.set_result(None)

        def start(_: Future[CompiledGrammar]) -> None:
            with suppress(RuntimeError):  # the manager was closed
                self._preparations.submit(prepare)

        grammar.future.add_done_callback(start)
        return prepared

    def _reader(self, frame: AnswerFrame, spec: GrammarSpec) -> FrameReader:
        """Reads this frame. The part without the budget is made once, because that needs up to a tenth of a second for a large
        vocabulary."""
        key = _reader_key(frame, spec)
        if key not in self._readers:
            if self._texts is None:
                backend = self._cache.backend()
                self._texts = TokenTexts(backend.vocabulary_bytes(), self._vocab_size, backend.eos_token_ids)
            if spec == FREE_TEXT:
                self._readers[key] = FreeTextReader(frame, self._texts)
            else:
                self._readers[key] = AnswerFrameReader(frame, self._texts, keeps_blanks=spec.is_exact)
        reader = self._readers[key]
        if frame.max_reasoning_tokens is None:
            return reader
        return ThinkingBudget(reader, frame)

    def failure(self, request_id: str) -> str:
        """Why the grammar cannot be used. "" if it can be used, or if its compilation has not ended."""
        return self._grammars[request_id].failure

    def failure_kind(self, request_id: str) -> ErrorKind:
        """What the cause of `failure` is: too many grammars wait, or the request itself."""
        return ErrorKind.OVERLOAD if self._grammars[request_id].was_refused else ErrorKind.REQUEST

    def failure_param(self, request_id: str) -> str:
        """The parameter that is the cause of `failure`; "" if it is not known."""
        return self._grammars[request_id].failure_param

    def advance(self, request_id: str, token_id: int) -> str:
        """Commit an emitted token. Returns "", or why the grammar does not admit the token. In this case the request must
        end."""
        grammar = self._grammars[request_id]
        pace = self.pace
        if request_id in pace.slow:
            begin = time.thread_time()
            error = grammar.advance(token_id)
            pace.spend(request_id, time.thread_time() - begin)
            if pace.next_token(request_id) and not error:
                return grammar.fail(TOO_SLOW)
            return error
        begin = time.perf_counter()
        error = grammar.advance(token_id)
        if (seconds := time.perf_counter() - begin) > pace.slow_seconds:
            pace.add(request_id, seconds)
        return error

    def has_ended(self, request_id: str) -> bool:
        """Whether the request's last token was an EOS that its grammar admits. If so, its text is complete."""
        return self._grammars[request_id].has_ended()

    def forced_tokens(self, request_id: str, limit: int) -> list[int]:
        """Returns the next tokens of the request, up to the first position where the grammar does not allow exactly one token;
        at most `limit` tokens.

        The list is empty after an error, and before the constrained text has certainly begun, but for a text that closes the
        reasoning.
        """
        grammar = self._grammars[request_id]
        pace = self.pace
        if grammar.failure:
            return []
        clock = time.thread_time if request_id in pace.slow else time.perf_counter
        begin = clock()
        forced = grammar.forced_tokens(limit)
        self._record_time(request_id, clock() - begin)
        return forced

    def num_free(self, request_id: str) -> int:
        """A number of next tokens of the request that need no mask, whatever they are. 0 after an error."""
        grammar = self._grammars[request_id]
        return 0 if grammar.failure else grammar.num_free()

    def fill(self, rows: Sequence[MaskRequest]) -> FilledMasks:
        """Make the masks of a step: `len(draft_token_ids) + 1` rows for each request.

        Row i is the mask after the request's emitted tokens (without the `known` tokens) and its first i drafts. If the request
        was dropped or has failed, its rows allow all tokens. Python's GIL is released for most of the work.
        """
        row_starts = list(accumulate((len(wanted.draft_token_ids) + 1 for wanted in rows), initial=0))
        masks = self._next_buffer(row_starts[-1])
        jobs: dict[str, MaskJob] = {}
        errors: dict[str, str] = {}
        for (request_id, drafts, known), first_row in zip(rows, row_starts, strict=False):
            if known:
                num_known = min(len(known), len(drafts) + 1)
                allow_only(masks[first_row : first_row + num_known], known)
                first_row += num_known
                if num_known > len(drafts):
                    continue
                # later rows count only if the drafts equal the known tokens: otherwise a draft is rejected
                drafts = drafts[num_known:]
            grammar = self._grammars.get(request_id)
            own_rows = masks[first_row : first_row + len(drafts) + 1]
            if grammar is None or not grammar.is_ready:
                own_rows.fill(ALL_ALLOWED)
            elif grammar.is_inside_answer:
                jobs[request_id] = MaskJob(grammar.matcher, first_row, drafts)
            elif reason := grammar.fill(drafts, own_rows) or ("" if own_rows[0].any() else NOTHING_ADMITTED):
                errors[request_id] = grammar.fail(reason)
                own_rows.fill(ALL_ALLOWED)
        if jobs:
            self._fill_in_time(jobs, masks)
        return FilledMasks(masks, {**errors, **self._find_errors(jobs, masks)})

    def _fill_in_time(self, jobs: Mapping[str, MaskJob], masks: MaskRows) -> None:
        """Fill the masks of these jobs: those of slow requests one by one, and the others together."""
        pace = self.pace
        alone = {each for each in jobs if each in pace.slow or each in pace.watched}
        for request_id in alone:
            job = jobs[request_id]
            clock = time.thread_time if request_id in pace.slow else time.perf_counter
            begin = clock()
            job.matcher.fill_masks_along(job.draft_token_ids, masks[job.rows])
            self._record_time(request_id, clock() - begin)
        together = [job for request_id, job in jobs.items() if request_id not in alone]
        begin = time.perf_counter()
        if together:
            self._cache.backend().fill_masks(together, masks)
        pace.watched = jobs.keys() - alone if time.perf_counter() - begin > pace.slow_seconds else ()

    def _record_time(self, request_id: str, seconds: float) -> None:
        """A call of a grammar took so long: processor time if the request is slow, wall time if it is not."""
        if request_id in self.pace.slow:
            self.pace.spend(request_id, seconds)
        else:
            self.pace.add(request_id, seconds)

    def drop(self, request_id: str) -> None:
        """Forget a request. If no other request waits for its compilation, the compilation is given up. An unknown request is
        ignored."""
        self.pace.drop(request_id)
        if (grammar := self._grammars.pop(request_id, None)) is not None:
            self._cache.release(grammar.spec, grammar.future)

    def check_integrity(self, request_ids: Sequence[str]) -> None:
        """Assert that the manager has exactly these requests. For tests."""
        assert self._grammars.keys() == set(request_ids), (list(self._grammars), request_ids)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._grammars.clear()
        self._cache.close()
        self._preparations.shutdown(wait=False, cancel_futures=True)

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
                reason = NOTHING_ADMITTED
            if reason:
                errors[request_id] = self._grammars[request_id].fail(reason)
                is_empty[job.rows] = True
        masks[is_empty] = ALL_ALLOWED
        return errors


def _reader_key(frame: AnswerFrame, spec: GrammarSpec) -> tuple[AnswerFrame, bool, bool]:
    """What a reader depends on. The budget is not part of it, because each request may have another one."""
    return replace(frame, max_reasoning_tokens=None, closing_token_ids=()), spec.is_exact, spec == FREE_TEXT
