"""`ModelRunner`: runs the steps of a CPU, and of a GPU in an engine with drafts (speculative decoding).

With drafts the host must know the drawn tokens before it can propose the drafts of the next step. The thread that prepares
writes the batch and the sampling parameters, and copies what a step needs to its `ModelInput`. Only the compute thread uses the
drawn tokens (`DrawnTokens`): `execute_model` reads them as inputs, and `sample` adds new ones.

Only the first rank of the last pipeline stage draws. It broadcasts the tokens to the other ranks of this stage, because ranks
on processors that round differently could draw different tokens.
"""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inflight.attention.backend import MetadataBuilder
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from inflight.models.captured_layers import new_captured
from inflight.models.causal_lm import ModelStep
from inflight.sample.processors import LogitsProcessors
from inflight.sample.sampler import Sampler, SamplerOutput
from inflight.worker.draw_rows import VerifiedDraws, grammar_masks
from inflight.worker.drawn_tokens import DrawnTokens
from inflight.worker.input_batch import StepInputs
from inflight.worker.model_input import DrawnStep, ForwardInput, ForwardOutput, ModelInput
from inflight.worker.pipeline import Pipeline
from inflight.worker.profile_run import draw_in_all_slots, one_token_each, prompt_beside_a_token, run_dummy_step
from inflight.worker.runner import Runner
from inflight.worker.runner_base import RankParts
from inflight.worker.step_drafts import StepDrafts, reads_hidden
from inflight.worker.token_inbox import TokenInbox


