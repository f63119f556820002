"""`ModelDrafter`: the base class of what has weights and a KV cache of its own, and writes the next tokens as drafts.

It runs on the rank that draws, after the draws of a step, and sees all tokens of the step's requests, those just drawn, too.
Its keys and values are in the same blocks as those of the served model (`CACHE_NAMES`). So a cached prefix, a preempted
request and a block that comes from a tier need no work of their own: where the served model has keys, the drafter has them,
too. The scheduler gives each request room for `num_speculative_tokens` tokens more.

How many drafts a request gets follows how often they were right, and what steps and passes take (`DraftChoice`).

A draft is drawn with the noise of its position, as the served model's token is. If both models give a token about the same
probability, both draw it.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, MetadataBuilder
from inflight.attention.metadata import AttentionInputs, AttentionMetadata
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.errors import CheckpointError
from inflight.interface.kv_cache import KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.layers.attention import Attention
from inflight.layers.recurrent_state import RecurrentState
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.sample.rows import SamplingRows
from inflight.sample.sampler import Sampler
from inflight.spec_decode.acceptance import Acceptance
from inflight.spec_decode.draft_choice import DraftChoice, fewest_right
from inflight.spec_decode.draft_costs import FREE_TOKENS, DraftCosts
from inflight.spec_decode.proposer import NO_TOKEN

logger = logging.getLogger(__name__)

CACHE_NAMES = "draft."  # the beginning of the names of the drafter's layers, in the KV cache

# So many drafts are assumed to be right, of so many. So drafts are tried where they usually pay, but not in a batch in which
# nearly all would have to be right
RIGHT_AT_START, DRAFTS_AT_START = 6.0, 8.0

IntArray = npt.NDArray[np.integer]


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
        hidden: [num_tokens of the step, ...], the served model's hidden states, those of several layers side by side; unused if
            the drafter does not read them.
        query_start_loc: [num_rows + 1], where the tokens of a row begin in `hidden`.
    """

    token_ids: Int32Array
    slots: Int32Array
    num_computed_tokens: Int32Array
    num_tokens: Int32Array
    drawing_rows: IntArray
    sampling: SamplingRows
    block_tables: tuple[Int32Array, ...]
    hidden: Tensor | None
    query_start_loc: Int32Array


class Pass(NamedTuple):
    """The result of a pass for n tokens.

    Attributes:
        logits: float32 [n, vocab_size], as wide as those of the served model.
        hidden: [n, hidden_size], the hidden states that the logits were made of.
    """

    logits: Tensor
    hidden: Tensor

    def take(self, chosen: IntArray) -> "Pass":
        if len(chosen) == len(self.logits):
            return self
        indices = torch.from_numpy(chosen.astype(np.int64)).to(self.logits.device)
        return Pass(self.logits[indices], self.hidden[indices])


NOTHING = Pass(*(torch.empty(0, 0, dtype=torch.float32, device="cpu") for _ in range(2)))


