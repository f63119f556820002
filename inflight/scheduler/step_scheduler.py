"""`StepScheduler`: decides what each step computes, and adds what the step has drawn to its requests.

There is no prefill phase and no decode phase. A request has `num_computed_tokens`, and each step computes more tokens of some
requests, within one token budget. The main methods and their side effects, in order:

    schedule()             1. Running requests get their next tokens, in queue order. If blocks run out, the last request
                              in this order is preempted: it loses its blocks and slot, keeps its tokens, and waits.
                           2. Waiting requests are admitted while budget, slots and blocks last. A request is held while
                              its grammar is compiled, or while its leader (n > 1) computes the same prompt.
    update_from_output()   1. Drawn and forced tokens are appended to the requests. Grammars and the prefix cache advance.
                           2. Requests that end give back their blocks and slot.
    fill_masks()           Makes those masks of steps in flight that can be made now.

To commit a step is to call `update_from_output` with its output. Plans are committed in the order in which they were made, but
a plan can be made before older plans are committed. `schedule` changes only planned state (see `Request`), and
`update_from_output` changes committed state. It is safe to plan ahead because every rank runs the steps in order:

- A step reads and writes after all older steps. So when a request ends or is preempted, its blocks and slot are free at once,
  although steps in flight still use them: the next plan may give them to another request.
- A block gets its name at commit, when it is full of committed tokens (the last recurrent state: when its request ends). Steps
  in flight write only after these tokens, so never to a named block, even if their request has ended since.
- A preempted request keeps the tokens that its steps in flight draw. It is admitted again when these steps are committed.
- If a grammar has already forced a token at the position of a drawn token, both are the same, and the drawn one is skipped.
- With drafts (guessed tokens) in flight, planned numbers of tokens are upper bounds. At commit, rejected drafts are subtracted.
"""

import bisect
import time
from collections import deque

from inflight.config.engine import SchedulerConfig
from inflight.errors import ErrorKind
from inflight.interface.request import EngineCoreOutput, EngineCoreRequest, FinishReason, Int32Array
from inflight.interface.statistics import StepCounts
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.added_tokens import AddedTokens, add_tokens, make_output, sampled_rows, take_back_rejected
from inflight.scheduler.encoder_inputs import EncoderInputs
from inflight.scheduler.gates import Gates
from inflight.scheduler.grammars import RequestGrammars
from inflight.scheduler.kv_transfers import KVTransfers
from inflight.scheduler.no_transfers import NoTransfers
from inflight.scheduler.plan import PlannedRow, make_plan, record_planned
from inflight.scheduler.prompt_sharing import PromptSharing
from inflight.scheduler.quarantine import Quarantine
from inflight.scheduler.request import NO_DRAFTS, NO_SLOT, Request, RequestStatus
from inflight.scheduler.request_parts import record_results
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.step_time.limits import Prompt, StepBudget, StepLimits
from inflight.scheduler.step_time.model import StepTimeModel
from inflight.scheduler.transfers import Transfers, TransferSetup
from inflight.structured_output.manager import StructuredOutputManager


