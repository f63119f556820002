"""`DraftModel`: a small model writes the next tokens, and the served model verifies them.

It runs on the rank that draws, after the draws of a step. It sees all tokens of the step's requests, those just drawn, too:

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    draft model    computes the tokens [c, n), where c is how many it has computed before, and draws draft 0 behind them
                   computes draft 0, and draws draft 1; and so on

Its keys and values are in the same blocks as those of the served model (`CACHE_NAMES`). So a cached prefix, a preempted
request and a block that comes from a tier need no work of their own: where the served model has keys, the draft model has
them, too. The scheduler gives each request room for `num_speculative_tokens` tokens more.

A draft is drawn with the noise of its position, as the served model's token is. If both models give a token about the same
probability, both draw it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, MetadataBuilder
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.device.base import Device
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.layers.attention import Attention
from inflight.layers.recurrent_state import RecurrentState
from inflight.model_loader.loader import load_model
from inflight.model_loader.weight_size import WeightSizes
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.sample.rows import SamplingRows
from inflight.sample.sampler import Sampler
from inflight.spec_decode.proposer import NO_TOKEN

_NEW = (
    -1
)  # of a slot whose request is new: its tokens that are in the KV cache were computed by a step of another request

CACHE_NAMES = "draft."  # the beginning of the names of the draft model's layers, in the KV cache


class DraftInputs(NamedTuple):
    """The requests of a step, after its draws. A row is a request's part of the step.

    Attributes:
        token_ids: [max_num_seqs, max_model_len], the tokens of each slot.
        slots: [num_rows].
        num_computed_tokens: [num_rows], how many tokens the served model had computed before the step.
        num_tokens: [num_rows], how many tokens are known now: those that are computed, and those just drawn.
        drawing_rows: [n], the rows that get drafts.
        sampling: [n], how the tokens of these rows are drawn.
        block_tables: [num_rows, num_blocks], one for each KV group, with room for the drafts.
    """

    token_ids: Int32Array
    slots: Int32Array
    num_computed_tokens: Int32Array
    num_tokens: Int32Array
    drawing_rows: npt.NDArray[np.integer]
    sampling: SamplingRows
    block_tables: tuple[Int32Array, ...]


class DraftModel:
    """
    Args:
        model: all layers of the draft model, with weights.
        config: that of the engine, with a `draft_model`.
    """

    def __init__(self, model: CausalLM, config: EngineConfig, *, backend: AttentionBackend, device: Device) -> None:
        assert config.draft_model is not None and config.speculative is not None
        self.model = model
        self.config = config.draft_model
        self.num_speculative_tokens = config.speculative.num_speculative_tokens
        self._vocab_size = config.model.architecture.vocab_size
        self._backend = backend
        self._device = device
        self._num_cached: Int32Array = np.zeros(config.scheduler.max_num_seqs, dtype=np.int32)  # of each slot
        self._builders: tuple[MetadataBuilder | None, ...] = ()  # of each KV group; None: the draft model is not in it

    def cached_layers(self) -> dict[str, Attention | RecurrentState]:
        """As `CausalLM.cached_layers`, under the names that the layers have in the KV cache."""
        return {CACHE_NAMES + name: layer for name, layer in self.model.cached_layers().items()}

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        """Call it after the layers have been bound to the arena."""
        self._builders = tuple(
            self._backend.metadata_builder(group.spec)
            if any(name.startswith(CACHE_NAMES) for name in group.layer_names)
            else None
            for group in kv_cache_config.groups
        )

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        """These requests have just got their slots. Call it before the first step of the requests has drafts."""
        self._num_cached[[data.slot for data in requests]] = _NEW

    def propose(self, inputs: DraftInputs, sampler: Sampler) -> Int32Array:
        """Compute the step's tokens, and propose drafts.

        Returns:
            [n, num_speculative_tokens], the drafts of each of `drawing_rows`, padded with NO_TOKEN.
        """
        slots = inputs.slots
        ends = np.minimum(inputs.num_tokens, self.config.max_model_len)
        computed = inputs.num_computed_tokens
        cached = self._num_cached[slots]
        # the last token before the step has been computed as soon as it was drawn, but that of a new request has not
        starts = np.where(cached == _NEW, computed, np.minimum(cached, computed + 1))
        starts = np.minimum(starts, ends)
        self._num_cached[slots] = ends
        drafts = np.full((len(inputs.drawing_rows), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        room = np.minimum(self.config.max_model_len - inputs.num_tokens - 1, self.num_speculative_tokens)
        places = np.flatnonzero(room[inputs.drawing_rows] > 0)  # in `drawing_rows`
        rows = np.flatnonzero(starts < ends)
        lengths = ends[rows] - starts[rows]
        if not len(rows):
            return drafts
        tokens = np.concatenate(
            [
                inputs.token_ids[slot, start:end]
                for slot, start, end in zip(slots[rows], starts[rows], ends[rows], strict=True)
            ]
        )
        last = np.full(len(slots), -1, dtype=np.int64)  # the index of each row's last token
        last[rows] = np.cumsum(lengths) - 1
        wanted = inputs.drawing_rows[places]
        logits = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last[wanted])
        for column in range(self.num_speculative_tokens):
            if not len(places):
                break
            wanted = inputs.drawing_rows[places]
            positions = inputs.num_tokens[wanted] + column
            drawn = self._draw(logits, inputs.sampling.take(places), positions, sampler)
            drafts[places, column] = drawn
            going_on = (drawn != NO_TOKEN) & (column + 1 < room[wanted])
            places = places[going_on]
            if len(places):
                wanted, positions = wanted[going_on], positions[going_on]
                logits = self._forward(
                    drawn[going_on], inputs, wanted, positions, positions + 1, np.arange(len(wanted))
                )
        return drafts

    def warm_up(self, inputs: AttentionInputs) -> None:
        """Compute tokens that belong to no request, at these places."""
        num_tokens = len(inputs.seq_lens)
        zeros = self._device.to_device(np.zeros(num_tokens, dtype=np.int32))
        hidden = self.model(ModelStep(zeros, zeros, self._metadata([inputs] * len(self._builders), num_tokens)))
        self.model.compute_logits(hidden)

    def _forward(
        self,
        tokens: Int32Array,
        inputs: DraftInputs,
        rows: npt.NDArray[np.integer],
        starts: Int32Array,
        ends: Int32Array,
        last: npt.NDArray[np.integer],
    ) -> Tensor:
        """Compute the tokens [starts, ends) of `rows`. Returns the logits behind the tokens `last`, as wide
        as those of the served model."""
        lengths = ends - starts
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - query_start_loc[:-1], lengths)
        attention = [
            AttentionInputs(
                query_start_loc=query_start_loc, seq_lens=ends, num_computed_tokens=starts, block_table=table[rows]
            )
            for table in inputs.block_tables
        ]
        device = self._device
        known = np.where(tokens < self.config.architecture.vocab_size, tokens, 0).astype(np.int32)
        step = ModelStep(
            device.to_device(known),
            device.to_device(positions.astype(np.int32)),
            self._metadata(attention, len(tokens)),
            device.to_device(last.astype(np.int64)),
        )
        hidden = self.model(step)
        logits = self.model.compute_logits(hidden[: len(last)])
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[:, : self._vocab_size].contiguous()

    def _metadata(self, attention: Sequence[AttentionInputs], num_tokens: int) -> tuple[AttentionMetadata, ...]:
        return tuple(
            AttentionMetadata(num_tokens=num_tokens) if build is None else build(each)
            for build, each in zip(self._builders, attention, strict=True)
        )

    def _draw(
        self, logits: Tensor, sampling: SamplingRows, positions: npt.NDArray[np.integer], sampler: Sampler
    ) -> Int32Array:
        """[n]: a token for each row; NO_TOKEN where none can be drawn."""
        drawn: Int32Array = sampler(logits, sampling.metadata(positions)).token_ids.cpu().numpy()
        return drawn


def load_draft_model(
    config: EngineConfig,
    stage: PipelineStage,
    tp: TensorParallelGroup,
    backend: AttentionBackend,
    device: Device,
    *,
    check_size: Callable[[WeightSizes], None],
) -> DraftModel | None:
    """The whole draft model, on the rank that draws; None on other ranks, and in an engine without one. `check_size`: as of
    `load_model`."""
    if config.draft_model is None or not stage.is_last or tp.rank > 0:
        return None
    model = load_model(
        config.draft_model, device=device.torch_device, backend=backend, tp=TensorParallelGroup(), check_size=check_size
    )
    return DraftModel(model, config, backend=backend, device=device)
