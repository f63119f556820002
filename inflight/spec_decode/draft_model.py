"""`DraftModel`: a small model writes the next tokens, and the served model verifies them.

It runs on the rank that draws, after the draws of a step. It sees all tokens of the step's requests, those just drawn, too:

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    draft model    computes the tokens [c, n), where c is how many it has computed before, and draws draft 0 behind them
                   computes draft 0, and draws draft 1; and so on

Its keys and values are in the same blocks as those of the served model (`CACHE_NAMES`). So a cached prefix, a preempted
request and a block that comes from a tier need no work of their own: where the served model has keys, the draft model has
them, too. The scheduler gives each request room for `num_speculative_tokens` tokens more.

How many drafts a request gets follows how often they were right, and what a pass costs. A request that gets none is left out
until a block of its tokens is full; then these tokens show how many drafts would have been right.

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
from inflight.spec_decode import adaptive
from inflight.spec_decode.acceptance import Acceptance
from inflight.spec_decode.proposer import NO_TOKEN
from inflight.weight_cache.background import BackgroundWork

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


class _Checks(NamedTuple):
    """Tokens that were drawn while their request had no drafts: would the draft model have proposed them?

    Attributes:
        places: [m], of the request in `drawing_rows`.
        positions, tokens: [m], of the tokens.
        indices: [m], of the tokens before them among those that the draft model computes now.
    """

    places: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        inputs: DraftInputs,
        starts: Int32Array,
        ends: Int32Array,
        behind: npt.NDArray[np.int64],
    ) -> "_Checks":
        """`behind`: of each row, the index of the token behind its last one."""
        found: list[tuple[int, int, int, int]] = []
        for place in places:
            row = int(inputs.drawing_rows[place])
            for position in range(int(starts[row]) + 1, int(ends[row])):
                token = int(inputs.token_ids[inputs.slots[row], position])
                found.append((place, position, token, int(behind[row] - ends[row] + position - 1)))
        return cls(*np.array(found, dtype=np.int64).reshape(-1, 4).T)


class DraftModel:
    """
    Args:
        model: all layers of the draft model, with weights.
        config: that of the engine, with a `draft_model`.
        share_of_step: the bytes of the draft model's weights / those of the served model.
    """

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, backend: AttentionBackend, device: Device, share_of_step: float
    ) -> None:
        assert config.draft_model is not None and config.speculative is not None
        self.model = model
        self.config = config.draft_model
        self.num_speculative_tokens = config.speculative.num_speculative_tokens
        self._vocab_size = config.model.architecture.vocab_size
        self._backend = backend
        self._device = device
        self._block_size = config.cache.block_size
        self._free_tokens = adaptive.FREE_TOKENS[config.device.kind]
        self._share_of_step = share_of_step
        self._choose = adaptive.best_num_passes
        # of each slot: how many tokens are in the cache; how many there were when the last drafts were proposed; these drafts
        max_num_seqs = config.scheduler.max_num_seqs
        self._num_cached: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._proposed: Int32Array = np.full((max_num_seqs, self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        self._acceptance = Acceptance(max_num_seqs)
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
        slots = [data.slot for data in requests]
        self._num_cached[slots] = _NEW
        self._proposed[slots] = NO_TOKEN
        self._acceptance.forget(slots)

    def propose(self, inputs: DraftInputs, sampler: Sampler) -> Int32Array:
        """Compute the step's tokens, and propose drafts.

        Returns:
            [n, num_speculative_tokens], the drafts of each of `drawing_rows`, padded with NO_TOKEN.
        """
        drafts = np.full((len(inputs.drawing_rows), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        counts = self._choose_counts(inputs)
        starts, ends, is_new = self._spans(inputs, counts)
        rows = np.flatnonzero(starts < ends)
        if not len(rows):
            return drafts
        slots = inputs.slots[rows]
        spans = zip(slots, starts[rows], ends[rows], strict=True)
        tokens = np.concatenate([inputs.token_ids[slot, start:end] for slot, start, end in spans])
        behind = np.zeros(len(inputs.slots), dtype=np.int64)  # the index of the token behind each row's last one
        behind[rows] = np.cumsum(ends[rows] - starts[rows])
        places = np.flatnonzero(counts > 0)  # in `drawing_rows`
        unproposed = np.flatnonzero((counts == 0) & ~is_new[inputs.drawing_rows])
        checked = _Checks.of(unproposed.tolist(), inputs, starts, ends, behind)
        wanted = inputs.drawing_rows[places]
        last = np.concatenate([behind[wanted] - 1, checked.indices])
        logits = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last)
        if len(checked.indices):
            right = self._draw(logits[len(places) :], inputs.sampling.take(checked.places), checked.positions, sampler)
            checked_slots = inputs.slots[inputs.drawing_rows[checked.places]]
            self._acceptance.add(checked_slots, right == checked.tokens, np.ones(len(right), dtype=np.int64))
            logits = logits[: len(places)]
        column = 0
        while len(places):
            wanted = inputs.drawing_rows[places]
            positions = inputs.num_tokens[wanted] + column
            drawn = self._draw(logits, inputs.sampling.take(places), positions, sampler)
            drafts[places, column] = drawn
            column += 1
            going_on = (drawn != NO_TOKEN) & (column < counts[places])
            places, wanted, positions = places[going_on], wanted[going_on], positions[going_on]
            if len(places):
                following = np.arange(len(wanted))
                logits = self._forward(drawn[going_on], inputs, wanted, positions, positions + 1, following)
        self._proposed[inputs.slots[inputs.drawing_rows]] = drafts
        return drafts

    def _choose_counts(self, inputs: DraftInputs) -> Int32Array:
        """[n]: how many drafts each of `drawing_rows` gets. First it learns from the drafts that were verified in this step."""
        slots = inputs.slots[inputs.drawing_rows]
        num_tokens = inputs.num_tokens[inputs.drawing_rows]
        self._learn(slots, inputs.token_ids, num_tokens)
        room = np.minimum(self.config.max_model_len - num_tokens - 1, self.num_speculative_tokens).clip(min=0)
        self._num_tokens[slots] = num_tokens
        probabilities = self._acceptance.probabilities(slots)
        chosen = self._choose(probabilities, room.tolist(), self._free_tokens, self._share_of_step)
        return np.array(chosen, dtype=np.int32)

    def _learn(self, slots: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        """Compare the last drafts of these requests with the tokens that followed."""
        begins = self._num_tokens[slots]
        width = np.arange(self.num_speculative_tokens)
        places = np.minimum(begins[:, None] + width, token_ids.shape[1] - 1)
        is_known = (begins[:, None] + width < num_tokens[:, None]) & (begins[:, None] > 0)
        drafts = self._proposed[slots]
        compared = is_known & (drafts != NO_TOKEN)
        right = (compared & (drafts == token_ids[slots[:, None], places])).cumprod(axis=1).sum(axis=1)
        self._acceptance.add(slots, right, np.minimum(right + 1, compared.sum(axis=1)))
        self._proposed[slots] = NO_TOKEN  # each draft is counted once, also if the next step proposes none

    def _spans(self, inputs: DraftInputs, counts: Int32Array) -> tuple[Int32Array, Int32Array, npt.NDArray[np.bool_]]:
        """Which tokens [start, end) of each row are computed now, and which rows belong to new requests.

        A row that gets no drafts is left out until a block is full: then it is computed at once, because others may find the
        block."""
        slots = inputs.slots
        ends = np.minimum(inputs.num_tokens, self.config.max_model_len)
        computed = inputs.num_computed_tokens
        cached = self._num_cached[slots]
        is_new = cached == _NEW
        # the last token before the step has been computed as soon as it was drawn, but that of a new request has not
        starts = np.minimum(np.where(is_new, computed, np.minimum(cached, computed + 1)), ends)
        waits = np.zeros(len(slots), dtype=np.bool_)
        waits[inputs.drawing_rows] = counts == 0
        waits &= ~is_new & (ends // self._block_size == starts // self._block_size)
        ends = np.where(waits, starts, ends)
        self._num_cached[slots] = ends
        return starts, ends, is_new

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
        """Compute the tokens [starts, ends) of `rows`. Returns the logits behind the tokens `last`, as wide as those
        of the served model."""
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
    served_bytes: int,
    check_size: Callable[[WeightSizes], None],
    later: BackgroundWork | None = None,
) -> DraftModel | None:
    """The whole draft model, on the rank that draws; None on other ranks, and in an engine without one.

    Args:
        served_bytes: of the weights of the served model, all stages together, on one of the ranks that share a layer.
        check_size, later: as of `load_model`.
    """
    if config.draft_model is None or not stage.is_last or tp.rank > 0:
        return None
    sizes = list[WeightSizes]()

    def check(size: WeightSizes) -> None:
        sizes.append(size)
        check_size(size)

    model = load_model(
        config.draft_model,
        device=device.torch_device,
        backend=backend,
        tp=TensorParallelGroup(),
        check_size=check,
        later=later,
    )
    share = sizes[0].whole / max(1, served_bytes)
    return DraftModel(model, config, backend=backend, device=device, share_of_step=share)
