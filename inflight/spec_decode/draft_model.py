"""`DraftModel`: a small model writes the next tokens, and the served model verifies them.

    served model   computes the tokens [s, e) of a request, and draws the tokens [e, n)
    draft model    computes the tokens [c, n), where c is how many it has computed before, and draws draft 0 behind them
                   computes draft 0, and draws draft 1; and so on

A request that gets no drafts is left out. When it gets some again, the draft model first computes all tokens that it has left
out, in several steps if there are many. If drafts may pay in a batch of this size, some time is also spent on requests without
drafts: when a block of their tokens is full, it is computed, and shows how many drafts would have been right. In a larger batch
the draft model computes nothing, prompts included.

Other requests may find a block in the prefix cache that the draft model has left out (`_has_keys`). They compute it themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.attention.backend import AttentionBackend
from inflight.config.engine import EngineConfig
from inflight.device.base import Device
from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig
from inflight.interface.request import Int32Array
from inflight.interface.step import NewRequestData
from inflight.models.causal_lm import CausalLM
from inflight.sample.sampler import Sampler
from inflight.spec_decode.model_drafter import NOTHING, DraftInputs, IntArray, ModelDrafter, Pass

# of a slot whose request is new: its tokens that are in the KV cache were computed by a step of another request
_NEW = -1


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
        first: Int32Array,
    ) -> "_Checks":
        """`behind`: of each row, the index of the token behind its last one. `first`: of each row, the first position that is
        compared, if it is computed."""
        found: list[tuple[int, int, int, int]] = []
        for place in places:
            row = int(inputs.drawing_rows[place])
            begin = max(int(starts[row]) + 1, int(first[row]))
            end = int(ends[row])
            slot = int(inputs.slots[row])
            for position in range(begin, end):
                token = int(inputs.token_ids[slot, position])
                index = int(behind[row]) - end + position - 1
                found.append((place, position, token, index))
        columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
        return cls(*columns)


class DraftModel(ModelDrafter):
    """Its arguments are those of `ModelDrafter`."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, *, backend: AttentionBackend, device: Device, share_of_step: float
    ) -> None:
        super().__init__(model, config, backend=backend, device=device, share_of_step=share_of_step)
        self._block_size = config.cache.block_size
        # of each slot: how many tokens are in the cache
        self._num_cached: Int32Array = np.zeros(config.scheduler.max_num_seqs, dtype=np.int32)
        self._num_prompt_tokens = np.zeros_like(self._num_cached)  # of each slot
        # of each block: False if the served model has computed it, and the draft model has not
        self._has_keys: npt.NDArray[np.bool_] = np.ones(0, dtype=np.bool_)

    def initialize(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize(kv_cache_config)
        self._has_keys = np.ones(kv_cache_config.num_blocks, dtype=np.bool_)

    def begin(self, requests: Sequence[NewRequestData]) -> None:
        super().begin(requests)
        for data in requests:
            self._num_cached[data.slot] = _NEW
            self._num_prompt_tokens[data.slot] = data.num_prompt_tokens

    def _num_behind(self, inputs: DraftInputs) -> IntArray:
        rows = inputs.drawing_rows
        cached = self._num_cached[inputs.slots[rows]]
        computed = inputs.num_computed_tokens[rows]
        # If drafts cannot pay in such a batch, the draft model leaves out the prompts, too.
        is_left_out = not self.choice.may_pay(len(inputs.slots))
        of_step = inputs.num_tokens[rows] - computed if is_left_out else 0
        behind: Int32Array = np.where(cached == _NEW, of_step, computed - cached)
        return behind.clip(min=0)

    def _compute_step(self, inputs: DraftInputs, counts: Int32Array, sampler: Sampler) -> tuple[IntArray, Pass]:
        is_new = self._num_cached[inputs.slots] == _NEW
        starts, ends = self._spans(inputs, counts)
        rows = np.flatnonzero(starts < ends)
        if not len(rows):
            return rows, NOTHING
        slots = inputs.slots[rows]
        spans = zip(slots, starts[rows], ends[rows], strict=True)
        parts = [inputs.token_ids[slot, start:end] for slot, start, end in spans]
        tokens = np.concatenate(parts)
        behind = np.zeros(len(inputs.slots), dtype=np.int64)  # the index of the token behind each row's last one
        lengths = ends - starts
        behind[rows] = np.cumsum(lengths[rows])
        places = np.flatnonzero(counts > 0)  # in `drawing_rows`
        is_known = ~is_new[inputs.drawing_rows]
        unproposed = np.flatnonzero((counts == 0) & is_known)
        answer = self._num_prompt_tokens[inputs.slots]
        first = np.maximum(ends - self._block_size, answer)
        checked = _Checks.of(unproposed.tolist(), inputs, starts, ends, behind, first)
        wanted = inputs.drawing_rows[places]
        last = np.concatenate([behind[wanted] - 1, checked.indices])
        passed = self._forward(tokens, inputs, rows, starts[rows], ends[rows], last, None)
        if len(checked.indices):
            sampling = inputs.sampling.take(checked.places)
            logits = passed.logits[len(places) :]
            right = self._draw(logits, sampling, checked.positions, sampler)
            checked_slots = inputs.slots[inputs.drawing_rows[checked.places]]
            once = np.ones(len(right), dtype=np.int64)
            self._acceptance.add_all(checked_slots, right == checked.tokens, once)
            passed = passed.take(np.arange(len(places)))
        return places, passed

    def _spans(self, inputs: DraftInputs, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Which tokens [start, end) of each row are computed now. A row that has too many of them is not finished: its count
        becomes 0."""
        known = np.minimum(inputs.num_tokens, self.config.max_model_len)
        starts = self._starts(inputs, known)
        self._forget_blocks(inputs)
        is_wanted = self._wanted(inputs, counts, starts, known)
        ends = np.where(is_wanted, known, starts)
        self._limit(starts, ends, inputs.num_computed_tokens)
        is_unfinished = ends < known
        counts[is_unfinished[inputs.drawing_rows]] = 0
        self._num_cached[inputs.slots] = ends
        firsts = starts // self._block_size
        last = ends // self._block_size
        self._mark(inputs, firsts, last, True)
        return starts, ends

    def _starts(self, inputs: DraftInputs, known: Int32Array) -> Int32Array:
        """[num_rows]: how many tokens of each row are in the cache."""
        cached = self._num_cached[inputs.slots]
        # Of a request that goes on, the last token before the step has been computed as soon as it was drawn.
        sure = inputs.num_computed_tokens + 1
        starts = np.minimum(cached, sure)
        for row in np.flatnonzero(cached == _NEW).tolist():
            starts[row] = self._num_found(inputs, row)
        return np.minimum(starts, known)

    def _wanted(
        self, inputs: DraftInputs, counts: Int32Array, starts: Int32Array, known: Int32Array
    ) -> npt.NDArray[np.bool_]:
        """[num_rows]: which rows are computed. Call it before their numbers of cached tokens change."""
        num_rows = len(known)
        is_wanted = np.full(num_rows, self.choice.may_pay(num_rows))
        waits = np.zeros(num_rows, dtype=np.bool_)
        waits[inputs.drawing_rows] = counts == 0
        waits &= self._num_cached[inputs.slots] != _NEW
        waits &= is_wanted
        for row in np.flatnonzero(waits).tolist():
            first = int(starts[row])
            end = int(known[row])
            is_full = first // self._block_size < end // self._block_size
            is_wanted[row] = is_full and self.choice.spend_on(end - first)
        is_wanted[inputs.drawing_rows[counts > 0]] = True
        return is_wanted

    def _limit(self, starts: Int32Array, ends: Int32Array, computed: Int32Array) -> None:
        """Tokens of earlier steps, which were left out, are computed a few at a time, so that no step gets much longer."""
        is_behind = starts < computed
        is_behind &= starts < ends
        if not is_behind.any():
            return
        room = self.choice.num_tokens_behind(len(starts))
        for row in np.flatnonzero(is_behind).tolist():
            num_behind = int(computed[row] - starts[row])
            if num_behind > room:
                ends[row] = starts[row] + room
            room = max(0, room - num_behind)

    def _num_found(self, inputs: DraftInputs, row: int) -> int:
        """How many tokens of a new request are in the cache, computed for another one."""
        computed = int(inputs.num_computed_tokens[row])
        blocks = -(-computed // self._block_size)
        has_keys = np.ones(blocks, dtype=np.bool_)
        for table in self._tables(inputs):
            found = table[row, :blocks]
            has_keys &= self._has_keys[found]
        if has_keys.all():
            return computed
        first_without = int(has_keys.argmin())
        return first_without * self._block_size

    def _forget_blocks(self, inputs: DraftInputs) -> None:
        """The served model has begun new blocks in this step."""
        firsts = -(-inputs.num_computed_tokens // self._block_size)
        ends = -(-inputs.num_tokens // self._block_size)
        self._mark(inputs, firsts, ends, False)

    def _mark(self, inputs: DraftInputs, firsts: Int32Array, ends: Int32Array, has_keys: bool) -> None:
        """The blocks [first, end) of each row have, or lack, the draft model's keys."""
        rows = np.flatnonzero(firsts < ends)
        for row in rows.tolist():
            first = int(firsts[row])
            end = int(ends[row])
            for table in self._tables(inputs):
                blocks = table[row, first:end]
                self._has_keys[blocks] = has_keys
        self._has_keys[DUMMY_BLOCK] = True

    def _tables(self, inputs: DraftInputs) -> list[Int32Array]:
        """The block tables of the groups that the draft model is in."""
        found = list[Int32Array]()
        for table, builder in zip(inputs.block_tables, self._builders, strict=True):
            if builder is not None:
                found.append(table)
        return found