class StepScheduler:
    """
    Args:
        grammars: compiles grammars and makes masks. None if the input processor refuses every request with a grammar.
        num_speculative_tokens: the most drafts that the workers propose for a request.
        first_step_id: the step id of the first plan.
        step_times: predicts how long steps take; None if the configuration does not limit their time.
        transfers: how cached blocks are brought from a host pool and from tiers; None if there are none.
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
        step_times: StepTimeModel | None = None,
        transfers: TransferSetup | None = None,
    ) -> None:
        self._config, self._num_speculative_tokens = config, num_speculative_tokens
        self._kv_cache, self._max_model_len, self._grammars = kv_cache, max_model_len, RequestGrammars(grammars)
        self._requests: dict[str, Request] = {}
        self.sharing = PromptSharing(self._requests, kv_cache)
        self.limits = StepLimits(config, kv_cache.block_size, step_times, has_drafts=num_speculative_tokens > 0)
        self._may_have_prompts = False  # whether a running request may have more than one token to compute
        self._waiting = RequestQueue(config.policy)
        self._running: list[Request] = []  # in queue order
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._num_added = 0
        self._next_step_id = first_step_id
        self._failed: list[EngineCoreOutput] = []  # requests that failed outside a commit, see `take_failures`
        self.stats, self.quarantine = StepCounts(), Quarantine(self._in_flight)
        self.transfers: Transfers = NoTransfers() if transfers is None else KVTransfers(kv_cache, transfers, self)
        self.gates = Gates(self._waiting, self.sharing, self.quarantine, self.limits, self.transfers)
        self.encoder: EncoderInputs | None = None  # of a model that takes images

    def record_brought(self, request: Request) -> None:
        self.gates.record_brought(request)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_begun(self) -> int:
        return sum(request.has_begun for request in self._requests.values())

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting.num_tokens

    @property
    def num_running_tokens(self) -> int:
        return sum(max(request.num_tokens - request.num_computed_tokens, 1) for request in self._running)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._failed)

    def add_request(self, core: EngineCoreRequest, prompt: Int32Array) -> None:
        """Queue a request. The input processor has already checked its sizes and that its id is new."""
        assert core.request_id not in self._requests, core.request_id
        blocks = self._kv_cache.new_request(core.cache_salt, len(prompt), core.parts)
        request = Request(core, prompt, order=self._num_added, blocks=blocks, max_model_len=self._max_model_len)
        self._num_added += 1
        self._requests[core.request_id] = request
        if (request.num_faults or request.has_grammar) and self.quarantine.add(request):
            for other in list(self._running):
                self._requeue(other)
        request.is_long = self.sharing.leader(request) is None and self.sharing.is_long(request, self.limits)
        self._waiting.push(request, is_deferred=request.has_grammar)  # deferred until its grammar has been compiled
        if request.has_grammar and not request.defers_grammar and (problem := self._grammars.add(request)):
            self.fail(request.request_id, problem, ErrorKind.OVERLOAD)

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def take_failures(self) -> list[EngineCoreOutput]:
        """Returns the requests that failed outside a commit: the grammar could not be compiled, or allows no token."""
        failed, self._failed = self._failed, []
        return failed

    def fail(self, request_id: str, reason: str, kind: ErrorKind = ErrorKind.REQUEST, param: str = "") -> None:
        """End a request with an error, unless it has ended. `take_failures` returns it. `param`: as of `EngineCoreOutput`."""
        if (request := self._requests.get(request_id)) is not None:
            self._finish(request)
            self._failed.append(make_output(request, AddedTokens((), FinishReason.ERROR, reason, kind, param)))

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """Plan the next step. Returns None if nothing can be computed until a step in flight is committed or a grammar is
        compiled."""
        for request in self.quarantine.take_deferred() if self.quarantine.deferred else ():
            if problem := self._grammars.add(request):
                self.fail(request.request_id, problem, ErrorKind.OVERLOAD)
        self._release_compiled()
        self.transfers.settle()
        rows: list[PlannedRow] = []
        budget = self._budget()
        if self.encoder is not None:
            self.encoder.begin_step(self._next_step_id, budget, is_idle=not self._in_flight)
        if self._schedule_running(rows, budget) or not (rows or self._in_flight):
            self._schedule_waiting(rows, budget)
        self._may_have_prompts = budget.leaves_prompts
        if not rows:
            self.gates.check_progress(self._requests, self._in_flight, is_compiling=bool(self._grammars.compiling))
            return None
        plan = make_plan(self._next_step_id, rows, self._kv_cache.num_groups)
        plan = plan if self.encoder is None else self.encoder.extended(plan)
        encoder_seconds = 0.0 if self.encoder is None else self.encoder.planned_seconds
        self._next_step_id += 1
        self._in_flight.append((plan, [row.request for row in rows]))
        record_planned(rows, plan.step_id, self.limits.planned(plan, encoder_seconds), self._config.stagger)
        if len(plan.grammar_rows):
            self._grammars.expect(plan)
        if self._waiting.num_deferred > 0:
            for request in (row.request for row in rows if row.request.has_planned_prompt):
                self._waiting.release(request.request_id)  # its followers
        return plan

    def _budget(self) -> StepBudget:
        waiting = self._waiting if self._free_slots and len(self._waiting) and not self.quarantine.alone else None
        if waiting is not None or self._may_have_prompts or self._num_speculative_tokens:
            return self.limits.budget(self._next_step_id, self._running, waiting)
        return self.limits.unlimited()

    def _release_compiled(self) -> None:
        """Release requests whose grammar is compiled, so that they can be admitted. End requests whose compilation failed."""
        for request_id, failure in self._grammars.take_compiled() if self._grammars.compiling else ():
            if failure:
                manager = self._grammars.manager
                self.fail(request_id, failure, manager.failure_kind(request_id), manager.failure_param(request_id))
            else:
                self._waiting.release(request_id)

    def _schedule_running(self, rows: list[PlannedRow], budget: StepBudget) -> bool:
        """Give running requests their next tokens. Returns whether waiting requests may be admitted: not if blocks ran out,
        because a request admitted now would be preempted at once. (If nothing runs then, one that was preempted is admitted.)

        With several pipeline stages a drawn token comes back late. So a request is left out until its drawn token is committed,
        or for `stagger` steps. And each step decodes for at most 1 / `stagger` of the requests. 1 turns both rules off.
        """
        running = self._running
        allocate = self._kv_cache.allocate_slots
        step_id = self._next_step_id
        num_decodes = -(-len(running) // self._config.stagger)
        late = self._grammars.late(running) if self._grammars.slow else ()
        ran_out, i = False, 0
        while i < len(running):
            request = running[i]
            i += 1
            num_planned = request.num_planned_tokens
            must_wait = num_planned == request.max_num_tokens or step_id < request.staggered_until
            is_planned = num_planned == request.num_computed_tokens  # all of it, and nothing will be drawn
            if (num_planned > request.num_tokens and must_wait) or is_planned or (late and request.request_id in late):
                continue  # its last token is already being drawn, or it must wait because of stagger or its slow grammar
            if self._num_speculative_tokens and request.has_unsent_tokens and request.num_in_flight:
                continue  # the positions of its tokens depend on which drafts in flight are accepted
            start = request.num_computed_tokens
            wanted, num_drafts = num_planned - start, NO_DRAFTS
            num_reserved = len(running) - i  # a token for each later request, so that a long prompt delays none of them
            is_prompt = wanted > 1 or (bool(request.parts) and start < request.num_prompt_tokens)
            if is_prompt:
                priority = self._waiting.key(request)[0]
                prompt = Prompt(
                    start, wanted, self.limits.is_long(wanted), priority, request.parts, request.only_prompt
                )
                count = budget.prompt_tokens(prompt, num_reserved, is_stream=request.is_decoding)
                if count == 0:
                    budget.add_prompt(prompt, 0)
                    continue
            else:
                if num_decodes == 0:
                    continue
                num_decodes -= 1
                num_drafts = request.max_drafts(self._num_speculative_tokens)
                if num_drafts > 0:
                    num_drafts = budget.drafts(min(num_drafts, budget.num_tokens - num_reserved - 1))
                count = 1 + max(num_drafts, 0)
            end = start + count
            while (grown := allocate(request.blocks, end)) is None:
                if num_drafts > 0:  # no request is preempted for drafts
                    count, end, num_drafts = count - num_drafts, end - num_drafts, 0
                    continue
                ran_out = True
                victim = running[-1]
                if victim is request and request.num_in_flight:
                    budget.num_partial += is_prompt
                    return False  # when its steps are committed, its sliding window may free blocks
                self._requeue(victim)
                self.stats.num_preemptions += 1
                if victim is request:
                    return False
            rows.append(PlannedRow(request, count, grown, False, num_drafts))
            if is_prompt:
                budget.add_prompt(prompt, count)
            else:
                budget.num_tokens -= count
        return not ran_out

    def _schedule_waiting(self, rows: list[PlannedRow], budget: StepBudget) -> None:
        """Admit waiting requests in queue order, up to the first that does not fit."""
        while budget.num_tokens > 0 and self._free_slots:
            may_start_long = budget.num_long_partial < self._config.max_long_partial_prefills
            request = self.gates.next_request(may_start_long=may_start_long)
            if request is None or (row := self._admit(request, budget)) is None:
                break
            rows.append(row)

    def _admit(self, request: Request, budget: StepBudget) -> PlannedRow | None:
        """Give a waiting request a slot. Returns None if budget or blocks do not suffice."""
        computed = self.sharing.computed_blocks(request)
        start = self._kv_cache.num_tokens_of(computed)
        wanted = request.num_tokens - start
        priority, only_prompt = self._waiting.key(request)[0], request.only_prompt
        prompt = Prompt(start, wanted, self.limits.is_long(wanted), priority, request.parts, only_prompt)
        if prompt.priority > budget.yielding_priority:
            return None
        if self._config.enable_chunked_prefill:
            count = budget.prompt_tokens(prompt, 0)
        else:
            count = wanted if wanted <= budget.num_tokens else 0
        if count == 0 or (count < wanted and budget.num_partial >= self._config.max_num_partial_prefills):
            return None
        if (grown := self._kv_cache.allocate_slots(request.blocks, start + count, computed)) is None:
            return None
        self._waiting.pop(request)
        budget.add_prompt(prompt, count)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed_tokens = start
        request.draft_token_ids = []
        request.blocks.num_committed = start // self._kv_cache.block_size
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
            request.queue_seconds = time.monotonic() - request.arrival_time
        self.stats.num_queried_tokens += request.num_tokens
        self.stats.num_hit_tokens += start
        bisect.insort(self._running, request, key=self._waiting.key)
        return PlannedRow(request, count, grown, True)

    def _requeue(self, request: Request) -> None:
        """Take the blocks and the slot from a running request. It keeps all its tokens and waits."""
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens, request.blocks.were_sought = 0, False
        request.is_long = self.limits.is_long(request.num_tokens)
        self._waiting.push(request)

    # -- commit --------------------------------------------------------------------------------------------------

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Commit the oldest step in flight. Returns what the step adds to its requests, in the order of the plan's rows.

        Nothing is added to requests that have ended since the plan was made. Requests preempted since then do get their tokens.
        """
        planned, requests = self._in_flight.popleft()
        seconds = output.compute_seconds
        self.limits.committed(seconds if self.encoder is None else self.encoder.committed(output))
        assert planned is plan and output.step_id == plan.step_id, (plan.step_id, output.step_id)
        scheduled = plan.num_scheduled_tokens.tolist()
        ends = (plan.num_computed_tokens + plan.num_scheduled_tokens).tolist()
        drafts = plan.max_draft_tokens.tolist()
        sampled = sampled_rows(plan, output)
        parts = record_results(output.parts, requests) if output.parts else {}
        results: list[EngineCoreOutput] = []
        for row, request in enumerate(requests):
            request.num_in_flight -= 1
            num_computed = ends[row]
            drawn = sampled.get(row)
            if drawn is not None:
                if drafts and drafts[row] != NO_DRAFTS:
                    num_computed = take_back_rejected(request, drawn, scheduled[row], drafts[row], self.stats)
                request.draft_token_ids = drawn.drafts
                request.num_drawn_tokens = drawn.position + len(drawn.token_ids)
            if request.status is RequestStatus.FINISHED:
                continue
            added = add_tokens(request, drawn, self._grammars, self.stats, num_computed)
            self._may_have_prompts |= request.has_unsent_tokens
            num_computed = min(num_computed, request.num_tokens)
            if request.status is RequestStatus.RUNNING and self._kv_cache.has_full_blocks(request.blocks, num_computed):
                first = self._kv_cache.num_known_tokens(request.blocks)
                num_before = request.blocks.num_committed
                self._kv_cache.commit(request.blocks, request.token_ids_from(first), num_computed, first_token=first)
                self.transfers.record_committed(request, num_before if num_before > request.blocks.num_found else 0)
            if added.finish_reason is not None:
                self._finish(request)
            elif added.token_ids and request.num_faults:
                self.quarantine.record_progress(request)
                if self.quarantine.alone not in (None, request) and request.status is RequestStatus.RUNNING:
                    self._requeue(request)  # the next one runs alone
            if added.token_ids or added.finish_reason is not None or row in parts:
                results.append(make_output(request, added, drawn, parts.get(row, ())))
        self.transfers.end_step(plan.num_tokens, len(requests), output.compute_seconds)
        return results

    def fill_masks(self) -> list[tuple[int, GrammarOutput]]:
        """Make those masks of steps in flight that can be made now. Returns the new ones, (step id, masks), in step order.

        If a grammar fails or allows no token, its request ends, and `take_failures` returns it.
        """
        filled, errors = self._grammars.fill(self._in_flight) if self._grammars.unmasked else ([], {})
        for request_id, reason in errors.items():
            self.fail(request_id, reason)
        return filled

    def _finish(self, request: Request) -> None:
        self.transfers.forget(request)
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if was_running:
            self._release(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        if request.num_faults or request.defers_grammar:
            self.quarantine.clear(request)
        self._waiting.release(request.request_id)  # its followers
        if request.has_grammar:
            self._grammars.drop(request)

    def _release(self, request: Request) -> None:
        """Give back the blocks and the slot of a running request."""
        has_last_state = self._kv_cache.name_last_state(request.blocks)
        self.transfers.record_release(request, has_last_state=has_last_state)
        self._kv_cache.free(request.blocks)
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT
        del self._running[bisect.bisect_left(self._running, self._waiting.key(request), key=self._waiting.key)]