class ModelDrafter(ABC):
    """
    Args:
        model: all layers of the drafter, with weights.
        config: that of the engine, with a `draft_model`.
        share_of_step: the time of a pass / the time of a step of the served model, with one token each.
    """

    reads_hidden: ClassVar[bool] = False  # the hidden states of the served model: `DraftInputs.hidden`
    shift: ClassVar[int] = 0  # what is computed of the token at position p is in the cache at position p - `shift`

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
        estimated = DraftCosts(FREE_TOKENS[config.device.kind], share_of_step)
        self.choice = DraftChoice(estimated, self.num_speculative_tokens)
        self._pays = True
        self._is_checked = False  # whether the weights make logits
        self._has_warned = False
        # of each slot: how many tokens there were when the last drafts were drawn, and these drafts
        max_num_seqs = config.scheduler.max_num_seqs
        self._num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self._drawn: Int32Array = np.full((max_num_seqs, self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        self._acceptance = Acceptance(RIGHT_AT_START, DRAFTS_AT_START)
        self._builders: tuple[MetadataBuilder | None, ...] = ()  # of each KV group; None: the drafter is not in it

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

    def set_costs(self, measured: DraftCosts) -> None:
        """If drafts would not pay even if all were right, there are none from now on. Call it before the first request."""
        self.choice.costs = measured
        self._pays = fewest_right(self.num_speculative_tokens, measured) is not None

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        """These requests have just got their slots. Call it before the first step of the requests has drafts."""
        slots = [data.slot for data in requests]
        self._drawn[slots] = NO_TOKEN
        self._acceptance.forget(slots)

    def propose(self, inputs: DraftInputs, sampler: Sampler) -> Int32Array:
        """Compute the step's tokens, and propose drafts.

        Returns:
            [n, num_speculative_tokens], the drafts of each of `drawing_rows`, padded with NO_TOKEN.
        """
        drafts = np.full((len(inputs.drawing_rows), self.num_speculative_tokens), NO_TOKEN, dtype=np.int32)
        if not self._pays:
            return drafts
        num_behind = self._num_behind(inputs)
        counts = self._choose_counts(inputs, num_behind)
        start = time.perf_counter()
        places, passed = self._compute_step(inputs, counts, sampler)
        column = 0
        while len(places):
            wanted = inputs.drawing_rows[places]
            positions = inputs.num_tokens[wanted] + column
            drawn = self._draw(passed.logits, inputs.sampling.take(places), positions, sampler)
            drafts[places, column] = drawn
            column += 1
            going_on = (drawn != NO_TOKEN) & (column < counts[places])
            places, wanted, starts = places[going_on], wanted[going_on], positions[going_on] - self.shift
            if len(places):
                hidden = passed.take(np.flatnonzero(going_on)).hidden
                last = np.arange(len(wanted))
                passed = self._forward(drawn[going_on], inputs, wanted, starts, starts + 1, last, hidden)
        if counts.any() and not num_behind[counts > 0].any() and self._continues(inputs):
            seconds = time.perf_counter() - start
            num_passes = int(counts.max())
            num_rows = int(counts.sum()) / num_passes
            self.choice.costs.observe_draft(num_rows, seconds / num_passes)
        self._drawn[inputs.slots[inputs.drawing_rows]] = drafts
        drafts[counts == 0] = NO_TOKEN
        return drafts

    @abstractmethod
    def _compute_step(self, inputs: DraftInputs, counts: Int32Array, sampler: Sampler) -> tuple[IntArray, Pass]:
        """Compute the step's tokens.

        Args:
            counts: [n], how many drafts each of `drawing_rows` gets.

        Returns:
            The places in `drawing_rows` for which drafts are drawn, and the pass whose logits draw the first ones. A request
            whose count is 0 may be among them: its one draft is compared with the next token, but not proposed.
        """

    def _choose_counts(self, inputs: DraftInputs, num_behind: IntArray) -> Int32Array:
        """[n]: how many drafts each of `drawing_rows` gets. First it learns from the drafts that were verified in this step."""
        slots = inputs.slots[inputs.drawing_rows]
        num_tokens = inputs.num_tokens[inputs.drawing_rows]
        self._learn(slots, inputs.token_ids, num_tokens)
        left = self.config.max_model_len - num_tokens - 1
        room = left.clip(min=0, max=self.num_speculative_tokens)
        self._num_tokens[slots] = num_tokens
        probabilities = [self._acceptance.probability(slot) for slot in slots.tolist()]
        chosen = self.choice.counts(probabilities, room.tolist(), num_behind)
        return np.array(chosen, dtype=np.int32)

    def _num_behind(self, inputs: DraftInputs) -> IntArray:
        """[n]: how many tokens each of `drawing_rows` needs before drafts can be written, beside those of the step."""
        return np.zeros(len(inputs.drawing_rows), dtype=np.int32)

    def _continues(self, inputs: DraftInputs) -> bool:
        """Whether the step had no prompts: then the time of its drafts tells what the next ones will take."""
        num_tokens = inputs.num_tokens - inputs.num_computed_tokens
        return int(num_tokens.max()) <= 2 + self.num_speculative_tokens

    def _learn(self, slots: Int32Array, token_ids: Int32Array, num_tokens: Int32Array) -> None:
        """Compare the last drafts of these requests with the tokens that followed."""
        begins = self._num_tokens[slots]
        width = np.arange(self.num_speculative_tokens)
        positions = begins[:, None] + width
        places = np.minimum(positions, token_ids.shape[1] - 1)
        is_known = positions < num_tokens[:, None]
        is_known &= begins[:, None] > 0
        drafts = self._drawn[slots]
        compared = is_known & (drafts != NO_TOKEN)
        tokens = token_ids[slots[:, None], places]
        is_right = compared & (drafts == tokens)
        right = is_right.cumprod(axis=1).sum(axis=1)
        most = compared.sum(axis=1)
        self._acceptance.add_all(slots, right, np.minimum(right + 1, most))
        self._drawn[slots] = NO_TOKEN  # each draft is counted once, also if the next step proposes none

    def warm_up(self, inputs: AttentionInputs) -> None:
        """Compute tokens that belong to no request, at these places.

        Raises:
            CheckpointError: no draft can be drawn, because a weight is NaN or infinite.
        """
        num_tokens = int(inputs.query_start_loc[-1])
        zeros = self._device.to_device(np.zeros(num_tokens, dtype=np.int32))
        groups = [inputs] * len(self._builders)
        metadata = self._metadata(groups, num_tokens)
        hidden = self.model(ModelStep(zeros, zeros, metadata))
        logits = self.model.compute_logits(hidden)
        if not self._is_checked:  # in each pass, this would take time
            self._is_checked = True
            self._require_numbers(logits)

    def _require_numbers(self, computed: Tensor) -> None:
        """
        Raises:
            CheckpointError: a number of `computed` is NaN or infinite. (-inf is a token that cannot be proposed.)
        """
        if not bool((computed < torch.inf).all()):
            raise CheckpointError(
                f"speculative_config: what writes drafts computes NaN or infinite numbers, so its weights in "
                f"{self.config.folder} are damaged; take intact files, or leave speculative_config out"
            )

    def _forward(
        self,
        tokens: Int32Array,
        inputs: DraftInputs,
        rows: IntArray,
        starts: Int32Array,
        ends: Int32Array,
        last: IntArray,
        hidden: Tensor | None,
    ) -> Pass:
        """Compute `tokens` of `rows`, at the positions [starts, ends) of the cache. Returns what is behind the tokens `last`.
        `hidden`: [num_tokens, hidden_size], if the drafter reads it."""
        lengths = ends - starts
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_start_loc[1:])
        offsets = starts - query_start_loc[:-1]
        positions = np.arange(len(tokens), dtype=np.int32)
        positions += np.repeat(offsets, lengths)
        attention = [
            AttentionInputs(
                query_start_loc=query_start_loc, seq_lens=ends, num_computed_tokens=starts, block_table=table[rows]
            )
            for table in inputs.block_tables
        ]
        device = self._device
        vocab_size = self.config.architecture.vocab_size
        known = np.where(tokens < vocab_size, tokens, 0).astype(np.int32)
        step = ModelStep(
            device.to_device(known),
            device.to_device(positions.astype(np.int32)),
            self._metadata(attention, len(tokens)),
            device.to_device(last.astype(np.int64)),
            hidden=hidden if self.reads_hidden else None,
        )
        behind = self.model(step)[: len(last)]
        logits = self.model.compute_logits(behind)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
            return Pass(padded, behind)
        if missing < 0:
            logits = logits[:, : self._vocab_size].contiguous()
        return Pass(logits, behind)

    def _metadata(self, attention: Sequence[AttentionInputs], num_tokens: int) -> tuple[AttentionMetadata, ...]:
        return tuple(
            AttentionMetadata(num_tokens=num_tokens) if build is None else build(each)
            for build, each in zip(self._builders, attention, strict=True)
        )

    def _draw(self, logits: Tensor, sampling: SamplingRows, positions: IntArray, sampler: Sampler) -> Int32Array:
        """[n]: a token for each row; NO_TOKEN where none can be drawn."""
        drawn: Int32Array = sampler(logits, sampling.metadata(positions)).token_ids.cpu().numpy()
        if not self._has_warned and (drawn == NO_TOKEN).any():
            self._has_warned = True
            logger.warning(
                "speculative_config: the logits of %s are NaN or infinite for some tokens, so these get no drafts; a weight in "
                "its files may be damaged, or too large for %s",
                self.config.folder, self.config.dtype,
            )  # fmt: skip
        return drawn
