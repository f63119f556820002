"""`ModelRunner`: one rank's steps, in four stages.

    prepare_inputs   plan -> `ModelInput`: host work and staged copies; no collective, no sync, no wait for another rank
    execute_model    -> logits of the sampling rows (and the prompt's log-probabilities, where asked for), or on all pipeline
                     stages but the last what the next one takes
    sample           -> `DrawnStep`: the draws, on the device
    drain            -> `ModelRunnerOutput`, on the host

Owns the model, the KV arena, the `InputBatch` and the `DrawnTokens`. One thread prepares, another executes and samples, a third
drains, each in step order. The first may be steps ahead: it writes the batch and the sampling columns, and a `ModelInput` holds
copies of all that its step needs of them. Tokens drawn meanwhile are the second's: `execute_model` and `sample` put them in.
The forward of a step may come before the sample of the step before it (see `stage_order`).

Tokens are drawn on the first rank of the last stage and broadcast to its other ranks: that all of them would draw the same from
the same logits holds only on processors that round alike.
"""

from __future__ import annotations

import numpy as np
import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.config.engine import EngineConfig
from inflight.config.partition import PipelineStage
from inflight.device.base import Device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.distributed.token_link import TokenReceiver, TokenSender
from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheSpec
from inflight.interface.request import ResolvedSampling
from inflight.interface.step import (
    GrammarOutput,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
)
from inflight.models.causal_lm import CausalLM
from inflight.sample.sampler import Sampler
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams
from inflight.timeline import Timeline
from inflight.worker.draw_rows import grammar_masks
from inflight.worker.drawn_tokens import DrawnTokens
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.model_input import DrawnStep, ForwardOutput, ModelInput, SamplingInput
from inflight.worker.prompt_logprobs import PromptLogprobsProgress


