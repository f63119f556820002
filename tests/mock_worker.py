"""A worker without a model: it checks every plan against a KV cache of token ids and draws tokens by a hash.

The "cache" holds, for every block and position, the digest of all tokens up to there. A row is right only if every
position it may see holds the digest of its own tokens: a block shared wrongly, reused too early or missed is an assertion.
The token drawn is a function of all tokens before it, so outputs depend on nothing but the prompt. A prompt's
log-probabilities are all 0.
"""

from __future__ import annotations

import zlib

import numpy as np

from inflight.interface.kv_cache import DUMMY_BLOCK, KVCacheConfig, KVCacheSpec
from inflight.interface.request import LogprobsColumns
from inflight.interface.step import KVConnectorOutput, ModelRunnerOutput, PromptLogprobs, SchedulerOutput
from inflight.interface.worker import WorkerBase
from inflight.worker.input_batch import InputBatch


def digests(token_ids: np.ndarray) -> list[int]:
    """`digests(t)[i]` stands for tokens `[0, i]`."""
    value, result = 0, []
    for token in token_ids.tolist():
        value = zlib.crc32(int(token).to_bytes(4, "little"), value)
        result.append(value)
    return result


def next_token(token_ids: np.ndarray, vocab_size: int) -> int:
    return zlib.crc32(b"next", digests(token_ids)[-1]) % vocab_size


def mock_generate(prompt: list[int], max_tokens: int, vocab_size: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """What the engine must return for a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(np.array(tokens), vocab_size))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class MockWorker(WorkerBase):
    """`windows` has one entry per layer; layers of one window form a KV group."""

    def __init__(
        self, *, vocab_size: int, block_size: int, max_num_seqs: int, max_model_len: int, windows: list[int | None]
    ) -> None:
        self._vocab_size = vocab_size
        self._windows = windows
        self._block_size = block_size
        self._sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "block_size": block_size}
        self.num_computed_tokens = 0  # in all, to see what a cache saved

    def load_model(self) -> None:
        pass

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {
            f"layers.{i}": KVCacheSpec(
                block_size=self._block_size,
                num_kv_heads=1,
                head_dim=1,
                dtype="float32",
                itemsize=4,
                sliding_window=window,
            )
            for i, window in enumerate(self._windows)
        }

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._config = kv_cache_config
        self._batch = InputBatch(num_groups=len(kv_cache_config.groups), **self._sizes)
        self._tokens: dict[int, list[int]] = {}  # slot -> its request's tokens, drawn ones included
        # one pool of ids serves all groups, so one array of contents does too
        self._cache = np.full((kv_cache_config.num_blocks, self._block_size), -1, dtype=np.int64)
        self._num_prompt_logprobs_done: list[int | None] = [None] * self._sizes["max_num_seqs"]  # by slot

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        plan, batch = scheduler_output, self._batch
        self.apply(plan)
        inputs = batch.step_inputs(plan)
        self.num_computed_tokens += plan.num_tokens
        for row, slot in enumerate(plan.slots.tolist()):
            start, end = int(plan.num_computed_tokens[row]), int(inputs.seq_lens[row])
            tokens = inputs.input_ids[inputs.query_start_loc[row] : inputs.query_start_loc[row + 1]].tolist()
            if inputs.query_start_loc[row + 1] - 1 in inputs.drawn_tokens:
                tokens[-1] = self._tokens[slot][-1]
            assert tokens == self._tokens[slot][start:end]
            self._write(slot, start, end)
        for row, slot in enumerate(plan.slots.tolist()):  # all writes come before all reads, as in a layer
            self._check(slot, int(plan.num_computed_tokens[row]), int(inputs.seq_lens[row]))
        slots = plan.slots[inputs.sampling_rows]
        sampled = [next_token(np.array(self._tokens[slot]), self._vocab_size) for slot in slots.tolist()]
        for slot, token in zip(slots.tolist(), sampled, strict=True):
            self._tokens[slot].append(token)
        token_ids = np.array(sampled, dtype=np.int32)
        return ModelRunnerOutput(
            step_id=plan.step_id,
            kv_connector_output=KVConnectorOutput(),
            sampled_token_ids=token_ids,
            prompt_logprobs=self._prompt_logprobs_of(plan),
        )

    def apply(self, plan: SchedulerOutput) -> None:
        """The first thing that a step does; a step that fails has come that far."""
        self._batch.apply(plan)
        for data in plan.new_requests:
            self._tokens[data.slot] = data.token_ids.tolist()
            wanted = data.sampling.params.prompt_logprobs is not None
            self._num_prompt_logprobs_done[data.slot] = data.num_prompt_logprobs_done if wanted else None

    def _prompt_logprobs_of(self, plan: SchedulerOutput) -> tuple[PromptLogprobs, ...]:
        pieces = []
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        for row, (slot, end) in enumerate(zip(plan.slots.tolist(), ends.tolist(), strict=True)):
            start = self._num_prompt_logprobs_done[slot]
            stop = min(end + 1, int(self._batch.num_prompt_tokens[slot]))
            if start is None or stop <= start:
                continue
            assert plan.num_computed_tokens[row] < start  # the hidden state before it is computed in this step
            self._num_prompt_logprobs_done[slot] = stop
            token_ids = self._batch.token_ids[slot, start:stop, None].copy()
            columns = LogprobsColumns(
                token_ids=token_ids,
                logprobs=np.zeros(token_ids.shape, dtype=np.float32),
                ranks=np.ones(len(token_ids), dtype=np.int32),
            )
            pieces.append(PromptLogprobs(row=row, start=start, columns=columns))
        return tuple(pieces)

    def execute_dummy_batch(self) -> None:
        self._cache[DUMMY_BLOCK] = -2

    def _write(self, slot: int, start: int, end: int) -> None:
        values = digests(np.array(self._tokens[slot][:end]))
        for table in self._batch.block_tables:
            for position in range(start, end):
                block_id = int(table[slot, position // self._block_size])
                assert block_id != DUMMY_BLOCK, (slot, position)
                self._cache[block_id, position % self._block_size] = values[position]

    def _check(self, slot: int, start: int, end: int) -> None:
        values = digests(np.array(self._tokens[slot][:end]))
        for group, table in zip(self._config.groups, self._batch.block_tables, strict=True):
            window = group.spec.sliding_window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                held = self._cache[int(table[slot, position // self._block_size]), position % self._block_size]
                assert held == values[position], (slot, position, group)
