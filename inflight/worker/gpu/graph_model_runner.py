"""`GraphModelRunner`: runs steps on a GPU, mostly as CUDA graphs. The thread that launches them never waits for the device.

The inputs of steps are on the device (`DeviceState`). A plan becomes a list of entries (destination, value), which a kernel
writes to this state:

    prepare   write the plan's entries to a staging slot (pinned memory)                         (on the host)
    execute   upload and apply the entries; forward and LM head, as a graph or kernel by kernel  (queued)
    sample    apply the entries for draws; masks, penalties; draw and advance; copy out          (queued)
    drain     wait for the copy; return the output                                               (on the host)

After a step of decodes, the draw itself advances ids, positions and lengths in the state. If the next step has the same rows,
only its new blocks are applied.

    kind      steps                                           graphs
    decode    every row computes one token and draws one      "decode" (forward and head), "draw"
    mixed     up to `cuda_graph_max_tokens` tokens            "mixed" (forward), "head", "draw"
    eager     larger, or with work for parts of requests      "draw"; the rest is launched kernel by kernel

There is one "mixed" graph for each padded number of tokens. There is one "decode", "head" and "draw" graph for each padded
number of draws.

If the draws of a step wait for grammar masks, the forward of the next step may run before these draws. That forward
overwrites the logits, so the logits of the waiting draws are copied first, and these draws are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.device.accelerator import Accelerator, Event
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.kernels.triton.step_state import apply_entries
from inflight.sample.device_sampler import DeviceSampler
from inflight.sample.processors import LogitsProcessors
from inflight.sample.rows import HISTORY, SamplingRows
from inflight.worker.draw_rows import grammar_masks
from inflight.worker.gpu.copy_out import CopiedStep
from inflight.worker.gpu.cuda_graph import GRAPH_BYTES, GraphRunner, decode_sizes, mixed_sizes, padded_size
from inflight.worker.gpu.device_state import DeviceState, StateSizes, num_cache_groups
from inflight.worker.gpu.staging import Int32Columns, StagingRing, StagingSlot, queue_copy
from inflight.worker.gpu.step_entries import EntryCounts, StepEntries, StepShape
from inflight.worker.gpu.step_programs import StepPrograms
from inflight.worker.input_batch import NO_STEP, StepInputs
from inflight.worker.parts.row_parts import StepParts
from inflight.worker.pipeline import Pipeline
from inflight.worker.runner import Runner
from inflight.worker.runner_base import RankParts
from inflight.worker.token_inbox import TokenInbox

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DeviceStep:
    """A prepared plan. The fields with defaults are set when the step is launched. The drain thread uses only `plan` and
    `out`."""

    plan: SchedulerOutput
    inputs: StepInputs
    shape: StepShape
    staged: StagingSlot
    counts: EntryCounts
    slots: Int32Array  # [num_draws]
    rows: SamplingRows | None  # [num_draws], on the rank that draws
    num_prompt_tokens: Int32Array  # [num_draws]
    parts: StepParts | None
    message: Future[Tensor] | None
    continues: bool = False  # the draw of the previous step has advanced the state to this step
    kept_logits: Tensor | None = None  # a copy of the logits, if the next forward runs before the draws
    out: CopiedStep = field(default_factory=CopiedStep)


class GraphModelRunner(Runner[DeviceStep, IntermediateTensors | None, DeviceStep]):
    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        config = parts.config
        device = parts.device
        assert isinstance(device, Accelerator)
        self._accelerator = device
        scheduler = config.scheduler
        graph_tokens = min(
            config.device.cuda_graph_max_tokens, scheduler.max_num_batched_tokens, config.model.max_model_len
        )
        captures = not config.device.enforce_eager
        self._decode_sizes = decode_sizes(scheduler.max_num_seqs) if captures else []
        self._mixed_sizes = mixed_sizes(graph_tokens) if captures else []
        self._inbox = TokenInbox(parts.pipeline.receiver, self._apply_drawn_elsewhere)
        self._graphs = GraphRunner(device)
        # Each rank of the last stage tells the rank of the first stage that has the same tp_rank.
        self._tells = self._draws or bool(parts.pipeline.senders)
        self._advanced: DeviceStep | None = None  # the step whose draw has advanced the state to the next step
        self._applied: DeviceStep | None = None  # the step whose rows are in the state
        self._undrawn: DeviceStep | None = None  # the step whose logits are in `logits`, until its tokens are drawn
        self._copied: Event | None = None  # the end of the last copy of drawn tokens to the host
        self._programs = StepPrograms(
            config,
            parts.model,
            device.torch_device,
            tp=parts.tp,
            stage=self._stage,
            max_num_tokens=self._max_num_tokens(),
            max_mixed=max(self._mixed_sizes, default=0),
        )

    # -- start-up --------------------------------------------------------------------------------------------------------

    def reserved_bytes(self, peak_bytes: int) -> int:
        """Bytes for the state, the backend's scratch memory and the graphs. The bytes of the graphs are the memory that the
        largest graph uses while it runs, and the driver's memory for each graph."""
        sizes = self._sizes(num_cache_groups(self._config.model.architecture))
        state = 4 * sum(int(np.prod(shape)) for shape in sizes.parts().values())
        largest = max([0, *self._mixed_sizes, *self._decode_sizes])
        num_graphs = (3 if self._mixed_sizes else 2) * len(self._decode_sizes) + len(self._mixed_sizes)
        pool = peak_bytes * largest // self._config.scheduler.max_num_batched_tokens
        return super().reserved_bytes(peak_bytes) + state + pool + num_graphs * GRAPH_BYTES

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize(kv_cache_config)
        self._state = DeviceState(self._sizes(len(kv_cache_config.groups)), self._device.torch_device)
        logger.info(
            "the inputs of steps use %.0f MiB of GPU memory; %.0f MiB of this are for the tokens of max_num_seqs requests "
            "of max_model_len tokens",
            self._state.flat.nbytes / 2**20,
            self._state.part("history").nbytes / 2**20,
        )
        self._programs.bind(self._state, kv_cache_config)
        self._entries = StepEntries(self._state, self._config.model.architecture.vocab_size, draws=self._stage.is_last)
        self._begin_steps()

    def begin_epoch(self, pipeline: Pipeline) -> None:
        super().begin_epoch(pipeline)
        self._inbox = TokenInbox(pipeline.receiver, self._apply_drawn_elsewhere)
        self._graphs = GraphRunner(self._accelerator)  # the old graphs use the communicators of the old epoch
        if self._kv_cache_config is not None:
            self._begin_steps()

    def _begin_steps(self) -> None:
        """Forget all steps."""
        self._ring = StagingRing(self._accelerator, self._config.scheduler.max_depth + 1)
        self._drawn_ring = StagingRing(self._accelerator, 2)
        self._advanced = self._applied = self._undrawn = self._copied = None

    def warm_up(self) -> None:
        programs = self._programs
        recorded = [("decode", self._decode_sizes, programs.decode), ("mixed", self._mixed_sizes, programs.mixed)]
        if self._stage.is_last:
            recorded += [("draw", self._decode_sizes, programs.draw)]
            recorded += [("head", self._decode_sizes, programs.head)] if self._mixed_sizes else []
        self._graphs.capture(recorded, self._stage_dummies)
        super().warm_up()

    def graph_report(self) -> dict[str, Any]:
        return super().graph_report() | asdict(self._graphs.report)

    def dummy_run(self, num_tokens: int) -> None:
        assert self._undrawn is None, "dummy_run was called while a step waits for its draws"
        size = padded_size(num_tokens, self._decode_sizes)
        self._stage_dummies("decode", size)
        self._graphs.enqueue("decode", size, self._programs.decode)
        self._accelerator.compute.record().synchronize()

    def prompt_run(self) -> None:
        """And its draw, as steps without graphs run."""
        num_tokens = min(2, self._max_num_tokens())
        self._stage_dummies("mixed", num_tokens)
        run = partial(self._programs.eager, num_tokens, 1, 1, max_query_len=2, max_seq_len=2)
        # as if there were single tokens, so that the kernels for them are launched, too
        self._accelerator.compute.enqueue(partial(run, has_single_tokens=True, request_parts=None))
        if self._stage.is_last:
            self._accelerator.compute.enqueue(partial(self._programs.draw, 1))
        self._accelerator.compute.record().synchronize()

    def _profile_draws(self, hidden: Tensor) -> None:
        self._programs.profile_draws(hidden)

    def _stage_dummies(self, kind: str, size: int) -> None:
        """Write the inputs of a dummy step, which belongs to no request, to the state."""
        num_rows = 1 if kind == "mixed" else size
        self._write(self._ring, self._entries.dummies(size, num_rows))
        self._advanced = self._applied = None

    def _max_num_tokens(self) -> int:
        scheduler = self._config.scheduler
        return max([scheduler.max_num_batched_tokens, *self._mixed_sizes, *self._decode_sizes])

    def _sizes(self, num_groups: int) -> StateSizes:
        model = self._config.model
        return StateSizes(
            max_num_tokens=self._max_num_tokens(),
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
            max_blocks=-(-model.max_model_len // self._config.cache.block_size),
            num_groups=num_groups,
            num_columns=DeviceSampler.NUM_COLUMNS,
        )

    # -- prepare: on the host --------------------------------------------------------------------------------------------

    def prepare_inputs(self, plan: SchedulerOutput) -> DeviceStep:
        with self._timeline.span(plan.step_id, "prepare"):
            batch, inputs = self._apply_plan(plan)
            parts = self._parts.prepare(plan, inputs, batch) if self._parts.slots or plan.encoder_inputs else None
            slots = plan.slots[inputs.sampling_rows]
            shape = self._shape(plan, inputs, has_parts=parts is not None)
            rows = self._sampling_state.take(slots) if self._draws else None
            staged = self._ring.take()
            try:
                counts = self._stage_entries(staged, plan, inputs, shape)
            except BaseException:  # the step will not be launched, so return the slot here
                staged.is_in_use = False
                raise
            return DeviceStep(
                plan=plan,
                inputs=inputs,
                shape=shape,
                staged=staged,
                counts=counts,
                slots=slots,
                rows=rows,
                num_prompt_tokens=batch.num_prompt_tokens[slots],
                parts=parts,
                message=self._post(len(slots)),
            )

    def _stage_entries(
        self, staged: StagingSlot, plan: SchedulerOutput, inputs: StepInputs, shape: StepShape, *, whole: bool = False
    ) -> EntryCounts:
        """Write the step's entries. If the previous draw advances the state to this step and `whole` is false, write
        only the step's new blocks."""
        if inputs.continues != NO_STEP and shape.kind == "decode" and not whole:
            count = staged.write(self._entries.tables(plan))
            return EntryCounts(count, count, count, count)
        new = plan.new_requests if self._draws else ()
        rows = self._sampling_state.take(np.array([data.slot for data in new], dtype=np.int32))
        with_history = tuple(data for data, features in zip(new, rows.features, strict=True) if features & HISTORY)
        columns, counts = self._entries.of(plan, inputs, shape, with_history)
        staged.write(columns)
        return counts

    def _shape(self, plan: SchedulerOutput, inputs: StepInputs, *, has_parts: bool) -> StepShape:
        num_tokens = len(inputs.input_ids)
        num_rows = len(plan.slots)
        num_draws = len(inputs.sampling_rows)
        padded_draws = padded_size(num_draws, self._decode_sizes) if num_draws else 0
        if num_tokens == num_rows == num_draws and not has_parts:
            return StepShape("decode", padded_draws, padded_draws, padded_draws)
        if num_tokens <= max(self._mixed_sizes, default=0) and not has_parts:
            padded_tokens = padded_size(num_tokens, self._mixed_sizes)
            return StepShape("mixed", padded_tokens, self._config.scheduler.max_num_seqs + 1, padded_draws)
        return StepShape("eager", num_tokens, num_rows, padded_draws)

    # -- execute: launched -----------------------------------------------------------------------------------------------

    def execute_model(
        self, model_input: DeviceStep, intermediate: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        """Returns None on the last stage, where the logits stay in `StepPrograms.logits`."""
        step = model_input
        plan = model_input.plan
        with self._timeline.span(plan.step_id, "forward"):
            if step.message is not None:
                self._inbox.expect(plan.step_id, step.slots, step.inputs.first_positions, step.message)
            self._set_logits_aside()
            self._apply_forward_entries(step)
            if intermediate is not None:
                self._copy_received(intermediate)
            self._enqueue_forward(step)
            if self._stage.is_last:
                self._undrawn = step if step.shape.num_draws else None
                return None
            assert self._programs.sent is not None
            return self._programs.sent.first(plan.num_tokens)

    def _apply_drawn_elsewhere(self, slots: Int32Array, positions: Int32Array, message: Tensor) -> None:
        """Write tokens that the last stage has drawn to the state of this stage."""
        self._write(self._drawn_ring, self._entries.drawn(slots, message[:, 0].numpy()))

    def _set_logits_aside(self) -> None:
        """If a step has not drawn its tokens yet, copy its logits, because the next forward overwrites them."""
        step = self._undrawn
        if step is None:
            return
        logits = self._programs.logits[: step.shape.num_draws]
        step.kept_logits = kept = torch.empty_like(logits)
        self._accelerator.compute.enqueue(lambda: queue_copy(logits, kept))
        self._undrawn = None

    def _apply_forward_entries(self, step: DeviceStep) -> None:
        """Upload the step's entries, and apply those that the forward reads."""
        advanced = self._advanced
        staged = step.staged
        step.continues = (
            advanced is not None
            and advanced.plan.step_id == step.inputs.continues
            and advanced.shape == step.shape
            and step.shape.kind == "decode"
        )
        if not step.continues and step.inputs.continues != NO_STEP:
            step.counts = self._stage_entries(staged, step.plan, step.inputs, step.shape, whole=True)
        counts = step.counts
        if not step.continues:
            staged.upload(counts.requests)
            self._apply(staged, 0, counts.rows, counts.drawn)
        elif counts.tables:
            staged.upload(counts.tables)
            self._apply(staged, 0, counts.tables, counts.tables)
        if not self._stage.is_last:
            staged.release()
        self._advanced = None
        self._applied = step

    def _copy_received(self, intermediate: IntermediateTensors) -> None:
        assert self._programs.received is not None
        into = self._programs.received.first(len(intermediate.delta))

        def copy() -> None:
            queue_copy(intermediate.delta, into.delta)
            queue_copy(intermediate.residual, into.residual)

        self._accelerator.compute.enqueue(copy)

    def _enqueue_forward(self, step: DeviceStep) -> None:
        shape = step.shape
        graphs = self._graphs
        programs = self._programs
        if shape.kind == "decode":
            graphs.enqueue("decode", shape.num_tokens, programs.decode)
        elif shape.kind == "mixed":
            graphs.enqueue("mixed", shape.num_tokens, programs.mixed)
            if self._stage.is_last and shape.num_draws:
                graphs.enqueue("head", shape.num_draws, programs.head)
        else:
            if step.parts is not None:
                step.parts.upload(self._upload)
            self._accelerator.compute.enqueue(lambda: self._run_eager(step))

    def _run_eager(self, step: DeviceStep) -> None:
        lengths = step.plan.num_scheduled_tokens
        self._programs.eager(
            step.shape.num_tokens,
            step.shape.num_rows,
            step.shape.num_draws,
            max_query_len=int(lengths.max()),
            has_single_tokens=bool((lengths == 1).any()),
            max_seq_len=int(step.inputs.seq_lens.max()),
            request_parts=step.parts,
        )

    # -- sample: launched ------------------------------------------------------------------------------------------------

    def sample(
        self, model_input: DeviceStep, forward: object, grammar_output: GrammarOutput | None = None
    ) -> DeviceStep:
        step = model_input
        if not self._stage.is_last:
            return step
        with self._timeline.span(step.plan.step_id, "sample"):
            if not step.continues:
                self._apply(step.staged, step.counts.drawn, step.counts.requests, step.counts.requests)
            step.staged.release()
            processors = self._enqueue_draws(step, grammar_output) if step.shape.num_draws else None
            parts = step.parts if self._draws else None
            if (self._tells and step.shape.num_draws) or parts is not None:
                tokens = self._programs.tokens[: len(step.slots)]
                self._copied = step.out.start(self._accelerator, tokens, processors, parts)
            return step

    def _enqueue_draws(self, step: DeviceStep, grammar_output: GrammarOutput | None) -> LogitsProcessors | None:
        """Queue the draws of the step. Returns its logits processors."""
        compute = self._accelerator.compute
        programs = self._programs
        kept = step.kept_logits
        processors = self._processors(step, grammar_output)
        if processors is not None:
            logits = (programs.logits if kept is None else kept)[: len(step.slots)]
            compute.enqueue(lambda: processors.apply(logits, programs.history))
        if self._copied is not None:
            compute.wait(self._copied)  # then the previous tokens are on the host and may be overwritten
        if kept is None:
            self._graphs.enqueue("draw", step.shape.num_draws, programs.draw)
            self._undrawn = None
            self._advanced = step if self._applied is step and step.shape.kind == "decode" else None
        else:
            compute.enqueue(lambda: programs.draw_from(kept))
            self._advanced = None
        return processors

    def _processors(self, step: DeviceStep, grammar_output: GrammarOutput | None) -> LogitsProcessors | None:
        """The step's logits processors, uploaded. None if no row needs them, and on ranks that do not draw."""
        if step.rows is None or (grammar_output is None and step.rows.is_plain):
            return None
        masks = None if grammar_output is None else grammar_masks(step.plan, grammar_output, step.inputs.draw_start_loc)
        return LogitsProcessors.of(step.rows, step.inputs.first_positions, step.num_prompt_tokens, masks, self._upload)

    def discard(self, model_input: DeviceStep) -> None:
        model_input.staged.release()
        self._advanced = None
        if self._undrawn is model_input:
            self._undrawn = None

    # -- drain: on the host ----------------------------------------------------------------------------------------------

    def drain(self, drawn: DeviceStep) -> ModelRunnerOutput:
        if not self._tells:
            return ModelRunnerOutput(step_id=drawn.plan.step_id)
        with self._timeline.span(drawn.plan.step_id, "drain"):
            output = drawn.out.wait(drawn.plan.step_id)
            for sender in self._pipeline.senders if len(output.sampled_token_ids) else ():
                sender.send(torch.from_numpy(output.sampled_token_ids.clip(min=0)[:, None]))
            return output if self._draws else ModelRunnerOutput(step_id=drawn.plan.step_id)

    # -- common ----------------------------------------------------------------------------------------------------------

    def _write(self, ring: StagingRing, columns: Int32Columns) -> None:
        """Stage, upload and apply entries that belong to no step."""
        staged = ring.take()
        count = staged.write(columns)
        staged.upload(count)
        self._apply(staged, 0, count, count)
        staged.release()

    def _apply(self, staged: StagingSlot, first: int, num_pairs: int, num_entries: int) -> None:
        if num_entries > first:
            flat = self._state.flat
            entries = staged.entries
            self._accelerator.compute.enqueue(lambda: apply_entries(flat, entries, first, num_pairs, num_entries))

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Upload an array for one step. Call this only in the thread that launches. `compute` is its current stream, so torch
        reuses the memory in the order of `compute`."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        host = self._accelerator.pinned(source.numel(), source.dtype).view(source.shape)
        host.copy_(source)
        there = torch.empty_like(source, device=self._device.torch_device)
        self._accelerator.compute.enqueue(lambda: queue_copy(host, there))
        return there
