"""`RequestGrammars`: what the scheduler asks about its requests' grammars, and the masks of steps in flight.

The mask of a row depends on all tokens before it, so a step's masks can be made when every step before it that draws for the
same requests has been committed: at depth 2 while its forward runs, in a pipeline long before its last stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.scheduler.request import NO_DRAFTS, Request
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager


class RequestGrammars:
    """
    Args:
        manager: the scheduler's own from now on, but for its closing.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager = manager
        # Any: only the manager uses the futures' results
        self._compiling: dict[str, Future[Any]] = {}  # by request id
        self._sharing: dict[Future[Any], list[str]] = {}  # requests that wait for it; some were dropped
        self._compiled: SimpleQueue[Future[Any]] = SimpleQueue()  # filled by the threads that compile
        self._unmasked: deque[tuple[SchedulerOutput, list[Request]]] = (
            deque()
        )  # steps in flight whose masks are to come

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    def add(self, request: Request) -> None:
        params = request.sampling.params.structured_outputs
        assert params is not None
        future = self._manager.submit(request.request_id, params, reasoning_end_ids=request.sampling.reasoning_end_ids)
        self._compiling[request.request_id] = future
        if future in self._sharing:
            self._sharing[future].append(request.request_id)
        else:
            self._sharing[future] = [request.request_id]
            future.add_done_callback(self._compiled.put)

    def wait(self, seconds: float | None, *, for_all: bool) -> None:
        """Until the next grammar, or every one, has been compiled."""
        if for_all:
            wait(self._compiling.values(), seconds)
            return
        try:
            self._compiled.put(self._compiled.get(timeout=seconds))
        except Empty:
            return

    def take_compiled(self) -> list[tuple[str, str]]:
        """The requests whose grammars have been compiled since the last call, each with "", or with why there is no grammar.

        The cost depends only on these requests, not on how many wait. Requests that share a grammar are returned together.
        """
        done: list[tuple[str, str]] = []
        while not self._compiled.empty():
            future = self._compiled.get()
            for request_id in self._sharing.pop(future):
                if self._compiling.get(request_id) is future:
                    del self._compiling[request_id]
                    done.append((request_id, self._manager.failure(request_id)))
        return done

    def is_compiling(self, request: Request) -> bool:
        return request.request_id in self._compiling

    def advance(self, request: Request, token_id: int) -> str:
        """Commit a token. "" or why the request cannot go on."""
        return self._manager.advance(request.request_id, token_id)

    def has_ended(self, request: Request) -> bool:
        """Whether the last token was the end of the grammar's text."""
        return self._manager.has_ended(request.request_id)

    def forced_tokens(self, request: Request, limit: int) -> list[int]:
        return self._manager.forced_tokens(request.request_id, limit)

    def drop(self, request: Request) -> None:
        self._manager.drop(request.request_id)
        self._compiling.pop(request.request_id, None)

    def check_integrity(self, live: list[Request]) -> None:
        """Assert that live requests are all that is kept. For tests."""
        request_ids = [request.request_id for request in live if request.has_grammar]
        self._manager.check_integrity(request_ids)
        assert self._compiling.keys() <= set(request_ids)

    # -- masks ---------------------------------------------------------------------------------------------------

    def expect(self, plan: SchedulerOutput, requests: list[Request]) -> None:
        """A step with `grammar_rows` has been planned; `requests` are those of its rows."""
        self._unmasked.append((plan, requests))

    def give_up_masks(self) -> list[tuple[int, GrammarOutput]]:
        """All steps in flight are void. Those whose masks are to come would wait for them: they get empty ones."""
        nothing = np.empty(0, dtype=np.int32)
        empty = GrammarOutput(rows=nothing, num_masks=nothing, masks=np.empty((0, 0), dtype=np.int32))
        given_up = [(plan.step_id, empty) for plan, _ in self._unmasked]
        self._unmasked.clear()
        return given_up

    def has_masks_to_fill(self) -> bool:
        return bool(self._unmasked)

    def fill(
        self, in_flight: Iterable[tuple[SchedulerOutput, list[Request]]]
    ) -> tuple[list[tuple[int, GrammarOutput]], dict[str, str]]:
        """The masks that can be made now: (step id, masks) in step order; and the requests that have to end, with why.

        Args:
            in_flight: the steps that have not been committed, oldest first.
        """
        filled: list[tuple[int, GrammarOutput]] = []
        errors: dict[str, str] = {}
        drawing: set[int] = set()  # requests whose next token is in flight
        unmasked = iter(tuple(self._unmasked))
        current = next(unmasked, None)
        for plan, requests in in_flight:
            if current is None:
                break
            if plan is current[0]:
                rows = plan.grammar_rows.tolist()
                if not any(requests[row].order in drawing for row in rows):
                    filled.append((plan.step_id, self._fill_step(plan, requests, errors)))
                    self._unmasked.remove(current)
                current = next(unmasked, None)
            drawing.update(requests[row].order for row in plan.samples.nonzero()[0].tolist())
        return filled, errors

    def _fill_step(self, plan: SchedulerOutput, requests: list[Request], errors: dict[str, str]) -> GrammarOutput:
        rows = plan.grammar_rows.tolist()
        most = plan.max_draft_tokens.tolist() or [NO_DRAFTS] * len(requests)
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        asked = []
        for row in rows:
            request = requests[row]
            has_drafts = most[row] != NO_DRAFTS
            first = request.num_drawn_tokens if has_drafts else ends[row]  # where the workers draw
            drafts = request.draft_token_ids[: most[row]] if has_drafts else []
            asked.append(MaskRequest(request.request_id, drafts, request.token_ids[first:].tolist()))
        masks = self._manager.fill(asked)
        errors.update(masks.errors)
        num_masks = np.array([len(wanted.draft_token_ids) + 1 for wanted in asked], dtype=np.int32)
        return GrammarOutput(rows=plan.grammar_rows, num_masks=num_masks, masks=masks.masks)
