"""Penalties of one step, from the tokens each row has: numpy over all rows at once, touching only tokens that occurred."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from inflight.interface.request import Int32Array
from inflight.sample.metadata import OutputPenalties, RepetitionPenalties, to_device

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


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