class ModelRunner(Runner[ModelInput, ForwardOutput | IntermediateTensors, DrawnStep]):
    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        config, pipeline = parts.config, parts.pipeline
        architecture, max_num_seqs = config.model.architecture, config.scheduler.max_num_seqs
        self._sampler = Sampler(architecture.vocab_size, parts.device.torch_device)
        speculative = config.speculative
        self._num_speculative_tokens = 0 if speculative is None else speculative.num_speculative_tokens
        self._drawn_tokens = DrawnTokens(
            max_num_seqs,
            config.model.max_model_len,
            num_speculative_tokens=self._num_speculative_tokens,
            senders=pipeline.senders,
        )
        self._reads_hidden = reads_hidden(config)
        self._new_captured = new_captured(architecture, getattr(torch, config.model.dtype))
        self._drafts = StepDrafts.of(config, parts.draft_model, self._drawn_tokens, self._sampler)
        self._inbox = TokenInbox(pipeline.receiver, self._drawn_tokens.apply)
        self._metadata_builders: tuple[
            MetadataBuilder | None, ...
        ] = ()  # of each KV group that has layers on this stage

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize(kv_cache_config)
        self._metadata_builders = tuple(
            self._backend.metadata_builder(group.spec) if group.layer_names else None
            for group in kv_cache_config.groups
        )

    def begin_epoch(self, pipeline: Pipeline) -> None:
        super().begin_epoch(pipeline)
        self._drawn_tokens.senders = pipeline.senders
        self._inbox = TokenInbox(pipeline.receiver, self._drawn_tokens.apply)

    def prepare_inputs(self, plan: SchedulerOutput) -> ModelInput:
        with self._timeline.span(plan.step_id, "prepare"):
            batch, inputs = self._apply_plan(plan)
            state = self._sampling_state
            slots = plan.slots[inputs.sampling_rows]
            max_seq_len = int(inputs.seq_lens.max()) + self._num_speculative_tokens
            model_input = ModelInput(
                plan=plan,
                inputs=inputs,
                block_tables=tuple(
                    batch.block_table(group, plan.slots, max_seq_len) for group in range(len(batch.block_tables))
                ),
                sampling_slots=slots,
                sampling_rows=state.take(slots) if self._draws else None,
                num_prompt_tokens=batch.num_prompt_tokens[slots],
                new_histories=self._new_histories(plan) if self._draws else (),
                parts=self._parts.prepare(plan, inputs, batch) if self._parts.slots or plan.encoder_inputs else None,
                message=self._post(len(slots)),
                rope_deltas=batch.rope_deltas[plan.slots],
            )
            if plan.max_draft_tokens.max(initial=-1) >= 0:
                return model_input
            return replace(model_input, forward=self._forward_input(model_input, inputs))

    def _new_histories(self, plan: SchedulerOutput) -> tuple[NewRequestData, ...]:
        if self._num_speculative_tokens:
            return plan.new_requests
        state = self._sampling_state
        return tuple(
            data for data in plan.new_requests if state.take(np.array([data.slot], dtype=np.int32)).needs_history
        )

    def _forward_input(self, model_input: ModelInput, inputs: StepInputs) -> ForwardInput:
        """Make the device's inputs from `inputs`, which must be exact, not upper bounds. This runs in the thread that
        prepares or, if the step has drafts, in the compute thread."""
        device, rows, num_prompt_tokens = self._device, model_input.sampling_rows, model_input.num_prompt_tokens
        if rows is not None and model_input.inputs is not inputs:
            sources = np.arange(rows.num_rows).repeat(inputs.num_draws)
            rows, num_prompt_tokens = rows.take(sources), num_prompt_tokens[sources]
        moved = inputs.query_start_loc - model_input.inputs.query_start_loc
        draw_tokens = inputs.draw_tokens
        draw_positions = inputs.positions[draw_tokens] + 1
        return ForwardInput(
            inputs=inputs,
            positions=device.to_device(inputs.rope_positions(model_input.rope_deltas)),
            attn_metadata=self._attn_metadata(model_input, inputs),
            logits_indices=device.to_device(draw_tokens),
            sampling_rows=rows,
            metadata=None if rows is None else rows.metadata(draw_positions),
            draw_positions=draw_positions,
            num_prompt_tokens=num_prompt_tokens,
            parts=model_input.parts and model_input.parts.moved(moved),
        )

    def _attn_metadata(self, model_input: ModelInput, inputs: StepInputs) -> tuple[AttentionMetadata, ...]:
        found = []
        for build, block_table in zip(self._metadata_builders, model_input.block_tables, strict=True):
            if build is None:  # all layers of the group are on other stages
                found.append(AttentionMetadata(num_tokens=len(inputs.input_ids)))
                continue
            attention_inputs = AttentionInputs(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                num_computed_tokens=inputs.num_computed_tokens,
                block_table=block_table,
            )
            found.append(build(attention_inputs))
        return tuple(found)

    def execute_model(
        self, model_input: ModelInput, intermediate: IntermediateTensors | None = None
    ) -> ForwardOutput | IntermediateTensors:
        plan, inputs = model_input.plan, model_input.inputs
        with self._timeline.span(plan.step_id, "forward"):
            forward_input = model_input.forward
            if forward_input is None:
                assert self._drafts is not None
                inputs = self._drafts.resolve(plan, inputs)
                forward_input = self._forward_input(model_input, inputs)
                intermediate = intermediate and intermediate.first(len(inputs.input_ids))
            if model_input.message is not None:
                slots, positions = model_input.sampling_slots, inputs.first_positions
                self._inbox.expect(plan.step_id, slots, positions, model_input.message)
            input_ids = inputs.input_ids.copy()
            self._drawn_tokens.fill(input_ids, inputs.drawn_tokens, inputs.drawn_slots)
            output = self._forward(forward_input, self._device.to_device(input_ids), intermediate)
            return output.padded(plan.num_tokens) if isinstance(output, IntermediateTensors) else output

    def _forward(
        self, forward_input: ForwardInput, input_ids: Tensor, intermediate: IntermediateTensors | None
    ) -> ForwardOutput | IntermediateTensors:
        parts, rows = forward_input.parts, forward_input.logits_indices
        computed = None if self._reads_hidden else rows
        captured = self._new_captured and self._new_captured(input_ids, intermediate)
        inputs = input_ids, forward_input.positions, forward_input.attn_metadata, computed
        step = ModelStep(*inputs, intermediate=intermediate, captured=captured)
        if parts is not None:
            parts.upload(self._device.to_device)
            step = parts.extend(step)
        hidden = self._model(step)
        if isinstance(hidden, IntermediateTensors):
            return hidden
        if parts is not None:
            parts.read(hidden, self._model)
        logits = self._model.compute_logits(hidden[rows] if step.rows is None else hidden[: len(rows)])
        return ForwardOutput(logits, forward_input, hidden if captured is None else captured)

    def sample(
        self,
        model_input: ModelInput,
        forward: ForwardOutput | IntermediateTensors,
        grammar_output: GrammarOutput | None = None,
    ) -> DrawnStep:
        plan, slots = model_input.plan, model_input.sampling_slots
        if isinstance(forward, IntermediateTensors):
            return DrawnStep(plan.step_id)
        with self._timeline.span(plan.step_id, "sample"):
            positions = forward.forward_input.inputs.first_positions
            if not self._draws:  # another rank of the stage draws
                if len(slots):
                    width = 2 * self._num_speculative_tokens + 1
                    nothing = torch.empty(len(slots), width, dtype=torch.int32, device=self._device.torch_device)
                    self._drawn_tokens.add(slots, positions, self._tp.broadcast(nothing))
                return DrawnStep(plan.step_id)
            self._drawn_tokens.remember(model_input.new_histories, plan.forced_tokens)
            if self._drafts is not None:
                self._drafts.begin(model_input, forward)
            if not len(slots):
                return DrawnStep(plan.step_id, parts=forward.forward_input.parts)
            drawn = self._draw(plan, forward, grammar_output)
            verified: VerifiedDraws | None = None
            if self._drafts is None:
                emitted = np.maximum(drawn.token_ids.cpu().numpy(), 0)
                self._drawn_tokens.write(slots, positions, emitted)
                message = self._device.to_device(emitted[:, None])  # as `message_of`
            else:
                message, verified = self._drafts.verify(drawn.token_ids, model_input, forward)
            self._drawn_tokens.add(slots, positions, self._tp.broadcast(message))
            return DrawnStep(plan.step_id, drawn, verified, forward.forward_input.parts)

    def _draw(
        self, plan: SchedulerOutput, forward: ForwardOutput, grammar_output: GrammarOutput | None
    ) -> SamplerOutput:
        forward_input, known = forward.forward_input, self._drawn_tokens.token_ids
        rows = forward_input.sampling_rows
        metadata = forward_input.metadata
        assert rows is not None and metadata is not None
        if grammar_output is None and rows.is_plain:
            return self._sampler(forward.logits, metadata)
        masks = grammar_masks(plan, grammar_output, forward_input.inputs.draw_start_loc)
        processors = LogitsProcessors.of(
            rows, forward_input.draw_positions, forward_input.num_prompt_tokens, masks, self._device.to_device
        )
        if processors is None:
            return self._sampler(forward.logits, metadata)
        history = torch.from_numpy(known[:, : processors.longest_history]).to(self._device.torch_device)
        return self._sampler(forward.logits, metadata, processors, history)

    def drain(self, drawn: DrawnStep) -> ModelRunnerOutput:
        with self._timeline.span(drawn.step_id, "drain") if self._draws else nullcontext():
            return drawn.to_output()

    def warm_up(self) -> None:
        super().warm_up()
        if self._drafts is not None:
            self._drafts.time_steps(self.dummy_run, draws=self._draws)

    def dummy_run(self, num_tokens: int) -> None:
        self._run_dummies(one_token_each(num_tokens))

    def prompt_run(self) -> None:
        self._run_dummies(prompt_beside_a_token())

    def _run_dummies(self, inputs: AttentionInputs) -> None:
        cache = self._kv_cache_config
        assert cache is not None, "call initialize_from_config first"
        run_dummy_step(self._config, self._model, self._backend, self._device, self._stage, cache, inputs)
        if self._draft_model is not None:
            self._draft_model.warm_up(inputs)

    def _profile_draws(self, hidden: Tensor) -> None:
        max_num_seqs = self._config.scheduler.max_num_seqs
        num_rows = min(max_num_seqs * (1 + self._num_speculative_tokens), len(hidden))
        logits = self._model.compute_logits(hidden[:num_rows])
        if self._draws:
            draw_in_all_slots(self._sampler, self._sampling_state, logits, max_num_seqs)
