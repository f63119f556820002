"""`ModelRunner`: one rank's steps, in three stages.

    prepare_inputs   plan -> `ModelInput`: host work and staged copies; no collective, no sync
    execute_model    -> logits of the sampling rows (and the prompt's log-probabilities, where asked for)
    sample           -> `ModelRunnerOutput`

Owns the model, the KV arena and the `InputBatch`. Stages of different steps may overlap as long as each stage sees the steps
in order: `prepare_inputs` is the only one that writes requests into the batch, `sample` the only one that adds tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheSpec
from inflight.interface.request import Int32Array, LogprobsColumns, ResolvedSampling
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from inflight.models.causal_lm import CausalLM
from inflight.sample.logprobs import gather_logprobs
from inflight.sample.metadata import SamplingMetadata
from inflight.sample.sampler import Sampler
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams
from inflight.timeline import Timeline
from inflight.worker.input_batch import InputBatch

PROMPT_LOGPROBS_ROWS = 256  # rows of the vocabulary held at once for prompt log-probabilities


@dataclass(frozen=True, slots=True)
class PromptLogprobsWork:
    """Log-probabilities wanted of the prompt tokens `[start, start + len(targets))` of plan row `row`.

    They come from the step's hidden states `[first_token, first_token + len(targets))`.
    """

    row: int
    start: int
    first_token: int
    targets: Int32Array
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Everything the device needs for one step."""

    plan: SchedulerOutput
    input_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int32
    attn_metadata: tuple[AttentionMetadata, ...]  # one per KV group
    logits_indices: torch.Tensor  # [num_sampling_rows] int64, into the step's tokens
    sampling_slots: Int32Array  # [num_sampling_rows]
    sampling_metadata: SamplingMetadata
    prompt_logprobs: tuple[PromptLogprobsWork, ...]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What the forward pass leaves for `sample`."""

    logits: torch.Tensor  # [num_sampling_rows, vocab_size] float32
    prompt_logprobs: tuple[PromptLogprobs, ...]


class ModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        backend: AttentionBackend,
        device: Device,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._model = model
        self._backend = backend
        self._device = device
        self._timeline = timeline
        vocab_size = config.model.architecture.vocab_size
        self._sampler = Sampler(vocab_size, device.torch_device)
        self._sampling_state = SamplingState(config.scheduler.max_num_seqs, vocab_size, device.torch_device)
        self._prompt_logprobs: dict[int, tuple[int, int]] = {}  # slot -> (how many, prompt positions done)
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
        assert self._batch is not None and self._kv_cache_config is not None, "initialize_from_config comes first"
        with self._timeline.span(plan.step_id, "prepare"):
            batch, device = self._batch, self._device
            batch.apply(plan)
            for data in plan.new_requests:
                self._sampling_state.add(data.slot, data.sampling)
                wanted = data.sampling.params.prompt_logprobs
                self._prompt_logprobs.pop(data.slot, None)
                if wanted is not None:
                    self._prompt_logprobs[data.slot] = (wanted, data.num_prompt_logprobs_done)
            inputs = batch.step_inputs(plan)
            max_seq_len = int(inputs.seq_lens.max())
            attn_metadata = []
            for index, group in enumerate(self._kv_cache_config.groups):
                attention_inputs = AttentionInputs(
                    query_start_loc=inputs.query_start_loc,
                    seq_lens=inputs.seq_lens,
                    num_computed_tokens=plan.num_computed_tokens,
                    block_table=batch.block_table(index, plan.slots, max_seq_len),
                    block_size=group.spec.block_size,
                )
                attn_metadata.append(self._backend.build_metadata(attention_inputs, group.spec))
            slots = plan.slots[inputs.sampling_rows]
            num_tokens = inputs.seq_lens[inputs.sampling_rows]
            return ModelInput(
                plan=plan,
                input_ids=device.to_device(inputs.input_ids),
                positions=device.to_device(inputs.positions),
                attn_metadata=tuple(attn_metadata),
                logits_indices=device.to_device(inputs.query_start_loc[1:][inputs.sampling_rows].astype(np.int64) - 1),
                sampling_slots=slots,
                sampling_metadata=self._sampling_state.metadata(
                    slots, num_tokens, batch.token_ids, batch.num_prompt_tokens[slots], num_tokens
                ),
                prompt_logprobs=self._prompt_logprobs_work(plan, inputs.query_start_loc),
            )

    def execute_model(self, model_input: ModelInput) -> ForwardOutput:
        """The forward pass. Only rows that sample, or whose prompt's log-probabilities are wanted, go through the head."""
        with self._timeline.span(model_input.plan.step_id, "forward"):
            rows = model_input.logits_indices
            inputs = (model_input.input_ids, model_input.positions, model_input.attn_metadata)
            if not model_input.prompt_logprobs:
                return ForwardOutput(self._model.compute_logits(self._model(*inputs, rows)), ())
            hidden = self._model(*inputs)
            prompt_logprobs = tuple(
                PromptLogprobs(row=work.row, start=work.start, columns=self._logprobs_of_prompt(hidden, work))
                for work in model_input.prompt_logprobs
            )
            return ForwardOutput(self._model.compute_logits(hidden[rows]), prompt_logprobs)

    def sample(self, model_input: ModelInput, forward: ForwardOutput) -> ModelRunnerOutput:
        """Draw one token per sampling row and add it to the batch."""
        assert self._batch is not None
        plan = model_input.plan
        with self._timeline.span(plan.step_id, "sample"):
            token_ids = np.empty(0, dtype=np.int32)
            logprobs, logprobs_rows = None, np.empty(0, dtype=np.int32)
            if len(model_input.sampling_slots):
                drawn = self._sampler(forward.logits, model_input.sampling_metadata)
                token_ids = drawn.token_ids.cpu().numpy().astype(np.int32, copy=False)
                if drawn.logprobs is not None and drawn.logprobs_rows is not None:
                    logprobs, logprobs_rows = drawn.logprobs.to_columns(), drawn.logprobs_rows
                self._batch.append_sampled(model_input.sampling_slots, token_ids)
            return ModelRunnerOutput(
                step_id=plan.step_id,
                kv_connector_output=KVConnectorOutput(),
                sampled_token_ids=token_ids,
                logprobs=logprobs,
                logprobs_rows=logprobs_rows,
                prompt_logprobs=forward.prompt_logprobs,
            )

    def dummy_run(self, num_tokens: int) -> None:
        """A forward pass of `num_tokens` that belong to no request: each is a sequence of one token in the dummy block."""
        assert self._kv_cache_config is not None, "initialize_from_config comes first"
        inputs = _one_token_each(num_tokens, self._config.cache.block_size)
        metadata = tuple(self._backend.build_metadata(inputs, group.spec) for group in self._kv_cache_config.groups)
        zeros = self._device.to_device(np.zeros(num_tokens, dtype=np.int32))
        self._model.compute_logits(self._model(zeros, zeros, metadata))

    def profile_run(self) -> None:
        """The largest step through the first layer, the head and the sampler, with a cache of its own: all layers take turns
        in the same memory, so one shows the peak."""
        num_tokens, num_rows = self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_num_seqs
        name, layer = next(iter(self._model.attention_layers().items()))
        spec = self.kv_cache_specs()[name]
        inputs = _prompts(num_tokens, self._config.model.max_model_len, spec.block_size)
        arena = self._device.allocate_arena(int(inputs.block_table.max()) + 1, spec.block_bytes)
        layer.bind(self._backend.kv_cache_view(arena, spec, 0), 0)
        positions = np.arange(num_tokens, dtype=np.int32) % self._config.model.max_model_len
        hidden = self._model(
            self._device.to_device(np.zeros(num_tokens, dtype=np.int32)),
            self._device.to_device(positions),
            (self._backend.build_metadata(inputs, spec),),
            num_layers=1,
        )
        slots = np.arange(num_rows, dtype=np.int32)
        for slot in slots.tolist():
            self._sampling_state.add(slot, ResolvedSampling(params=SamplingParams(), seed=slot, max_tokens=1))
        no_tokens = np.zeros((num_rows, 1), dtype=np.int32)
        metadata = self._sampling_state.metadata(slots, slots, no_tokens, slots * 0, slots * 0)
        self._sampler(self._model.compute_logits(hidden[:num_rows]), metadata)

    def _prompt_logprobs_work(
        self, plan: SchedulerOutput, query_start_loc: Int32Array
    ) -> tuple[PromptLogprobsWork, ...]:
        """Which of the step's hidden states yield log-probabilities of prompt tokens not answered before."""
        assert self._batch is not None
        work = []
        for row, slot in enumerate(plan.slots.tolist()) if self._prompt_logprobs else ():
            if slot not in self._prompt_logprobs:
                continue
            wanted, done = self._prompt_logprobs[slot]
            computed = int(plan.num_computed_tokens[row])
            # the hidden state of position p tells about the token at p + 1
            start = max(done, computed + 1)
            stop = min(computed + int(plan.num_scheduled_tokens[row]) + 1, int(self._batch.num_prompt_tokens[slot]))
            if stop <= start:
                continue
            self._prompt_logprobs[slot] = (wanted, stop)
            first_token = int(query_start_loc[row]) + start - 1 - computed
            targets = self._batch.token_ids[slot, start:stop].copy()
            work.append(PromptLogprobsWork(row, start, first_token, targets, wanted))
        return tuple(work)

    def _logprobs_of_prompt(self, hidden: torch.Tensor, work: PromptLogprobsWork) -> LogprobsColumns:
        pieces: list[LogprobsColumns] = []
        for i in range(0, len(work.targets), PROMPT_LOGPROBS_ROWS):
            targets = self._device.to_device(work.targets[i : i + PROMPT_LOGPROBS_ROWS])
            first = work.first_token + i
            logits = self._model.compute_logits(hidden[first : first + len(targets)])
            pieces.append(gather_logprobs(logits, targets, work.num_logprobs).to_columns())
        return LogprobsColumns(
            token_ids=np.concatenate([piece.token_ids for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            ranks=np.concatenate([piece.ranks for piece in pieces]),
        )


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
