"""`RunnerBase`: what a runner has before its first step: the model, the memory of the KV cache, and the steps that measure and
warm up the device."""

from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, replace
from typing import Any

from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.accelerator import Accelerator
from inflight.device.base import Device
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.interface.kv_cache import KVCacheConfig, KVCacheSpec
from inflight.kernels.token_masks import run_token_masks_once
from inflight.layers.attention import Attention
from inflight.layers.recurrent_state import RecurrentState
from inflight.models.causal_lm import CausalLM
from inflight.sample.state import SamplingState
from inflight.spec_decode.model_drafter import ModelDrafter
from inflight.timeline import Timeline
from inflight.worker.input_batch import InputBatch
from inflight.worker.parts.images import encoder_cache_bytes
from inflight.worker.parts.row_parts import RowParts
from inflight.worker.pipeline import Pipeline
from inflight.worker.profile_run import cache_spec, run_largest_step
from inflight.worker.token_inbox import TokenInbox


@dataclass(frozen=True, kw_only=True)
class RankParts:
    """What a runner gets from its worker.

    Attributes:
        model: the layers of this rank's pipeline stage.
        pipeline: the links to the other stages; the worker closes them.
        draft_model: on the rank that draws, in an engine with one.
    """

    config: EngineConfig
    model: CausalLM
    backend: AttentionBackend
    device: Device
    timeline: Timeline
    tp: TensorParallelGroup
    pipeline: Pipeline
    draft_model: ModelDrafter | None = None


class RunnerBase(ABC):
    """Owns the model, the KV arena (the memory of all KV blocks) and the `InputBatch`. On an accelerator the constructor tunes
    the model's matrix products, so call it in the device's compute thread."""

    def __init__(self, parts: RankParts) -> None:
        config = parts.config
        model = parts.model
        device = parts.device
        pipeline = parts.pipeline
        self._config = config
        self._model = model
        self._device = device
        self._timeline = parts.timeline
        self._backend = parts.backend
        self._tp = parts.tp
        self._stage = pipeline.stage
        self._pipeline = pipeline
        self._draws = self._stage.is_last and parts.tp.rank == 0
        architecture = config.model.architecture
        self._linears = model.tune(config.scheduler.max_num_seqs) if isinstance(device, Accelerator) else []
        self._sampling_state = SamplingState(
            config.scheduler.max_num_seqs, architecture.vocab_size, device.torch_device
        )
        self._draft_model = parts.draft_model
        self._parts = RowParts(self._stage, self._model)
        self._kv_cache_config: KVCacheConfig | None = None
        self._batch: InputBatch | None = None
        self.arena: Tensor  # uint8 [num_blocks, block_bytes], see `initialize`
        self._inbox: TokenInbox  # each runner makes it, with its own function that applies received tokens

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The spec of each layer's cache, by layer name, in layer order."""
        return {name: cache_spec(layer, self._config) for name, layer in self._cached_layers().items()}

    def _cached_layers(self) -> dict[str, Attention | RecurrentState]:
        drafting = {} if self._draft_model is None else self._draft_model.cached_layers()
        return {**self._model.cached_layers(), **drafting}

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the arena and bind every layer to its part of it."""
        self._kv_cache_config = kv_cache_config
        self.arena = self._device.allocate_arena(kv_cache_config.num_blocks, kv_cache_config.block_bytes)
        layers = self._cached_layers()
        for group_index, group in enumerate(kv_cache_config.groups):
            for i, name in enumerate(group.layer_names):
                layers[name].bind(self._backend.layer_cache(self.arena, group.spec, i), group_index)
        if self._draft_model is not None:
            self._draft_model.initialize(kv_cache_config)
        self._batch = self._new_batch(kv_cache_config)

    def warm_up(self) -> None:
        """Run a step without requests, because the first call of each kernel is slow. All ranks do this together, after
        `initialize`, and once in each later epoch."""
        self.dummy_run(1)
        if not isinstance(self._device, Accelerator):
            return
        self.prompt_run()  # otherwise the first prompt would compile its kernels, and the first grammar that of the masks
        if self._draws:
            vocab_size, device = self._config.model.architecture.vocab_size, self._device.torch_device
            self._device.compute.enqueue(lambda: run_token_masks_once(vocab_size, device))
            self._device.compute.record().synchronize()

    def begin_epoch(self, pipeline: Pipeline) -> None:
        """Use the links of a new epoch, which begins after a fault. The steps of the old epoch are void. Weights and KV arena
        stay as they are. Call this only while nothing is computed."""
        self._pipeline = pipeline
        self._parts = RowParts(self._stage, self._model)
        if self._kv_cache_config is not None:
            self._batch = self._new_batch(self._kv_cache_config)

    def _new_batch(self, kv_cache_config: KVCacheConfig) -> InputBatch:
        return InputBatch(
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_model_len=self._config.model.max_model_len,
            block_size=self._config.cache.block_size,
            num_groups=len(kv_cache_config.groups),
            num_ahead_tokens=kv_cache_config.num_ahead_tokens,
        )

    @property
    def mapped_bytes(self) -> int:
        """The bytes of weights that are pages of a file."""
        return self._model.mapped_bytes

    @property
    def packed_key(self) -> str:
        """See `peak_bytes`."""
        return self._model.packed_key

    def reserved_bytes(self, peak_bytes: int) -> int:
        """Device bytes that `initialize` and later steps need besides the arena. The profile run needed `peak_bytes`."""
        specs = self.kv_cache_specs()
        num_threads = self._config.device.num_threads
        found: dict[tuple[int, int], int] = {}  # by query heads per key head, and head_dim
        for name, layer in self._cached_layers().items():
            spec = specs[name]
            if isinstance(layer, Attention) and isinstance(spec, KVCacheSpec):
                per_head = layer.num_heads // layer.num_kv_heads
                scratch_bytes = self._backend.scratch_bytes(spec, per_head=per_head, num_threads=num_threads)
                found[per_head, spec.head_dim] = scratch_bytes
        return sum(found.values()) + encoder_cache_bytes(self._model, self._config.model.max_model_len)

    def graph_report(self) -> dict[str, Any]:  # Any: JSON
        """See `Worker.graph_report`."""
        return {
            "num_graphs": 0,
            "seconds": 0.0,
            "bytes": 0,
            "linears": [list(astuple(linear)) for linear in self._linears],
        }

    @abstractmethod
    def dummy_run(self, num_tokens: int) -> None:
        """Run a forward pass that belongs to no request: `num_tokens` sequences of one token, all in the dummy block.

        It uses no link to other stages. Zeros replace the activations of the previous stage.
        """

    @abstractmethod
    def prompt_run(self) -> None:
        """The same for a prompt of two tokens beside a row of one, on a GPU: their attention is other kernels."""

    @abstractmethod
    def _profile_draws(self, hidden: Tensor) -> None:
        """Run the LM head and the sampler on these hidden states, with as many rows as the largest step has."""

    def profile_run(self) -> None:
        """Run a step of the largest size, so that its peak memory can be measured. The memory is freed at the end."""
        run_largest_step(self._config, self._model, self._backend, self._device, self._stage, self._profile_draws)
        if self._draft_model is not None:
            config = replace(self._config, model=self._draft_model.config)
            num_layers, drafting = config.model.architecture.num_layers, self._draft_model.model
            run_largest_step(
                *(config, drafting, self._backend, self._device, PipelineStage(0, num_layers, num_layers)),
                lambda hidden: drafting.compute_logits(hidden[: config.scheduler.max_num_seqs]),
            )
