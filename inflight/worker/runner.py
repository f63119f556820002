"""`Runner`: one rank's steps, in four stages; what the worker drives, and what is the same on every device.

    prepare_inputs   plan -> what the step needs: host work and staged copies; no collective, no sync, no wait for another rank
    execute_model    -> logits of the sampling rows, or on all pipeline stages but the last what the next one takes
    sample           -> the draws, on the device
    drain            -> `ModelRunnerOutput`, on the host

One thread prepares, another executes and samples, a third drains, each in step order. The first may be steps ahead. The forward
of a step may come before the sample of the step before it (see `stage_order`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import astuple
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.config.engine import EngineConfig
from inflight.config.partition import PipelineStage
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.models.causal_lm import CausalLM
from inflight.sample.state import SamplingState
from inflight.timeline import Timeline
from inflight.worker.input_batch import InputBatch, StepInputs
from inflight.worker.prompt_logprobs import PromptLogprobsProgress


class PreparedStep(Protocol):
    """What `prepare_inputs` returns."""

    @property
    def plan(self) -> SchedulerOutput: ...

    @property
    def inputs(self) -> StepInputs: ...


class Runner(ABC):
    """Owns the model, the KV arena and the `InputBatch`.

    Args:
        model: the part of it that belongs to `stage`. On an accelerator its products are tuned: made in a stage.
        sampling_device: where the tensors of `SamplingState` go.
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
        sampling_device: torch.device,
    ) -> None:
        self._config = config
        self._model = model
        self._backend = backend
        self._device = device
        self._timeline = timeline
        self._tp, self._stage = tp, stage
        self._draws = stage.is_last and tp.rank == 0
        architecture = config.model.architecture
        self._intermediate = IntermediateTensors.template(
            architecture.hidden_size, getattr(torch, config.model.dtype), device.torch_device
        )
        self._linears = model.tune(config.scheduler.max_num_seqs) if isinstance(device, Accelerator) else []
        self._sampling_state = SamplingState(config.scheduler.max_num_seqs, architecture.vocab_size, sampling_device)
        self._prompt_logprobs = PromptLogprobsProgress()
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

    def reserved_bytes(self, peak_bytes: int) -> int:
        """Bytes of the device that `initialize` and later steps need besides the arena; the profile run needed `peak_bytes`."""
        cache, num_threads = self._config.cache, self._config.device.num_threads
        return max(
            (
                self._backend.scratch_bytes(
                    layer.kv_cache_spec(cache.block_size, getattr(torch, cache.dtype)),
                    per_head=layer.num_heads // layer.num_kv_heads,
                    num_threads=num_threads,
                )
                for layer in self._model.attention_layers().values()
            ),
            default=0,
        )

    def graph_report(self) -> dict[str, Any]:  # Any: JSON
        """See `Worker.graph_report`."""
        return {
            "num_graphs": 0,
            "seconds": 0.0,
            "bytes": 0,
            "linears": [list(astuple(linear)) for linear in self._linears],
        }

    def _take_in(self, plan: SchedulerOutput) -> tuple[InputBatch, StepInputs]:
        """The batch, brought up to the plan, and the plan's inputs. In the thread that prepares."""
        assert self._batch is not None, "initialize_from_config comes first"
        self._batch.apply(plan)
        if self._stage.is_last:
            for data in plan.new_requests:
                self._sampling_state.add(data.slot, data.sampling)
                self._prompt_logprobs.add(data)
        return self._batch, self._batch.step_inputs(plan)

    @abstractmethod
    def prepare_inputs(self, plan: SchedulerOutput) -> PreparedStep:
        """Host work only."""

    # Any: what one stage of a runner hands to its next is the runner's own business
    @abstractmethod
    def execute_model(self, model_input: Any, intermediate: IntermediateTensors | None = None) -> Any:
        """The forward pass. Only rows that sample, or whose prompt's log-probabilities are wanted, go through the head.

        `intermediate`: what the stage before returned, None on the first stage; as many tokens as the plan says, as are those
        returned. A stage that is told what the last one draws may wait here for tokens that it has yet to draw.
        """

    @abstractmethod
    def sample(self, model_input: Any, forward: Any, grammar_output: GrammarOutput | None = None) -> Any:
        """Draw behind each sampling row and its drafts, and let every rank that needs it know. Nothing on stages but the last.

        `grammar_output`: of a plan with rows under a grammar.
        """

    def discard(self, model_input: Any) -> None:
        """Its forward or its draws have failed: free what the step held. In the thread that executes."""

    @abstractmethod
    def drain(self, drawn: Any) -> ModelRunnerOutput:
        """The step's answer. In the drain thread, while later steps run."""

    @abstractmethod
    def dummy_run(self, num_tokens: int) -> None:
        """A forward pass of `num_tokens` that belong to no request: each is a sequence of one token in the dummy block.

        It touches no link: each stage makes up what the one before would send.
        """

    @abstractmethod
    def _profile_draws(self, hidden: Tensor) -> None:
        """The head and the sampler over these rows, as the largest step has them."""

    def profile_run(self) -> None:
        """The largest step through the first layer, the head and the sampler, with a cache of its own: all layers take turns
        in the same memory, so one shows the peak."""
        num_tokens = self._config.scheduler.max_num_batched_tokens
        name, layer = next(iter(self._model.attention_layers().items()))
        spec = self.kv_cache_specs()[name]
        inputs = _prompts(num_tokens, self._config.model.max_model_len, spec.block_size)
        arena = self._device.allocate_arena(int(inputs.block_table.max()) + 1, spec.block_bytes)
        bound = layer.kv_cache, layer.group_index  # of an engine that runs already
        layer.bind(self._backend.kv_cache_view(arena, spec, 0), 0)
        try:
            self._largest_step(num_tokens, self._backend.build_metadata(inputs, spec))
        finally:
            layer.bind(*bound)

    def _largest_step(self, num_tokens: int, metadata: AttentionMetadata) -> None:
        positions = np.arange(num_tokens, dtype=np.int32) % self._config.model.max_model_len
        hidden = self._model(
            self._device.to_device(np.zeros(num_tokens, dtype=np.int32)),
            self._device.to_device(positions),
            (metadata,),
            num_layers=1,
            intermediate=self._made_up(num_tokens),
        )
        if self._stage.is_last:
            self._profile_draws(hidden)

    def _made_up(self, num_tokens: int) -> IntermediateTensors | None:
        """Zeros in the place of what the stage before would send."""
        if self._stage.is_first:
            return None
        made_up = self._intermediate.empty_like(num_tokens)
        made_up.delta.zero_()
        made_up.residual.zero_()
        return made_up


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
