"""`RequestGrammars`: which requests wait until their grammar is compiled, and which steps in flight wait for their masks.

A mask says which tokens a row may draw. It depends on all earlier tokens of the row's request. A step's tokens are known when
the step is committed (its results are added to the requests). So the masks of a step can be made when all earlier steps that
draw for the same requests have been committed. Usually the forward pass of the step runs at this time, so the masks cost no
time. With several pipeline stages, the step is still on an early stage.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, Queue
from typing import Any

import numpy as np

from inflight.errors import OverloadedError
from inflight.interface.step import GrammarOutput, SchedulerOutput
from inflight.scheduler.request import NO_DRAFTS, Request
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager


class RequestGrammars:
    """
    Args:
        manager: compiles grammars and makes masks. The caller must close it. None if no request has a grammar.

    Attributes:
        compiling: request id -> the compilation that the request waits for.
        unmasked: the ids of the steps in flight that wait for their masks.
        slow: the requests whose grammars need much time (`GrammarPace`), by their ids.
    """

    def __init__(self, manager: StructuredOutputManager | None) -> None:
        self._manager = manager
        self.slow: Mapping[str, object] = {} if manager is None else manager.pace.slow
        # Any: only the manager uses the futures' results
        self.compiling: dict[str, Future[Any]] = {}
        # compilation -> the requests that wait for it; some of them may have been dropped
        self._sharing: dict[Future[Any], list[str]] = {}
        self._compiled: Queue[Future[Any]] = Queue()  # ended compilations, put by the compiling threads
        self.unmasked: set[int] = set()

    @property
    def manager(self) -> StructuredOutputManager:
        assert self._manager is not None, "a request with a grammar was admitted to an engine without grammars"
        return self._manager

    def add(self, request: Request) -> str:
        """Begin to compile the request's grammar. Returns "", or why that is not possible now."""
        params = request.sampling.params.structured_outputs
        request.defers_grammar = False
        frame = request.sampling.answer_frame
        core = request.core
        try:
            future = self.manager.submit(
                core.request_id, params, frame=frame, emitted_token_ids=core.emitted_token_ids, client=core.client
            )
        except OverloadedError as error:
            return str(error)
        self.compiling[request.request_id] = future
        if future in self._sharing:
            self._sharing[future].append(request.request_id)
        else:
            self._sharing[future] = [request.request_id]
            future.add_done_callback(self._compiled.put)
        return ""

    def wait(self, seconds: float | None, *, for_all: bool) -> None:
        """Wait until the next grammar is compiled, or with `for_all` until all grammars are compiled, but at most `seconds`.
        Then `take_compiled` returns them. Returns at once if no grammar is being compiled."""
        missing = set(self.compiling.values())
        ended = list[Future[Any]]()
        end = None if seconds is None else time.monotonic() + seconds
        # not the futures are waited for, but their places in the queue: a future is done before its callback has run
        with suppress(Empty):
            while missing and (for_all or not ended):
                ended.append(self._compiled.get(timeout=None if end is None else max(end - time.monotonic(), 0.0)))
                missing.discard(ended[-1])
        for future in ended:
            self._compiled.put(future)

    def take_compiled(self) -> list[tuple[str, str]]:
        """Returns (request id, failure) for each request whose compilation has ended since the last call. The failure is "" if
        the compilation succeeded.

        The cost does not depend on how many requests wait. Requests that share a grammar are returned together.
        """
        done: list[tuple[str, str]] = []
        while self._compiled.queue:  # without its lock: this is asked in each plan
            future = self._compiled.get()
            for request_id in self._sharing.pop(future):
                if self.compiling.get(request_id) is future:
                    del self.compiling[request_id]
                    done.append((request_id, self.manager.failure(request_id)))
        return done

    def late(self, running: list[Request]) -> Collection[str]:
        """The ids of the running requests that the next plan leaves out, because their grammars need much time."""
        return self.manager.pace.late({request.request_id for request in running})

    def is_compiling(self, request: Request) -> bool:
        return request.request_id in self.compiling

    def drop(self, request: Request) -> None:
        self.manager.drop(request.request_id)
        self.compiling.pop(request.request_id, None)

    def check_integrity(self, live: list[Request]) -> None:
        """Assert that there are entries only for live requests. For tests."""
        request_ids = [request.request_id for request in live if request.has_grammar and not request.defers_grammar]
        if self._manager is not None:
            self._manager.check_integrity(request_ids)
        assert self.compiling.keys() <= set(request_ids)

    # -- masks ---------------------------------------------------------------------------------------------------

    def expect(self, plan: SchedulerOutput) -> None:
        """Remember that a planned step, which has `grammar_rows`, needs masks."""
        self.unmasked.add(plan.step_id)

    def give_up_masks(self) -> list[tuple[int, GrammarOutput]]:
        """Called when all steps in flight are void (their results will not be used). Returns empty masks for the steps whose
        workers wait for masks."""
        nothing = np.empty(0, dtype=np.int32)
        empty = GrammarOutput(rows=nothing, num_masks=nothing, masks=np.empty((0, 0), dtype=np.int32))
        given_up = [(step_id, empty) for step_id in sorted(self.unmasked)]
        self.unmasked.clear()
        return given_up

    def fill(
        self, in_flight: Iterable[tuple[SchedulerOutput, list[Request]]]
    ) -> tuple[list[tuple[int, GrammarOutput]], dict[str, str]]:
        """Make the masks that can be made now.

        Args:
            in_flight: the steps that have not been committed, oldest first, with the requests of their rows.

        Returns:
            (step id, masks) in step order; and request id -> reason, for the requests that must end.
        """
        filled: list[tuple[int, GrammarOutput]] = []
        errors: dict[str, str] = {}
        drawing: set[int] = set()  # `order` of the requests that draw in an earlier step in flight
        for plan, requests in in_flight:
            if not self.unmasked:
                break
            if plan.step_id in self.unmasked and not any(
                requests[row].order in drawing for row in plan.grammar_rows.tolist()
            ):
                self.unmasked.remove(plan.step_id)
                filled.append((plan.step_id, self._fill_step(plan, requests, errors)))
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
            first = request.num_drawn_tokens if has_drafts else ends[row]  # the position of the row's first drawn token
            drafts = request.draft_token_ids[: most[row]] if has_drafts else []
            asked.append(MaskRequest(request.request_id, drafts, request.token_ids_from(first).tolist()))
        masks = self.manager.fill(asked)
        errors.update(masks.errors)
        num_masks = np.array([len(wanted.draft_token_ids) + 1 for wanted in asked], dtype=np.int32)
        return GrammarOutput(rows=plan.grammar_rows, num_masks=num_masks, masks=masks.masks)
