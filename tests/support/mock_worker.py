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
from inflight.interface.parts import PartResult
from inflight.interface.prompt_logprobs import PromptLogprobsPart, PromptLogprobsResult
from inflight.interface.request import LogprobsColumns
from inflight.interface.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from inflight.interface.worker import WorkerBase
from inflight.worker.input_batch import InputBatch
from tests.support.toy_grammar import EOS, allowed_tokens


def digests(token_ids: np.ndarray) -> list[int]:
    """`digests(t)[i]` stands for tokens `[0, i]`."""
    value, result = 0, []
    for token in token_ids.tolist():
        value = zlib.crc32(int(token).to_bytes(4, "little"), value)
        result.append(value)
    return result


def next_token(token_ids: np.ndarray, vocab_size: int) -> int:
    return zlib.crc32(b"next", digests(token_ids)[-1]) % vocab_size


def choose(token_ids: np.ndarray, allowed: list[int]) -> int:
    """As `next_token`, of these only; -1 if there are none."""
    return allowed[zlib.crc32(b"next", digests(token_ids)[-1]) % len(allowed)] if allowed else -1


def mock_generate(
    prompt: list[int],
    max_tokens: int,
    vocab_size: int,
    stop: frozenset[int] = frozenset(),
    grammar_seed: int | None = None,
) -> list[int]:
    """What the engine must return for a prompt. A dead end of a grammar ends it, as a failure."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        if grammar_seed is None:
            tokens.append(next_token(np.array(tokens), vocab_size))
        else:
            allowed = allowed_tokens(grammar_seed, tokens[len(prompt) :], vocab_size)
            if not allowed:
                break
            tokens.append(choose(np.array(tokens), allowed))
            if tokens[-1] == EOS:
                break
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def mock_drafts(token_ids: list[int], num_drafts: int, vocab_size: int) -> list[int]:
    """Some right, some wrong, sometimes fewer. They know of no grammar."""
    value = digests(np.array(token_ids))[-1]
    tokens = list(token_ids)
    for i in range(value % (num_drafts + 1)):
        right = next_token(np.array(tokens), vocab_size)
        tokens.append(right if (value >> (4 + i)) % 4 else (right + 1) % vocab_size)
    return tokens[len(token_ids) :]


class MockWorker(WorkerBase):
    """`windows` has one entry per layer; layers of one window form a KV group."""

    def __init__(
        self,
        *,
        vocab_size: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        windows: list[int | None],
        num_speculative_tokens: int = 0,
    ) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._masks: dict[int, tuple[GrammarOutput, np.ndarray]] = {}  # by step
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
        self._drafts: dict[int, list[int]] = {}  # slot -> what has been proposed behind them
        # one pool of ids serves all groups, so one array of contents does too
        self._cache = np.full((kv_cache_config.num_blocks, self._block_size), -1, dtype=np.int64)
        self._num_prompt_logprobs_done: list[int | None] = [None] * self._sizes["max_num_seqs"]  # by slot

    def provide_grammar_output(self, step_id: int, grammar_output: GrammarOutput) -> None:
        assert step_id not in self._masks, "one for each step"
        # the buffer is the manager's, and must not be used for another step before this one has been drawn
        self._masks[step_id] = grammar_output, grammar_output.masks.copy()

    def has_masks(self, plan: SchedulerOutput) -> bool:
        return plan.step_id in self._masks

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        plan = scheduler_output
        self.apply(plan)
        spans = self._spans(plan)
        self._check_inputs(plan, spans)
        self.num_computed_tokens += sum(len(tokens) for _, _, tokens in spans)
        for slot, start, tokens in spans:
            self._write(slot, start, tokens)
        for slot, start, tokens in spans:  # all writes come before all reads, as in a layer
            self._check(slot, start, tokens)
        sampled: list[list[int]] = []
        positions: list[int] = []
        drafts: list[list[int]] = []
        masks = self._masks_of(plan)
        for row in plan.samples.nonzero()[0].tolist():
            slot, start, tokens = spans[row]
            first = start if self._is_relative(plan, row) else start + len(tokens) - 1
            drawn = self._draw(slot, first, tokens[first - start :], masks.get(row))
            known = self._tokens[slot][: first + 1]
            self._tokens[slot] = [*known, *[max(token, 0) for token in drawn]]
            sampled.append(drawn)
            positions.append(first + 1)
            self._drafts[slot] = mock_drafts(self._tokens[slot], self._num_speculative_tokens, self._vocab_size)
            drafts.append(self._drafts[slot])
        k = self._num_speculative_tokens
        padded = [found + [-1] * (k - len(found)) for found in drafts]
        return ModelRunnerOutput(
            step_id=plan.step_id,
            sampled_token_ids=np.array([token for drawn in sampled for token in drawn], dtype=np.int32),
            num_sampled_tokens=np.array([len(drawn) for drawn in sampled] if k else [], dtype=np.int32),
            sampled_positions=np.array(positions if k else [], dtype=np.int32),
            parts=self._prompt_logprobs_of(plan),
            draft_token_ids=np.array(padded if k else [], dtype=np.int32),
        )

    def apply(self, plan: SchedulerOutput) -> None:
        """The first thing that a step does; a step that fails has come that far."""
        self._batch.apply(plan)
        for data in plan.new_requests:
            self._tokens[data.slot] = data.token_ids.tolist()
            self._drafts[data.slot] = []
            done = [part.num_done for part in data.parts if isinstance(part, PromptLogprobsPart)]
            self._num_prompt_logprobs_done[data.slot] = done[0] if done else None
        if (forced := plan.forced_tokens) is not None:
            entries = zip(forced.slots.tolist(), forced.positions.tolist(), forced.token_ids.tolist(), strict=True)
            for slot, position, token in entries:
                assert position <= len(self._tokens[slot])
                del self._tokens[slot][position:]
                self._tokens[slot].append(token)

    def _is_relative(self, plan: SchedulerOutput, row: int) -> bool:
        return bool(plan.max_draft_tokens.size) and int(plan.max_draft_tokens[row]) >= 0

    def _spans(self, plan: SchedulerOutput) -> list[tuple[int, int, list[int]]]:
        """For each row: slot, position of the first token that it computes, the tokens."""
        spans = []
        for row, slot in enumerate(plan.slots.tolist()):
            start, count = int(plan.num_computed_tokens[row]), int(plan.num_scheduled_tokens[row])
            known = self._tokens[slot]
            if self._is_relative(plan, row):
                most = int(plan.max_draft_tokens[row])
                assert plan.samples[row] and count == 1 + most
                assert len(known) - 1 <= start, "an upper bound"
                spans.append((slot, len(known) - 1, known[-1:] + self._drafts[slot][:most]))
            else:
                assert start + count <= len(known)
                spans.append((slot, start, known[start : start + count]))
        return spans

    def _check_inputs(self, plan: SchedulerOutput, spans: list[tuple[int, int, list[int]]]) -> None:
        """What an `InputBatch` makes of a plan of exact rows."""
        if plan.max_draft_tokens.size:
            return
        inputs = self._batch.step_inputs(plan)
        for row, (_, start, tokens) in enumerate(spans):
            seen = inputs.input_ids[inputs.query_start_loc[row] : inputs.query_start_loc[row + 1]].tolist()
            if inputs.query_start_loc[row + 1] - 1 in inputs.drawn_tokens:
                seen[-1] = tokens[-1]
            assert (seen, int(inputs.seq_lens[row])) == (tokens, start + len(tokens))

    def _masks_of(self, plan: SchedulerOutput) -> dict[int, list[list[int]]]:
        """Plan row -> for each of its draws the tokens that are allowed."""
        if not len(plan.grammar_rows):
            return {}
        given, sent = self._masks.pop(plan.step_id)
        assert np.array_equal(given.masks, sent), "overwritten"
        if not len(given.rows):
            return {}  # the step is void
        assert given.rows.tolist() == plan.grammar_rows.tolist() and len(given.masks) == given.num_masks.sum()
        bits = np.unpackbits(given.masks.view(np.uint8), axis=1, bitorder="little")[:, : self._vocab_size]
        allowed = [np.flatnonzero(row).tolist() for row in bits]
        ends = np.cumsum(given.num_masks).tolist()
        return {
            row: allowed[end - count : end]
            for row, end, count in zip(given.rows.tolist(), ends, given.num_masks.tolist(), strict=True)
        }

    def _draw(self, slot: int, first: int, tokens: list[int], masks: list[list[int]] | None) -> list[int]:
        """Draws behind `tokens[0]`, which stands at `first`, and behind each of the drafts after it while they are right."""
        assert masks is None or len(masks) == len(tokens)
        drawn: list[int] = []
        for i in range(len(tokens)):
            known = np.array(self._tokens[slot][: first + 1] + drawn)
            drawn.append(next_token(known, self._vocab_size) if masks is None else choose(known, masks[i]))
            if i + 1 < len(tokens) and tokens[i + 1] != drawn[-1]:
                break
        return drawn

    def _prompt_logprobs_of(self, plan: SchedulerOutput) -> tuple[tuple[int, PartResult], ...]:
        pieces: list[tuple[int, PartResult]] = []
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
            pieces.append((row, PromptLogprobsResult(start=start, columns=columns)))
        return tuple(pieces)

    def execute_dummy_batch(self) -> None:
        self._cache[DUMMY_BLOCK] = -2

    def _write(self, slot: int, start: int, tokens: list[int]) -> None:
        values = digests(np.array(self._tokens[slot][:start] + tokens))
        for table in self._batch.block_tables:
            for position in range(start, start + len(tokens)):
                block_id = int(table[slot, position // self._block_size])
                assert block_id != DUMMY_BLOCK, (slot, position)
                self._cache[block_id, position % self._block_size] = values[position]

    def _check(self, slot: int, start: int, tokens: list[int]) -> None:
        values = digests(np.array(self._tokens[slot][:start] + tokens))
        for group, table in zip(self._config.groups, self._batch.block_tables, strict=True):
            window = group.spec.sliding_window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, start + len(tokens)):
                held = self._cache[int(table[slot, position // self._block_size]), position % self._block_size]
                assert held == values[position], (slot, position, group)
