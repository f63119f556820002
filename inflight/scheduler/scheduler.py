"""`Scheduler`: decides what each step computes, and takes in what it computed.

There is no prefill and no decode phase: a request has `num_computed_tokens`, and a step moves some requests toward their
end within one token budget. Side effects:

    schedule()             1. running requests get their next tokens, in queue order; when blocks run out, the last
                              in that order is preempted: it loses blocks and slot, and waits with all its tokens
                           2. waiting requests are admitted while budget, slots and blocks last. Requests that wait for a
                              grammar or for a leader's prompt are held until it is ready
    update_from_output()   1. tokens are appended, with those that a grammar forces; grammars and the prefix cache advance
                           2. requests that end give back blocks and slot
    fill_masks()           the masks of steps in flight that can be made now

Plans are committed in the order in which they were made; the next ones may be made before. `schedule` changes planned state
only, `update_from_output` the truth. Every rank runs steps in order, and from that follows what makes planning ahead safe:

- Whatever a step in flight reads or writes, a later one comes after it. So blocks and slots go back the moment a request ends
  or is preempted, and the next plan may give them to another.
- The prefix cache names blocks at commit, and only those that are full of committed tokens. The steps in flight write behind
  them, so a row of a request that has ended meanwhile never touches a named block; at commit it is passed over.
- A preempted request keeps the tokens of its steps in flight, and is admitted again only after they have been committed.
- A drawn token has a position. If a grammar has already forced that position, the draw is the same token and is skipped.
- With drafts in flight what is planned are upper bounds, for blocks and budget; at commit the positions not accepted go back.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter, deque
from collections.abc import Collection

from inflight.config.engine import SchedulerConfig
from inflight.errors import EngineError
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import NO_BLOCKS, KVCacheManager
from inflight.scheduler.added_tokens import NOTHING_ADDED, AddedTokens, StepCounters, add_tokens, make_output
from inflight.scheduler.followers import Followers
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.plan import PlannedRow, make_plan
from inflight.scheduler.request import NO_DRAFTS, NO_SLOT, Request, RequestStatus
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.sampled import sampled_rows
from inflight.structured_output.manager import StructuredOutputManager


class Scheduler:
    """
    Args:
        grammars: for requests with `structured_outputs`; None where there are none.
        num_speculative_tokens: how many drafts the workers propose for a request, at most.
        first_step_id: the step id of the first plan.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        grammars: StructuredOutputManager | None = None,
        num_speculative_tokens: int = 0,
        first_step_id: int = 0,
    ) -> None:
        self._config = config
        self._grammars = None if grammars is None else RequestGrammars(grammars)
        self._num_speculative_tokens = num_speculative_tokens
        self._kv_cache, self._max_model_len = kv_cache, max_model_len
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(config.policy)
        self._followers = Followers(self._requests, self._waiting, kv_cache.block_size)
        self._running: list[Request] = []  # in queue order
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._num_added = 0
        self._next_step_id = first_step_id
        self._failed: list[EngineCoreOutput] = []  # ended outside a commit; told by the next `take_failures`
        self.stats = StepCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be given out, cached contents included."""
        return self._kv_cache.pool.num_free_blocks

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._failed)

    def add_request(self, core: EngineCoreRequest) -> None:
        """Queue a request. Its id is free and its sizes have been checked by the input processor."""
        assert core.request_id not in self._requests, core.request_id
        blocks = self._kv_cache.new_request(core.cache_salt)
        request = Request(core, order=self._num_added, blocks=blocks, max_model_len=self._max_model_len)
        self._num_added += 1
        self._requests[core.request_id] = request
        if request.has_grammar:
            assert self._grammars is not None, "the input processor lets no such request through"
            self._grammars.add(request)
        self._waiting.push(request, is_held=request.has_grammar)  # held until its grammar has been compiled

    def abort_requests(self, request_ids: Collection[str]) -> None:
        """End requests at once, in whatever state. Ids that are unknown, or have ended, are passed over."""
        for request_id in request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._finish(request)
        self._failed = [output for output in self._failed if output.request_id not in request_ids]

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def take_failures(self) -> list[EngineCoreOutput]:
        """The ends of requests that have failed outside a commit: their grammar could not be compiled, or admits nothing."""
        failed, self._failed = self._failed, []
        return failed

    def wait_for_grammars(self, seconds: float | None = None, *, for_all: bool = True) -> None:
        """Until all grammars have been compiled, or any of them; at once where none is being compiled."""
        if self._grammars is not None and self._grammars.num_compiling:
            self._grammars.wait(seconds, for_all=for_all)

    def _fail(self, request_id: str, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        self._finish(request)
        self._failed.append(make_output(request, AddedTokens((), FinishReason.ERROR, reason)))

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step, or None when nothing can be computed before the oldest step in flight is committed, or a grammar
        has been compiled."""
        if self._grammars is not None:
            for request_id, failure in self._grammars.take_compiled():
                if failure:
                    self._fail(request_id, failure)
                else:
                    self._waiting.release(self._requests[request_id])
        rows: list[PlannedRow] = []
        budget = self._schedule_running(rows, self._config.max_num_batched_tokens)
        self._schedule_waiting(rows, budget)
        if not rows:
            is_compiling = self._grammars is not None and self._grammars.num_compiling > 0
            only_waits = is_compiling and len(self._requests) == self._waiting.num_held
            if self._requests and not only_waits and not self._in_flight:
                raise EngineError(
                    f"{len(self._requests)} requests wait and none can be scheduled: a defect of Inflight"
                )
            return None
        plan = make_plan(self._next_step_id, rows, self._kv_cache.num_groups)
        self._next_step_id += 1
        step = plan, [row.request for row in rows]
        self._in_flight.append(step)
        if len(plan.grammar_rows):
            assert self._grammars is not None
            self._grammars.expect(*step)
        for request, count, _, _, num_drafts in rows:
            request.num_in_flight += 1
            if request.has_untold_tokens:
                request.has_untold_tokens = False
                request.draft_token_ids = []  # proposed behind a token that is not the last any more
            request.num_computed_tokens += count
            self._followers.release(request)
            request.num_planned_tokens += max(num_drafts, 0)
            if request.num_computed_tokens == request.num_planned_tokens:
                request.num_planned_tokens += 1
                request.staggered_until = plan.step_id + self._config.stagger
        return plan

    def _schedule_running(self, rows: list[PlannedRow], budget: int) -> int:
        """Give running requests their next tokens. Returns the budget left for others: 0 when blocks ran out, else those that
        others take would be taken back at once.

        With several stages a token takes as many steps to be drawn. So a request waits `stagger` steps for its token, or
        until it is committed, and a step takes an equal share of those that decode. Both fall away with a stagger of 1.
        """
        running, allocate, step_id = self._running, self._kv_cache.allocate_slots, self._next_step_id
        num_decodes = -(-len(running) // self._config.stagger)
        ran_out = False
        i = 0
        while i < len(running):
            request = running[i]
            i += 1
            num_planned = request.num_planned_tokens
            if num_planned > request.num_tokens and (
                num_planned == request.max_num_tokens or step_id < request.staggered_until
            ):
                continue  # its last token, or the one that it waits for, is in flight
            if self._num_speculative_tokens and request.has_untold_tokens and request.num_in_flight:
                continue  # where its steps in flight end depends on their drafts
            count, num_drafts = num_planned - request.num_computed_tokens, NO_DRAFTS
            if count == 1:
                if num_decodes == 0:
                    continue
                num_decodes -= 1
                num_drafts = self._num_drafts(request)
                count += max(num_drafts, 0)
            # every running request after this one keeps a token of the budget: a long prompt delays nobody's next token
            count = min(count, budget - (len(running) - i))
            num_drafts = min(num_drafts, count - 1)
            end = request.num_computed_tokens + count
            while (grown := allocate(request.blocks, end)) is None:
                if num_drafts > 0:  # nobody is preempted for drafts
                    count, end, num_drafts = count - num_drafts, end - num_drafts, 0
                    continue
                ran_out = True
                victim = running[-1]
                if victim is request and request.num_in_flight:
                    return 0  # when they are committed, a window that moves on may give blocks back
                self._preempt(victim)
                if victim is request:
                    return 0
            rows.append(PlannedRow(request, count, grown, False, num_drafts))
            budget -= count
        return 0 if ran_out else budget

    def _num_drafts(self, request: Request) -> int:
        """How many drafts may follow the last token; NO_DRAFTS if there are none, and it is known where that token stands."""
        if not self._num_speculative_tokens or request.has_untold_tokens:
            return NO_DRAFTS
        most = request.max_num_tokens - 1 - request.num_planned_tokens  # a token is drawn behind the last of them
        if request.num_planned_tokens > request.num_tokens:
            return min(self._num_speculative_tokens, most)
        return min(len(request.draft_token_ids), most) or NO_DRAFTS

    def _schedule_waiting(self, rows: list[PlannedRow], budget: int) -> None:
        while budget > 0 and self._free_slots and (request := self._waiting.peek()) is not None:
            if request.num_in_flight:
                break  # preempted, and soon back; those behind it would take its blocks
            if self._followers.must_wait(request):
                self._followers.hold_first()
                continue
            row = self._admit(request, budget)
            if row is None:
                break
            rows.append(row)
            budget -= row.num_tokens

    def _admit(self, request: Request, budget: int) -> PlannedRow | None:
        """Move the head of the queue into a slot, or None when budget or blocks do not suffice."""
        computed = self._computed_blocks(request)
        start = len(computed[0]) * self._kv_cache.block_size if computed else 0
        count = request.num_tokens - start
        if count > budget:
            if not self._config.enable_chunked_prefill:
                return None
            count = budget
        grown = self._kv_cache.allocate_slots(request.blocks, start + count, computed)
        if grown is None:
            return None
        self._waiting.pop()
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = start
        request.draft_token_ids = []
        request.blocks.num_committed = start // self._kv_cache.block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
            request.first_scheduled_time = time.monotonic()
        self.stats.num_queried_tokens += request.num_tokens
        self.stats.num_hit_tokens += start
        bisect.insort(self._running, request, key=self._waiting.key)
        return PlannedRow(request, count, grown, True)

    def _computed_blocks(self, request: Request) -> tuple[list[int], ...]:
        """Blocks the request need not compute: its leader's, or what the prefix cache has."""
        last = request.num_tokens - 1  # this token at least is computed, its logits are wanted
        if request.sampling.params.prompt_logprobs is not None:
            last = min(last, request.num_prompt_logprobs_done - 1)
        if (leader := self._followers.running_leader(request)) is not None:
            shared = self._kv_cache.share_prompt(request.blocks, leader.blocks, last // self._kv_cache.block_size)
            if shared != NO_BLOCKS:
                return shared
        return self._kv_cache.get_computed_blocks(request.blocks, request.token_ids[: last + 1])

    def _preempt(self, request: Request) -> None:
        self._requeue(request)
        self.stats.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self._waiting.push(request)

    # -- commit --------------------------------------------------------------------------------------------------

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Take in the oldest step in flight. Returns what it adds to its requests, in the plan's row order.

        Rows of requests that have ended since add nothing. A request preempted since has no blocks any more, but its tokens.
        """
        planned, requests = self._in_flight.popleft()
        assert planned is plan and output.step_id == plan.step_id, (plan.step_id, output.step_id)
        scheduled = plan.num_scheduled_tokens.tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        drafts = plan.max_draft_tokens.tolist()
        sampled = sampled_rows(plan, output)
        prompt_logprobs = {piece.row: piece for piece in output.prompt_logprobs}
        results: list[EngineCoreOutput] = []
        for row, request in enumerate(requests):
            request.num_in_flight -= 1
            drawn = sampled.get(row)
            num_computed = ends[row]
            if drawn is not None and drafts and drafts[row] != NO_DRAFTS:
                num_computed = drawn.position - 1 + len(drawn.token_ids)
                self._give_back(request, scheduled[row] - len(drawn.token_ids))
                self.stats.num_draft_tokens += min(drafts[row], len(request.draft_token_ids))
                self.stats.num_accepted_tokens += len(drawn.token_ids) - 1
            if drawn is not None:
                request.draft_token_ids = drawn.drafts
                request.num_drawn_tokens = drawn.position + len(drawn.token_ids)
            if request.status is RequestStatus.FINISHED:
                continue
            if (piece := prompt_logprobs.get(row)) is not None:
                request.num_prompt_logprobs_done = piece.start + len(piece.columns.ranks)
            added = NOTHING_ADDED if drawn is None else add_tokens(request, drawn, self._grammars, self.stats)
            num_computed = min(num_computed, request.num_tokens)
            if request.status is RequestStatus.RUNNING and self._kv_cache.has_full_blocks(request.blocks, num_computed):
                self._kv_cache.commit(request.blocks, request.token_ids, num_computed)
            if added.finish_reason is not None:
                self._finish(request)
            if added.token_ids or added.finish_reason is not None or piece is not None:
                results.append(make_output(request, added, drawn, piece))
        return results

    def _give_back(self, request: Request, num_rejected: int) -> None:
        """Drafts that were planned and not computed, or not accepted."""
        request.num_planned_tokens -= num_rejected
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= num_rejected

    def fill_masks(self) -> list[tuple[int, GrammarOutput]]:
        """The masks of steps in flight that can be made now, each step's once: (step id, masks), in step order.

        Requests that cannot go on, because their grammar fails or admits nothing, have ended then; `take_failures` tells.
        """
        if self._grammars is None or not self._grammars.has_masks_to_fill():
            return []
        filled, errors = self._grammars.fill(self._in_flight)
        for request_id, reason in errors.items():
            self._fail(request_id, reason)
        return filled

    def is_oldest_step_dead(self) -> bool:
        """Whether every request of the oldest step in flight has ended."""
        requests = self._in_flight[0][1] if self._in_flight else []
        return bool(requests) and all(request.status is RequestStatus.FINISHED for request in requests)

    def void(self) -> list[tuple[int, GrammarOutput]]:
        """Drop all steps in flight: one has failed, and the inputs of the younger ones are not what was planned.

        Their requests wait again with all their tokens: what the workers have of them is not known, so they travel in full.

        Returns:
            what to send for steps that wait for masks in the workers.
        """
        for _, requests in self._in_flight:
            for request in requests:
                if request.status is RequestStatus.RUNNING:
                    self._requeue(request)
                request.num_in_flight = 0
                request.num_planned_tokens = request.num_tokens
        self._in_flight.clear()
        return self._grammars.give_up_masks() if self._grammars is not None else []

    def reset_prefix_cache(self) -> None:
        """Forget all cached contents. Running requests keep their blocks, but no other request can reuse these."""
        self._kv_cache.reset_prefix_cache(request.blocks for request in self._running)

    def describe(self) -> str:
        """Cache and requests as text, for an error dump."""
        pool = self._kv_cache.pool
        lines = [
            f"{len(self._running)} requests run, {len(self._waiting)} wait; {pool.num_free_blocks} of {pool.num_blocks - 1} KV "
            f"blocks are free; {len(self._in_flight)} steps in flight"
        ]
        lines += [
            f"  {request.request_id}: {request.status.name}, slot {request.slot}, {request.num_prompt_tokens} prompt tokens, "
            f"{request.num_output_tokens} emitted, {request.num_computed_tokens} of {request.num_planned_tokens} planned, "
            f"{len(request.blocks.tables[0])} blocks, in {request.num_in_flight} steps in flight"
            for request in self._requests.values()
            if request.status is RequestStatus.RUNNING or request.num_in_flight
        ]
        return "\n".join(lines)

    def check_integrity(self) -> None:
        """Assert that slots, blocks, queues and grammars agree. For tests, at any moment between two calls."""
        live = list(self._requests.values())
        running = [request for request in live if request.status is RequestStatus.RUNNING]
        assert sorted(self._waiting.key(r) for r in running) == [self._waiting.key(r) for r in self._running]
        assert len(live) == len(self._running) + len(self._waiting)
        slots = [request.slot for request in running]
        assert sorted(slots + self._free_slots) == list(range(self._config.max_num_seqs))
        rows = Counter(request.order for _, requests in self._in_flight for request in requests)
        for request in live:
            assert request.num_tokens <= request.num_planned_tokens <= request.max_num_tokens
            assert 0 <= request.num_computed_tokens < request.num_planned_tokens
            assert request.num_in_flight == rows[request.order]
            assert request.num_in_flight or request.num_planned_tokens == request.num_tokens
            assert (request.slot == NO_SLOT) == (request.status is not RequestStatus.RUNNING)
        self._kv_cache.check_integrity([request.blocks for request in live])
        self._followers.check_integrity()
        for request in live:
            is_compiling = self._grammars is not None and self._grammars.is_compiling(request)
            assert self._waiting.is_held(request) == (is_compiling or self._followers.is_held(request))
        if self._grammars is not None:
            self._grammars.check_integrity(live)

    def _finish(self, request: Request) -> None:
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if was_running:
            self._release(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._followers.release(request)
        if request.has_grammar and self._grammars is not None:
            self._grammars.drop(request)

    def _release(self, request: Request) -> None:
        """Give back blocks and slot of a running request."""
        self._kv_cache.free(request.blocks)
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT
        i = bisect.bisect_left(self._running, self._waiting.key(request), key=self._waiting.key)
        del self._running[i]
