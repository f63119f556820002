"""`StepDrafts`: what a step does with drafts on the rank that draws: verifies those of its rows, and gets the next ones."""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inflight.config.engine import EngineConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import SchedulerOutput
from inflight.sample.sampler import Sampler
from inflight.sample.verification import num_emitted
from inflight.spec_decode.draft_choice import fewest_right
from inflight.spec_decode.draft_costs import MeasuredCosts, num_weights_read
from inflight.spec_decode.make_proposer import make_proposer
from inflight.spec_decode.model_drafter import DraftInputs, ModelDrafter
from inflight.worker.draw_rows import VerifiedDraws, message_of, resolve_drafts
from inflight.worker.drawn_tokens import DrawnTokens
from inflight.worker.input_batch import NO_TOKENS, StepInputs
from inflight.worker.model_input import ForwardOutput, ModelInput
from inflight.worker.profile_run import one_token_each

logger = logging.getLogger(__name__)

_FEWEST_WEIGHTS = 1 << 25  # of a model whose steps are timed
_MOST_TOKENS = 32  # of a step that is timed at the start; larger ones are learned when they come
_NUM_RUNS = 3  # of each kind, of which the fastest counts: what else the machine does must not turn drafts off


def _fewest_seconds(run: Callable[[int], None], num_tokens: int) -> float:
    found = []
    for _ in range(_NUM_RUNS):
        start = time.perf_counter()
        run(num_tokens)
        found.append(time.perf_counter() - start)
    return min(found)


def reads_hidden(config: EngineConfig) -> bool:
    """Whether a drafter reads the served model's hidden states behind its final norm, of all tokens."""
    spec = None if config.draft_model is None else config.draft_model.architecture.hidden_inputs
    return spec is not None and not spec.captured


