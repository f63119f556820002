"""What a draw takes from the tokens before it: penalties and bad words. Numpy over all rows, touching only what occurred.

The last of those tokens may still be on its way when a step is prepared. So it is in two parts: `HistoryRows` is made with the
rest of the step's metadata, and `add_to` is called when the tokens are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from inflight.interface.request import Int32Array
from inflight.sample.metadata import OutputPenalties, RepetitionPenalties, SamplingMetadata, to_device
from inflight.sample.token_lists import TokenLists, bad_word_bans

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRows:
    """The sampling rows of one step that look at the tokens before the draw; a snapshot, apart from these tokens.

    `repetition`, `output` and `bad_words` are indices into the step's sampling rows; the columns behind them are aligned.
    """

    vocab_size: int
    slots: Int32Array  # [num_rows]
    num_prompt_tokens: Int64Array  # [num_rows]
    num_tokens: Int64Array  # [num_rows], how many tokens (prompt and output) come before the draw
    repetition: Int64Array
    repetition_penalty: Float32Array
    output: Int64Array
    frequency: Float32Array
    presence: Float32Array
    bad_words: Int64Array
    lists: Sequence[TokenLists]

    def add_to(self, metadata: SamplingMetadata, token_ids: Int32Array, device: torch.device) -> SamplingMetadata:
        """`metadata` with these rows' entries. token_ids [max_num_seqs, max_model_len], row = slot; the tokens before each draw
        are known."""
        return replace(
            metadata,
            bad_words=bad_word_bans(
                self.bad_words, self.lists, self._spans(token_ids, self.bad_words), self.vocab_size, device
            )
            if len(self.bad_words)
            else None,
            repetition=repetition_penalties(
                self.repetition,
                self._spans(token_ids, self.repetition),
                self.repetition_penalty,
                self.vocab_size,
                device,
            )
            if len(self.repetition)
            else None,
            output_penalties=output_penalties(
                self.output,
                self._spans(token_ids, self.output, self.num_prompt_tokens),
                self.frequency,
                self.presence,
                self.vocab_size,
                device,
            )
            if len(self.output)
            else None,
        )

    def _spans(self, token_ids: Int32Array, rows: Int64Array, starts: Int64Array | None = None) -> list[Int32Array]:
        """The tokens of each row before its draw, from `starts` on, as views."""
        firsts = np.zeros_like(rows) if starts is None else starts[rows]
        return [
            token_ids[slot, start:stop]
            for slot, start, stop in zip(
                self.slots[rows].tolist(), firsts.tolist(), self.num_tokens[rows].tolist(), strict=True
            )
        ]


def repetition_penalties(
    rows: Int64Array,
    histories: list[Int32Array],
    penalties: Float32Array,
    vocab_size: int,
    device: torch.device,
) -> RepetitionPenalties:
    """Entries for every token of `histories` (prompt and output).

    Args:
        rows: [n], the rows with a repetition penalty.
        histories: n arrays of token ids.
        penalties: [n].
    """
    lengths = [len(history) for history in histories]
    entries = np.repeat(rows * vocab_size, lengths) + np.concatenate(histories)
    return RepetitionPenalties(
        entries=to_device(entries, device), penalties=to_device(np.repeat(penalties, lengths), device)
    )


def output_penalties(
    rows: Int64Array,
    outputs: list[Int32Array],
    frequency: Float32Array,
    presence: Float32Array,
    vocab_size: int,
    device: torch.device,
) -> OutputPenalties | None:
    """Entries for the distinct tokens of `outputs`: count * frequency + presence. None while nothing was emitted.

    Args:
        rows: [n], the rows with such a penalty.
        outputs: n arrays of token ids, without the prompt.
        frequency, presence: [n].
    """
    lengths = np.array([len(output) for output in outputs], dtype=np.int64)
    if not lengths.any():
        return None
    owners = np.arange(len(rows), dtype=np.int64)
    entries = np.repeat(owners * vocab_size, lengths) + np.concatenate(outputs)
    entries, counts = np.unique(entries, return_counts=True)
    owner = entries // vocab_size
    penalties = counts.astype(np.float32) * frequency[owner] + presence[owner]
    entries += (rows - owners)[owner] * vocab_size
    return OutputPenalties(entries=to_device(entries, device), penalties=to_device(penalties, device))