class ModelRunner:
    """
    Args:
        model: the part of it that belongs to `stage`.
        sender, receiver: of drawn tokens, from the last of several pipeline stages to the first; the runner closes neither.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        backend: AttentionBackend,
        device: Device,
        timeline: Timeline,
        *,
        tp: TensorParallelGroup,
        stage: PipelineStage,
        sender: TokenSender | None = None,
        receiver: TokenReceiver | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._backend = backend
        self._device = device
        self._timeline = timeline
        self._tp, self._stage = tp, stage
        self._draws = stage.is_last and tp.rank == 0
        architecture, max_num_seqs = config.model.architecture, config.scheduler.max_num_seqs
        self._sampler = Sampler(architecture.vocab_size, device.torch_device)
        self._sampling_state = SamplingState(max_num_seqs, architecture.vocab_size, device.torch_device)
        self._prompt_logprobs = PromptLogprobsProgress()
        self._drawn_tokens = DrawnTokens(
            max_num_seqs, config.model.max_model_len, device.torch_device, sender=sender, receiver=receiver
        )
        self._intermediate = IntermediateTensors.template(
            architecture.hidden_size, getattr(torch, config.model.dtype), device.torch_device
        )
        self._kv_cache_config: KVCacheConfig | None = None
        self._batch: InputBatch | None = None

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> spec, in layer order."""
        cache = self._config.cache
        layers = self._model.attention_layers().items()
        return {name: layer.kv_cache_spec(cache.block_size, getattr(torch, cache.dtype)) for name, layer in layers}

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the arena and bind every layer to its view of it."""
        self._kv_cache_config = kv_cache_config
        arena = self._device.allocate_arena(kv_cache_config.num_blocks, kv_cache_config.block_bytes)
        layers = self._model.attention_layers()
        for group_index, group in enumerate(kv_cache_config.groups):
            for i, name in enumerate(group.layer_names):
                layers[name].bind(self._backend.kv_cache_view(arena, group.spec, i), group_index)
        self._batch = InputBatch(
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self._config.model.max_model_len,
            block_size=self._config.cache.block_size,
            num_groups=len(kv_cache_config.groups),
        )

    def prepare_inputs(self, plan: SchedulerOutput) -> ModelInput:
        assert self._batch is not None, "initialize_from_config comes first"
        with self._timeline.span(plan.step_id, "prepare"):
            batch, device = self._batch, self._device
            batch.apply(plan)
            if self._stage.is_last:
                for data in plan.new_requests:
                    self._sampling_state.add(data.slot, data.sampling)
                    self._prompt_logprobs.add(data)
            inputs = batch.step_inputs(plan)
            slots = plan.slots[inputs.sampling_rows]
            self._drawn_tokens.expect(plan.step_id, slots)
            return ModelInput(
                plan=plan,
                input_ids=device.to_device(inputs.input_ids),
                positions=device.to_device(inputs.positions),
                attn_metadata=self._attn_metadata(plan, inputs),
                drawn_tokens=device.to_device(inputs.drawn_tokens.astype(np.int64)),
                drawn_slots=device.to_device(inputs.drawn_slots.astype(np.int64)),
                drawn_in_step=inputs.drawn_in_step,
                logits_indices=device.to_device(inputs.query_start_loc[1:][inputs.sampling_rows].astype(np.int64) - 1),
                draw_start_loc=np.arange(len(slots) + 1, dtype=np.int32),
                sampling_slots=slots,
                sampling_positions=inputs.seq_lens[inputs.sampling_rows],
                sampling=self._sampling_input(plan, inputs) if self._draws else None,
                prompt_logprobs=self._prompt_logprobs.advance(plan, inputs.query_start_loc, batch),
            )

    def _attn_metadata(self, plan: SchedulerOutput, inputs: StepInputs) -> tuple[AttentionMetadata, ...]:
        assert self._batch is not None and self._kv_cache_config is not None
        max_seq_len = int(inputs.seq_lens.max())
        found = []
        for index, group in enumerate(self._kv_cache_config.groups):
            if not group.layer_names:  # all its layers are on other stages
                found.append(AttentionMetadata(num_tokens=plan.num_tokens))
                continue
            attention_inputs = AttentionInputs(
                query_start_loc=inputs.query_start_loc,
                seq_lens=inputs.seq_lens,
                num_computed_tokens=plan.num_computed_tokens,
                block_table=self._batch.block_table(index, plan.slots, max_seq_len),
                block_size=group.spec.block_size,
            )
            found.append(self._backend.build_metadata(attention_inputs, group.spec))
        return tuple(found)

    def _sampling_input(self, plan: SchedulerOutput, inputs: StepInputs) -> SamplingInput:
        assert self._batch is not None
        state, slots = self._sampling_state, plan.slots[inputs.sampling_rows]
        rows = state.take(slots)
        num_prompt_tokens, positions = self._batch.num_prompt_tokens[slots], inputs.seq_lens[inputs.sampling_rows]
        return SamplingInput(
            metadata=rows.metadata(positions, num_prompt_tokens),
            history=rows.history(num_prompt_tokens, positions),
            new_histories=tuple(
                data for data in plan.new_requests if state.take(np.array([data.slot], dtype=np.int32)).needs_history
            ),
        )

    def execute_model(
        self, model_input: ModelInput, intermediate: IntermediateTensors | None = None
    ) -> ForwardOutput | IntermediateTensors:
        """The forward pass. Only rows that sample, or whose prompt's log-probabilities are wanted, go through the head.

        `intermediate`: what the stage before returned; None on the first stage, which may wait here for tokens that the last
        one has yet to draw.
        """
        step_id = model_input.plan.step_id
        if self._stage.is_first:
            with self._timeline.span(step_id, "receive"):
                self._drawn_tokens.fill(
                    model_input.input_ids,
                    model_input.drawn_tokens,
                    model_input.drawn_slots,
                    model_input.drawn_in_step,
                )
        with self._timeline.span(step_id, "forward"):
            work = model_input.prompt_logprobs
            rows = None if work else model_input.logits_indices
            inputs = (model_input.input_ids, model_input.positions, model_input.attn_metadata)
            hidden = self._model(*inputs, rows, intermediate=intermediate)
            if isinstance(hidden, IntermediateTensors):
                return hidden
            prompt_logprobs = tuple(
                PromptLogprobs(
                    row=piece.row,
                    start=piece.start,
                    columns=piece.columns(hidden, self._model.compute_logits, self._device),
                )
                for piece in work
            )
            logits = self._model.compute_logits(hidden if rows is not None else hidden[model_input.logits_indices])
            return ForwardOutput(logits, prompt_logprobs)

    def sample(
        self,
        model_input: ModelInput,
        forward: ForwardOutput | IntermediateTensors,
        grammar_output: GrammarOutput | None = None,
    ) -> DrawnStep:
        """Draw one token per sampling row, and let every rank that needs it know. Nothing on stages but the last.

        `grammar_output`: of a plan with rows under a grammar.
        """
        step_id = model_input.plan.step_id
        if isinstance(forward, IntermediateTensors):
            return DrawnStep(step_id)
        with self._timeline.span(step_id, "sample"):
            slots, positions = model_input.sampling_slots, model_input.sampling_positions
            sampling = model_input.sampling
            if sampling is None:  # another rank of the stage draws
                if len(slots):
                    nothing = torch.empty(len(slots), dtype=torch.int32, device=self._device.torch_device)
                    self._drawn_tokens.add(slots, positions, self._tp.broadcast(nothing))
                return DrawnStep(step_id)
            self._drawn_tokens.remember(sampling.new_histories, model_input.plan.forced_tokens)
            if not len(slots):
                return DrawnStep(step_id, prompt_logprobs=forward.prompt_logprobs)
            metadata = sampling.metadata
            if sampling.history is not None:
                known = self._drawn_tokens.token_ids
                metadata = sampling.history.add_to(metadata, known, self._device.torch_device)
            masks = None
            if grammar_output is not None:
                masks = grammar_masks(model_input.plan, grammar_output, model_input.draw_start_loc)
            drawn = self._sampler(forward.logits, metadata, masks)
            self._drawn_tokens.add(slots, positions, self._tp.broadcast(drawn.token_ids))
            return DrawnStep(step_id, drawn, forward.prompt_logprobs)

    def drain(self, drawn: DrawnStep) -> ModelRunnerOutput:
        """The step's answer. In the drain thread, while later steps run."""
        if not self._draws:
            return drawn.to_output()
        with self._timeline.span(drawn.step_id, "drain"):
            return drawn.to_output()

    def dummy_run(self, num_tokens: int) -> None:
        """A forward pass of `num_tokens` that belong to no request: each is a sequence of one token in the dummy block.

        It touches no link: each stage makes up what the one before would send.
        """
        assert self._kv_cache_config is not None, "initialize_from_config comes first"
        inputs = _one_token_each(num_tokens, self._config.cache.block_size)
        metadata = tuple(self._backend.build_metadata(inputs, group.spec) for group in self._kv_cache_config.groups)
        zeros = self._device.to_device(np.zeros(num_tokens, dtype=np.int32))
        hidden = self._model(zeros, zeros, metadata, intermediate=self._made_up(num_tokens))
        if self._stage.is_last:
            self._model.compute_logits(hidden)

    def profile_run(self) -> None:
        """The largest step through the first layer, the head and the sampler, with a cache of its own: all layers take turns
        in the same memory, so one shows the peak."""
        num_tokens, num_rows = self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_num_seqs
        name, layer = next(iter(self._model.attention_layers().items()))
        spec = self.kv_cache_specs()[name]
        inputs = _prompts(num_tokens, self._config.model.max_model_len, spec.block_size)
        arena = self._device.allocate_arena(int(inputs.block_table.max()) + 1, spec.block_bytes)
        bound = layer.kv_cache, layer.group_index  # of an engine that runs already
        layer.bind(self._backend.kv_cache_view(arena, spec, 0), 0)
        try:
            self._largest_step(num_tokens, num_rows, self._backend.build_metadata(inputs, spec))
        finally:
            layer.bind(*bound)

    def _largest_step(self, num_tokens: int, num_rows: int, metadata: AttentionMetadata) -> None:
        positions = np.arange(num_tokens, dtype=np.int32) % self._config.model.max_model_len
        hidden = self._model(
            self._device.to_device(np.zeros(num_tokens, dtype=np.int32)),
            self._device.to_device(positions),
            (metadata,),
            num_layers=1,
            intermediate=self._made_up(num_tokens),
        )
        if not self._stage.is_last:
            return
        logits = self._model.compute_logits(hidden[:num_rows])
        if self._draws:
            slots = np.arange(num_rows, dtype=np.int32)
            for slot in slots.tolist():
                sampling = ResolvedSampling(params=SamplingParams(), seed=slot, max_tokens=1)
                self._sampling_state.add(slot, sampling)
            self._sampler(logits, self._sampling_state.take(slots).metadata(slots, slots * 0))

    def _made_up(self, num_tokens: int) -> IntermediateTensors | None:
        """Zeros in the place of what the stage before would send."""
        if self._stage.is_first:
            return None
        made_up = self._intermediate.empty_like(num_tokens)
        made_up.delta.zero_()
        made_up.residual.zero_()
        return made_up


def _one_token_each(num_tokens: int, block_size: int) -> AttentionInputs:
    """Sequences of one token, all in the dummy block."""
    return AttentionInputs(
        query_start_loc=np.arange(num_tokens + 1, dtype=np.int32),
        seq_lens=np.ones(num_tokens, dtype=np.int32),
        num_computed_tokens=np.zeros(num_tokens, dtype=np.int32),
        block_table=np.full((num_tokens, 1), DUMMY_BLOCK, dtype=np.int32),
        block_size=block_size,
    )


def _prompts(num_tokens: int, max_model_len: int, block_size: int) -> AttentionInputs:
    """Fresh prompts, as long as may be, of `num_tokens` tokens in all; each in blocks of its own."""
    starts = np.append(np.arange(0, num_tokens, max_model_len, dtype=np.int32), np.int32(num_tokens))
    num_rows, width = len(starts) - 1, -(-min(num_tokens, max_model_len) // block_size)
    return AttentionInputs(
        query_start_loc=starts,
        seq_lens=np.diff(starts),
        num_computed_tokens=np.zeros(num_rows, dtype=np.int32),
        block_table=1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
        block_size=block_size,
    )