class StepDrafts:
    """
    Args:
        config: of an engine with drafts.
        draft_model: what proposes them; None: a proposer that sees tokens only.
        drawn_tokens, sampler: those of the runner.
    """

    def __init__(
        self, config: EngineConfig, draft_model: ModelDrafter | None, drawn_tokens: DrawnTokens, sampler: Sampler
    ) -> None:
        assert config.speculative is not None
        self._max_model_len = config.model.max_model_len
        self._num_speculative_tokens = config.speculative.num_speculative_tokens
        self._draft_model = draft_model
        self._drawn_tokens = drawn_tokens
        self._sampler = sampler
        self._proposer = make_proposer(config)
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._costs: MeasuredCosts | None = None
        self._started: float | None = None  # when the forward of a step that may have drafts began
        self._num_stages = config.parallel.pipeline_parallel_size
        # Short times are not exact. The ranks of a launcher must make the same steps, so nothing may depend on their times.
        self._is_timed = (
            config.device.kind == "cpu"
            and config.parallel.distributed_executor_backend != "external_launcher"
            and num_weights_read(config.model.architecture) >= _FEWEST_WEIGHTS
        )

    @classmethod
    def of(
        cls, config: EngineConfig, draft_model: ModelDrafter | None, drawn_tokens: DrawnTokens, sampler: Sampler
    ) -> "StepDrafts | None":
        """None: the engine has no drafts."""
        return None if config.speculative is None else cls(config, draft_model, drawn_tokens, sampler)

    def time_steps(self, dummy_run: Callable[[int], None], *, draws: bool) -> None:
        """Measure what drafts cost, at the start. All ranks call it together. `draws`: whether this rank draws, and learns it.
        It logs what it has found."""
        if not self._is_timed:
            return
        sizes = [1, 1 + self._num_speculative_tokens]
        most = min(self._max_num_seqs * sizes[1], _MOST_TOKENS)
        if most > sizes[1]:
            sizes.append(most)
        steps = {size: _fewest_seconds(dummy_run, size) for size in sizes}
        if not draws:
            return
        passes = dict[int, float]()
        drafter = self._draft_model
        if drafter is not None:  # a dummy run has such a pass, too
            passes = {size: _fewest_seconds(lambda n: drafter.warm_up(one_token_each(n)), size) for size in sizes}
        # in a pipeline this rank has measured one of the stages
        for size in sizes:
            alone = steps[size] - passes.get(size, 0.0)
            steps[size] = max(alone, 1e-6) * self._num_stages
        costs = MeasuredCosts(steps, passes)
        if drafter is not None:
            drafter.set_costs(costs)
        else:
            assert self._proposer is not None
            self._proposer.choice.costs = costs
        self._costs = costs
        fewest = fewest_right(self._num_speculative_tokens, costs)
        found = "so there are none"
        if fewest is not None:
            found = f"so they pay if {fewest:.0%} of them are right"
        larger = [f"one of {size} tokens {steps[size] * 1e3:.1f} ms" for size in sizes[1:]]
        times = ", ".join(larger)
        logger.info(
            "drafts: a step of 1 token takes %.1f ms, %s, and a draft %.1f ms, %s",
            steps[1] * 1e3, times, passes.get(1, 0.0) * 1e3, found,
        )  # fmt: skip

    def resolve(self, plan: SchedulerOutput, inputs: StepInputs) -> StepInputs:
        """The exact inputs of a step (`resolve_drafts`). Its forward begins now."""
        self._started = time.perf_counter()
        drawn = self._drawn_tokens
        num_tokens = drawn.num_tokens[plan.slots]
        drafts = drawn.drafts[plan.slots]
        return resolve_drafts(plan, inputs, num_tokens, drafts)

    def begin(self, model_input: ModelInput, forward: ForwardOutput) -> None:
        """Call it in each step, before its draws: new requests have slots of older ones, and penalties read the drafts."""
        source = self._draft_model or self._proposer
        assert source is not None
        source.begin(model_input.plan.new_requests)
        inputs = forward.forward_input.inputs
        drafts = inputs.draft_tokens
        self._drawn_tokens.write(inputs.draft_slots, inputs.positions[drafts], inputs.input_ids[drafts])
        if self._draft_model is not None and not len(model_input.sampling_slots):  # the step computes prompts only
            self._propose(model_input, forward, NO_TOKENS)

    def verify(self, sampled: Tensor, model_input: ModelInput, forward: ForwardOutput) -> tuple[Tensor, VerifiedDraws]:
        """Returns the message to the other ranks, and the outcome of the draws with the next drafts. `sampled`: int32
        [num_draws]."""
        inputs = forward.forward_input.inputs
        positions, slots, drawn = inputs.first_positions, model_input.sampling_slots, self._drawn_tokens
        drafts = torch.from_numpy(drawn.drafts[slots]).to(sampled.device)
        counts = num_emitted(sampled, drafts, inputs.draw_start_loc).cpu().numpy()
        self._observe(inputs)
        draws = sampled.cpu().numpy()
        most = self._num_speculative_tokens + 1
        tokens = message_of(draws, counts, inputs.draw_start_loc, most)
        rows, columns = np.nonzero(tokens >= 0)
        places = positions[rows] + columns
        drawn.write(slots[rows], places.astype(np.int32), tokens[rows, columns])
        num_tokens = np.minimum(positions + counts, self._max_model_len).astype(np.int32)
        next_drafts = self._propose(model_input, forward, num_tokens)
        values = np.concatenate([tokens, next_drafts], axis=1)
        message = torch.from_numpy(values).to(sampled.device)
        return message, VerifiedDraws(counts, positions, inputs.draw_start_loc, next_drafts)

    def _observe(self, inputs: StepInputs) -> None:
        """Learn how long the step took, if there is a draw behind each of its tokens: then it has no prompts."""
        started = self._started
        self._started = None
        if started is None or self._costs is None:
            return
        num_tokens = len(inputs.input_ids)
        if inputs.draw_start_loc[-1] == num_tokens:
            seconds = time.perf_counter() - started
            self._costs.observe_step(num_tokens, seconds * self._num_stages)

    def _propose(self, model_input: ModelInput, forward: ForwardOutput, num_tokens: Int32Array) -> Int32Array:
        """The next drafts of the rows that draw, which have so many tokens now: [num_sampling_rows, k], padded with -1."""
        inputs = forward.forward_input.inputs
        token_ids, rows = self._drawn_tokens.token_ids, inputs.sampling_rows
        if self._draft_model is None:
            assert self._proposer is not None
            return self._proposer.propose(token_ids, model_input.sampling_slots, num_tokens)
        assert model_input.sampling_rows is not None
        known = inputs.seq_lens.copy()
        known[rows] = num_tokens
        draft_inputs = DraftInputs(
            token_ids,
            model_input.plan.slots,
            num_computed_tokens=inputs.num_computed_tokens,
            num_tokens=known,
            drawing_rows=rows,
            sampling=model_input.sampling_rows,
            block_tables=model_input.block_tables,
            hidden=forward.hidden,
            query_start_loc=inputs.query_start_loc,
        )
        return self._draft_model.propose(draft_inputs, self._sampler)
