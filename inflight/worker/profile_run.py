"""Steps that belong to no request: the profile run measures the peak memory, and the dummy run warms up the kernels."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend
from inflight.attention.metadata import AttentionInputs
from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.base import Device
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheSpec
from inflight.interface.request import ResolvedSampling
from inflight.layers.attention import Attention
from inflight.layers.recurrent_state import RecurrentState
from inflight.models.captured_layers import new_captured
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.sample.sampler import Sampler
from inflight.sample.state import SamplingState
from inflight.sampling_params import SamplingParams


def run_largest_step(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    device: Device,
    stage: PipelineStage,
    run_draws: Callable[[Tensor], object],
) -> None:
    """Run the largest step through one layer of each kind, the LM head and the sampler, with a temporary KV cache.

    This is enough to find the peak memory, because each layer reuses the working memory of the layer before it.

    Args:
        run_draws: runs the LM head and the sampler on hidden states; called on the last stage only.
    """
    num_tokens = config.scheduler.max_num_batched_tokens
    max_model_len = config.model.max_model_len
    users = model.cache_users()
    kinds: Sequence[Hashable] = config.model.architecture.layers[stage.start : stage.stop]
    if config.model.architecture.implementation == TRANSFORMERS:  # whose layers are known by their caches only
        kinds = [cache_spec(layer, config) for layer in users]
    chosen = sorted({kind: index for index, kind in reversed(list(enumerate(kinds)))}.values())
    layers = [users[index] for index in chosen]
    specs = [cache_spec(layer, config) for layer in layers]
    inputs = _prompts(num_tokens, max_model_len, config.cache.block_size)
    arena = device.allocate_arena(int(inputs.block_table.max()) + 1, max(spec.block_bytes for spec in specs))
    bound = [(layer.kv_cache, layer.group_index) for layer in layers]  # restored: the engine may be running already
    # All layers share the arena, because nobody reads the results.
    for index, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        layer.bind(backend.layer_cache(arena[:, : spec.block_bytes], spec, 0), index)
    try:
        zeros = device.to_device(np.zeros(num_tokens, dtype=np.int32))
        captured = new_captured(config.model.architecture, getattr(torch, config.model.dtype))
        step = ModelStep(
            zeros,
            device.to_device(np.arange(num_tokens, dtype=np.int32) % max_model_len),
            tuple(backend.metadata_builder(spec)(inputs) for spec in specs),
            layers=chosen,
            intermediate=zero_activations(config, stage, device, num_tokens),
            captured=None if captured is None else captured(zeros, None),
        )
        hidden = model(step)
        if stage.is_last:
            run_draws(hidden)
    finally:
        for layer, (kv_cache, group_index) in zip(layers, bound, strict=True):
            layer.bind(kv_cache, group_index)


def run_dummy_step(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    device: Device,
    stage: PipelineStage,
    kv_cache_config: KVCacheConfig,
    inputs: AttentionInputs,
) -> None:
    """Run a step of zeros through all layers and the LM head, with the KV cache of the engine. `inputs`: in the dummy block.
    Zeros replace the activations of the previous stage."""
    num_tokens = int(inputs.query_start_loc[-1])
    zeros = device.to_device(np.zeros(num_tokens, dtype=np.int32))
    metadata = tuple(backend.metadata_builder(group.spec)(inputs) for group in kv_cache_config.groups)
    hidden = model(ModelStep(zeros, zeros, metadata, intermediate=zero_activations(config, stage, device, num_tokens)))
    if stage.is_last:
        model.compute_logits(hidden)


def cache_spec(layer: Attention | RecurrentState, config: EngineConfig) -> KVCacheSpec:
    cache = config.cache
    return layer.kv_cache_spec(cache.block_size, getattr(torch, cache.dtype), cache.num_states)


def zero_activations(
    config: EngineConfig, stage: PipelineStage, device: Device, num_tokens: int
) -> IntermediateTensors | None:
    """Zeros in place of the previous stage's activations; None on the first stage."""
    if stage.is_first:
        return None
    zeros = IntermediateTensors.template(
        config.model.architecture.hidden_size, getattr(torch, config.model.dtype), device.torch_device
    ).empty_like(num_tokens)
    zeros.delta.zero_()
    zeros.residual.zero_()
    return zeros


def one_token_each(num_tokens: int) -> AttentionInputs:
    """Make the inputs of `num_tokens` sequences of one token each, all in the dummy block (a KV block of no request)."""
    return AttentionInputs(
        query_start_loc=np.arange(num_tokens + 1, dtype=np.int32),
        seq_lens=np.ones(num_tokens, dtype=np.int32),
        num_computed_tokens=np.zeros(num_tokens, dtype=np.int32),
        block_table=np.full((num_tokens, 1), DUMMY_BLOCK, dtype=np.int32),
    )


def prompt_beside_a_token() -> AttentionInputs:
    """Make the inputs of one sequence with two tokens and one with a single token, in the dummy block. On a GPU, other kernels
    compute the attention of such a step than that of sequences with one token each."""
    return AttentionInputs(
        query_start_loc=np.array([0, 2, 3], dtype=np.int32),
        seq_lens=np.array([2, 1], dtype=np.int32),
        num_computed_tokens=np.zeros(2, dtype=np.int32),
        block_table=np.full((2, 2), DUMMY_BLOCK, dtype=np.int32),  # two columns, if a block has one token
    )


def _prompts(num_tokens: int, max_model_len: int, block_size: int) -> AttentionInputs:
    """Make the inputs of the fewest prompts that have `num_tokens` tokens in total. Each prompt has its own blocks."""
    starts = np.append(np.arange(0, num_tokens, max_model_len, dtype=np.int32), np.int32(num_tokens))
    num_rows = len(starts) - 1
    width = -(-min(num_tokens, max_model_len) // block_size)
    return AttentionInputs(
        query_start_loc=starts,
        seq_lens=np.diff(starts),
        num_computed_tokens=np.zeros(num_rows, dtype=np.int32),
        block_table=1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width),
    )


def draw_in_all_slots(sampler: Sampler, state: SamplingState, logits: Tensor, max_num_seqs: int) -> None:
    """Draw a token from each row of `logits`, at most `max_num_seqs` of one request each, for all slots."""
    for slot in range(max_num_seqs):
        state.add(slot, ResolvedSampling(params=SamplingParams(), seed=slot, max_tokens=1))
    draws = np.arange(len(logits), dtype=np.int32)
    sampler(logits, state.take(draws % max_num_seqs).metadata(draws))
