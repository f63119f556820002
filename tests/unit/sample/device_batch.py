"""The rows of `batch.py`, drawn by the GPU's kernels, and what may excuse a token that is not the CPU's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.sample.device_sampler import DeviceSampler
from inflight.sample.noise import log_exponential, noise_words, token_hashes
from inflight.sample.seeds import draw_keys
from tests.unit.sample.batch import Row, tokens_of

CLOSE = 1e-5
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU, Triton's interpreter


def columns_of(rows: Sequence[Row], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Columns with the rows in slots from the last but one down, a dummy slot of zeros behind them; and the rows' slots."""
    columns = torch.zeros(DeviceSampler.NUM_COLUMNS, len(rows) + 2, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(len(rows), 0, -1, dtype=torch.int32, device=DEVICE)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        columns[:, slot] = torch.from_numpy(DeviceSampler.parameters(row.resolved, vocab_size)).to(DEVICE)
    return columns, slots


def positions_of(rows: Sequence[Row]) -> Tensor:
    return torch.tensor(
        [len(row.prompt) + len(row.output) if row.position is None else row.position for row in rows], dtype=torch.int32
    )


def device_tokens_of(
    logits: Tensor, rows: Sequence[Row], block_size: int = 64, group_size: int = 8, search_block_size: int = 256
) -> list[int]:
    vocab_size, logits = logits.shape[1], logits.to(DEVICE)
    sampler = DeviceSampler(
        vocab_size,
        len(rows) + 1,
        DEVICE,
        block_size=block_size,
        group_size=group_size,
        search_block_size=search_block_size,
    )
    columns, slots = columns_of(rows, vocab_size)
    tokens = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    before = logits.clone()
    with np.errstate(all="ignore"):  # the interpreter also computes what is then not selected
        sampler.draw(logits, columns, slots, positions_of(rows).to(DEVICE), tokens)
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    return tokens.tolist()


def assert_same_tokens(logits: Tensor, rows: Sequence[Row], **sizes: int) -> int:
    """The GPU's tokens are the CPU's, but where rounding may decide; how many are not."""
    num_different = 0
    for i, (drawn, expected) in enumerate(
        zip(device_tokens_of(logits, rows, **sizes), tokens_of(logits, rows), strict=True)
    ):
        if drawn != expected:
            assert drawn >= 0 and expected >= 0, f"row {i}, {rows[i]}: {drawn}, not {expected}"
            assert is_close_call(logits[i], rows[i], drawn, expected), f"row {i}, {rows[i]}: {drawn}, not {expected}"
            num_different += 1
    return num_different


def is_close_call(logits: Tensor, row: Row, drawn: int, expected: int) -> bool:
    """Whether the scores of two tokens are all but equal, or one is all but at the end of what top_p keeps."""
    params = row.params
    if params.greedy:
        return False
    scaled = (logits / max(params.temperature, 1e-20)).double()
    keys = torch.from_numpy(draw_keys(np.array([row.seed], dtype=np.uint64), positions_of([row]).numpy()))
    scores = scaled - log_exponential(noise_words(token_hashes(len(logits), CPU), keys))[0]
    if abs(scores[drawn] - scores[expected]) <= CLOSE * max(1.0, abs(float(scores[expected]))):
        return True
    order = torch.sort(scaled, descending=True, stable=True).indices
    weights = (scaled[order] - scaled[order[0]]).exp()
    kept = weights >= params.min_p * (1 - CLOSE)
    if 0 < params.top_k < len(logits):
        kept &= scaled[order] >= scaled[order[params.top_k - 1]]
    weights = torch.where(kept, weights, 0.0)
    before = weights.cumsum(0) - weights
    share = params.top_p * weights.sum()
    places = {token: place for place, token in enumerate(order.tolist())}
    return any(abs(before[places[token]] - share) <= CLOSE * share for token in (drawn, expected))
