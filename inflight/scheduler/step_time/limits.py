"""`StepLimits`: how long a step may take, and how many tokens of each prompt fit into it. A `StepBudget` is for one step.

While requests decode, a step must not delay their next tokens. So the step's time is limited by the target for the time between
two tokens of a request (`target_inter_token_latency`). Decodes come first, and prompts get the rest of the time:

    | fixed cost, decodes ........ | drafts | prompt tokens .................... |
    |<-------------------------- limit: at most the target --------------------->|

- If the user's target is `auto`, the time between two tokens of a request is predicted for steps with only decodes. The target
  is twice this time, but at least MIN_AUTO_SECONDS. Of prompts that become vectors, nobody waits for a first token: they may
  only use VECTOR_SHARE of this time, so that embeddings beside chats hardly slow them.
- If an engine has several pipeline stages, or if drafts are in flight, a request is not in every step, so its next token comes
  a few steps later. The time until that token is due is divided equally among these steps.
- The sum of the predicted times of all planned steps is used as a clock. `Request.last_token_time` is a time on this clock.
- While no request decodes, the limit is `max_step_seconds`, so that arrivals, aborts and shutdowns do not wait long.
- If there are long prompts, every step computes at least one block of a long prompt, whatever the limit is. The same is true
  for short prompts, but a short prompt may have to wait behind a long prompt of a higher priority. So even with a very short
  limit all prompts are computed in the end.

Prompts get tokens in queue order. But if short prompts wait behind a long prompt, the long prompt leaves them as many tokens as
they need, at most half of the tokens that fit into the step at this point.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from inflight.config.engine import SchedulerConfig
from inflight.interface.parts import RequestPart
from inflight.interface.step import SchedulerOutput
from inflight.scheduler.request import Request
from inflight.scheduler.request_parts import fitting_tokens
from inflight.scheduler.request_queue import RequestQueue
from inflight.scheduler.step_time.load import StepLoad, load_of
from inflight.scheduler.step_time.model import StepTimeModel

logger = logging.getLogger(__name__)

MIN_AUTO_SECONDS = 0.1
VECTOR_SHARE = 1.2  # of the time of a step that only decodes: its time with tokens of prompts that become vectors


class Prompt(NamedTuple):
    """What the planning of a step needs to know of a prompt that has not been computed completely.

    Attributes:
        context: the tokens that have been computed.
        wanted: the tokens that are left.
        priority: the request's priority number; 0 if the policy is not "priority".
        only_prompt: nothing is drawn (`Request.only_prompt`).
    """

    context: int
    wanted: int
    is_long: bool
    priority: int
    parts: tuple[RequestPart, ...] = ()
    only_prompt: bool = False


@dataclass(slots=True)
class StepBudget:
    """What the step that is being planned may still compute.

    Attributes:
        num_tokens: the tokens that are left of `max_num_batched_tokens`.
        times: predicts the step's time; None if only tokens are limited.
        seconds: the step's limit.
        vector_seconds: its limit for prompts of which nothing is drawn, at most `seconds`.
        load: what the step computes: first all decodes without drafts, then also the drafts and prompts that were added. It
            is not counted if only tokens are limited.
        num_short_tokens: tokens of short prompts that have not been planned yet.
        num_partial: how many prompts will still have tokens to compute after the step. Prompts that the step skips count, too.
        num_long_partial: how many of these prompts are long.
        yielding_priority: the smallest priority number of the running prompts that get few tokens because a request of a higher
            priority waits; infinite if there are no such prompts. `num_partial` does not count these prompts.
        waiting_priority: the priority number of the first waiting request; infinite if none can be admitted.
        part_costs: what the step spends on parts of requests, by kind.
        fit_images: `EncoderInputs.fitting_tokens`; None if the model takes no images.
    """

    num_tokens: int
    block_size: int
    times: StepTimeModel | None
    seconds: float
    load: StepLoad
    num_short_tokens: int
    has_long_prompt: bool = False
    has_short_prompt: bool = False
    num_partial: int = 0
    num_long_partial: int = 0
    yielding_priority: float = math.inf
    waiting_priority: float = math.inf
    vector_seconds: float = math.inf
    part_costs: dict[str, int] = field(default_factory=dict)
    fit_images: Callable[[Sequence[RequestPart], int, int, int], int] | None = None

    def prompt_tokens(self, prompt: Prompt, num_reserved: int, *, is_stream: bool = False) -> int:
        """Returns how many tokens of a prompt the step computes; may be 0.

        Args:
            num_reserved: tokens of the step that are kept for other rows.
            is_stream: the request has drawn tokens already. The tokens that are left were forced by a grammar, or their KV
                blocks were lost. Each step computes some tokens of such a request.
        """
        context, wanted, is_long, priority, parts, only_prompt = prompt
        room = self.num_tokens - num_reserved
        piece = 1 if only_prompt and self.vector_seconds < self.seconds else self.block_size
        if self.times is not None:
            seconds = self.vector_seconds if only_prompt else self.seconds
            fitting = self.times.num_prompt_tokens_within(seconds, self.load, context, room)
        else:
            fitting = room
        share = max(fitting // 2, fitting - self.num_short_tokens) if is_long else fitting
        if priority > self.waiting_priority:
            share = 0  # a request of a higher priority waits, so this prompt gets at most a block
        if share < min(wanted, room):  # then the row ends with a full block
            share -= (context + share) % piece
        if is_stream:
            must_move = True
        elif is_long:
            must_move = not self.has_long_prompt
        else:  # behind a long prompt of a higher priority `num_short_tokens` is 0, and a short prompt may have to wait
            must_move = not self.has_short_prompt and (self.num_short_tokens > 0 or not self.has_long_prompt)
        count = min(wanted, max(share, min(piece, room) if must_move else 0))
        if parts and self.fit_images is not None:
            count = self.fit_images(parts, context, count, room if must_move else count)
        return fitting_tokens(parts, context, count, self.part_costs) if parts else count

    def add_prompt(self, prompt: Prompt, num_tokens: int) -> None:
        """Count a prompt of which the step computes `num_tokens`, or 0 if it skips the prompt."""
        context, wanted, is_long, priority, *_ = prompt
        if num_tokens < wanted and priority > self.waiting_priority:
            self.yielding_priority = min(self.yielding_priority, priority)
        elif num_tokens < wanted:
            self.num_partial += 1
            self.num_long_partial += is_long
        if num_tokens > 0:
            self.num_tokens -= num_tokens
            if self.times is not None:
                self.load.add_prompt(context, num_tokens, draws=num_tokens == wanted)
            if is_long:
                self.has_long_prompt = True
            else:
                self.has_short_prompt = True
                self.num_short_tokens = max(0, self.num_short_tokens - num_tokens)

    @property
    def leaves_prompts(self) -> bool:
        """Whether some prompts will still have tokens to compute after the step."""
        return self.num_partial > 0 or self.yielding_priority < math.inf

    def drafts(self, wanted: int) -> int:
        """Returns how many of the `wanted` drafts of a decode the step computes, and adds them to the load."""
        if self.times is None:
            return wanted
        load, count = self.load, wanted
        load.num_tokens += wanted
        load.num_draws += wanted
        while count > 0 and self.times.seconds(load) > self.seconds:
            count -= 1
            load.num_tokens -= 1
            load.num_draws -= 1
        return count


class StepLimits:
    """Owned by the scheduler.

    Args:
        times: learns from committed steps; None if the configuration does not limit the time of steps.
        has_drafts: the workers propose drafts. Then a request whose tokens were forced by a grammar is in no new step before
            its steps in flight have been committed.

    Attributes:
        last_step: predicted and measured seconds of the step committed last; None if they are not known.
        predicted_seconds: the predicted time of the step planned last; infinite if it is not known.
    """

    def __init__(
        self, config: SchedulerConfig, block_size: int, times: StepTimeModel | None, *, has_drafts: bool = False
    ) -> None:
        self._config, self._block_size, self.times, self._has_drafts = config, block_size, times, has_drafts
        self._clock = 0.0  # the predicted seconds of all planned steps together
        self._in_flight: deque[StepLoad] = deque()  # planned, not committed
        self._has_warned = False
        self.last_step: tuple[float, float] | None = None
        self.predicted_seconds = math.inf

    def is_long(self, num_tokens: int) -> bool:
        return num_tokens > self._config.long_prefill_token_threshold

    def budget(self, step_id: int, running: Sequence[Request], waiting: RequestQueue | None) -> StepBudget:
        """The budget of a new step.

        Args:
            running: in queue order.
            waiting: None if no request can be admitted.
        """
        load, seconds, vector_seconds = StepLoad(), math.inf, math.inf
        if self.times is not None:
            seconds, vector_seconds = self._limits(self.times, step_id, running, load)
        times = self.times if seconds < math.inf else None
        num_short = self._num_short_tokens(running, waiting)
        most = self._config.max_num_batched_tokens
        budget = StepBudget(most, self._block_size, times, seconds, load, num_short)
        budget.vector_seconds = vector_seconds
        first = waiting.peek() if waiting is not None and self._config.policy == "priority" else None
        budget.waiting_priority = first.core.priority if first is not None else math.inf
        return budget

    def unlimited(self) -> StepBudget:
        """The budget of a step that can have neither prompts nor drafts."""
        return StepBudget(self._config.max_num_batched_tokens, self._block_size, None, math.inf, StepLoad(), 0)

    def _num_short_tokens(self, running: Sequence[Request], waiting: RequestQueue | None) -> int:
        """The tokens of the short prompts that come before the first long prompt in queue order, and of the short prompts with
        which the first long prompt has to share the step: those behind it, except those of a lower priority."""
        first_long, num_tokens, is_fcfs = None, 0, self._config.policy == "fcfs"
        for request in running:
            remaining = request.num_planned_tokens - request.num_computed_tokens
            if remaining <= 1:
                continue
            if self.is_long(remaining):
                first_long = first_long or request
            elif first_long is None or is_fcfs or request.core.priority <= first_long.core.priority:
                num_tokens += remaining
        if waiting is not None and self._config.max_num_partial_prefills > 1:
            first_long = first_long or waiting.peek()
            if first_long is not None:
                most = self._config.max_num_batched_tokens
                num_tokens += waiting.num_short_tokens(waiting.key(first_long)[0], most)
        return num_tokens

    def _limits(
        self, times: StepTimeModel, step_id: int, running: Sequence[Request], load: StepLoad
    ) -> tuple[float, float]:
        """Adds the decodes of the step to `load`. Returns `seconds` and `vector_seconds` of its budget."""
        # in how many steps a request gets its next token (1: in this step) -> the longest time since the last token of such a
        # request
        longest_wait: dict[int, float] = {}
        for request in running:
            if not request.is_decoding or request.num_planned_tokens - request.num_computed_tokens != 1:
                continue
            num_steps = 1
            if request.num_planned_tokens > request.num_tokens:
                num_steps += max(0, request.staggered_until - step_id)
            if num_steps == 1 and self._has_drafts and request.has_unsent_tokens and request.num_in_flight:
                num_steps = 2
            if num_steps == 1:
                load.add_decode(request.num_computed_tokens)
            longest_wait[num_steps] = max(longest_wait.get(num_steps, 0.0), self._clock - request.last_token_time)
        if not longest_wait:
            return self._config.max_step_seconds, self._config.max_step_seconds
        target = of_vectors = self._config.target_seconds
        alone = times.seconds(load)
        if target is None:
            between = alone * self._config.stagger
            target, of_vectors = max(MIN_AUTO_SECONDS, 2 * between), VECTOR_SHARE * between
        elif alone > target and load.num_draws and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "target_inter_token_latency is %g ms, but a step that only decodes %d requests takes about %.1f ms. "
                "So tokens come more slowly than the target says, and such a step computes at most %d tokens of prompts. "
                "Raise the target, lower max_num_seqs, or use a smaller or quantized model",
                target * 1e3, load.num_draws, alone * 1e3, self._block_size,
            )  # fmt: skip

        def until(latency: float) -> float:
            return min((latency - waited) / num_steps for num_steps, waited in longest_wait.items())

        return until(target), until(target if of_vectors is None else of_vectors)

    def planned(self, plan: SchedulerOutput, encoder_seconds: float = 0.0) -> float:
        """Record a planned step. Returns when it will end, on the clock of planned steps. `encoder_seconds`: how long it is
        expected to encode images; infinite if that is not known."""
        if self.times is not None:
            load = load_of(plan)
            self.predicted_seconds = self.times.seconds(load) + encoder_seconds
            self._clock += self.predicted_seconds if encoder_seconds < math.inf else 0.0
            self._in_flight.append(load)
        return self._clock

    def committed(self, seconds: float) -> None:
        """Learn from the oldest planned step, which computed for `seconds`. `seconds` is 0 if the time is not known."""
        self.last_step = None
        if self.times is not None:
            load = self._in_flight.popleft()
            if seconds > 0.0:
                self.last_step = self.times.observe(load, seconds), seconds

    def void(self) -> None:
        """Forget the planned steps that were not committed."""
        self._in_flight.clear()
