"""`Sampler`: logits in, one token per row out.

Order, of which all but the first and the last step are skipped where no row needs them:

    1. logprobs rows: keep the raw logits
    2. rows under a grammar: what it does not admit is -inf                    (kernels/token_masks.py)
    3. allowed_token_ids, logit_bias, bad_words, min_tokens, penalties         (processors.py)
    4. greedy rows: the exact argmax, the lowest id on a tie
    5. others: divide by the temperature, then draw                            (draw.py)
       from what min_p, top_k, top_p leave                                     (candidates.py)
    6. logprobs of the tokens, from 1                                          (logprobs.py)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.kernels.token_masks import select_apply_token_masks
from inflight.sample.candidates import draw_restricted
from inflight.sample.draw import draw_random
from inflight.sample.logprobs import LogprobsTensors, gather_logprobs
from inflight.sample.metadata import GrammarMasks, RandomRows, SamplingMetadata
from inflight.sample.noise import token_hashes
from inflight.sample.processors import process_logits
from inflight.sample.reductions import argmax_rows

IMPOSSIBLE_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """One token per row, still on the device.

    `token_ids` holds IMPOSSIBLE_TOKEN (-1) in a row whose logits are all -inf, or NaN, when it comes to the draw: nothing could
    be drawn (a dead grammar, a broken model), and the request must fail. `logprobs` are of the rows `logprobs_rows`.
    """

    token_ids: Tensor  # int32 [num_rows]
    logprobs: LogprobsTensors | None = None
    logprobs_rows: npt.NDArray[np.int32] | None = None  # [n]


class Sampler:
    """Stateless but for the hashes of the vocabulary. `metadata` may come from any step."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._hashes = token_hashes(vocab_size, torch.device(device))
        self._apply_token_masks = select_apply_token_masks(torch.device(device))

    def __call__(self, logits: Tensor, metadata: SamplingMetadata, masks: GrammarMasks | None = None) -> SamplerOutput:
        """Draw a token for each row.

        Where a mask admits one token, the row draws it, whatever bias, penalties, bans, temperature, top_k, top_p and min_p
        are: they move it or forbid others. allowed_token_ids is a second wall: what one of the two does not admit is not drawn.

        Args:
            logits: float32 [num_rows, vocab_size], contiguous; overwritten.
        """
        assert logits.shape == (metadata.num_rows, len(self._hashes)), (
            f"logits {tuple(logits.shape)} do not fit the step"
        )
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        assert logits.is_contiguous()
        rows, raw = metadata.logprobs_rows, None
        if rows is not None:
            rows_tensor = torch.from_numpy(rows).to(logits.device, torch.int64)
            raw = logits[rows_tensor]
        if masks is not None:
            self._apply_token_masks(logits, masks.rows, masks.masks)
        token_ids = self._choose(logits, metadata)
        if raw is None:
            return SamplerOutput(token_ids=token_ids)
        logprobs = gather_logprobs(raw, token_ids[rows_tensor], metadata.num_logprobs)
        return SamplerOutput(token_ids=token_ids, logprobs=logprobs, logprobs_rows=rows)

    def _choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """int32 [num_rows]."""
        if not len(logits):
            return torch.empty(0, dtype=torch.int32, device=logits.device)
        process_logits(logits, metadata)
        if metadata.all_greedy:
            tokens = argmax_rows(logits)
            return possible(tokens, logits.gather(1, tokens[:, None])[:, 0])
        token_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if metadata.greedy_rows is not None:
            greedy = logits[metadata.greedy_rows]
            tokens = argmax_rows(greedy)
            token_ids[metadata.greedy_rows] = possible(tokens, greedy.gather(1, tokens[:, None])[:, 0])
        if (random := metadata.random) is not None:
            drawn = possible(*draw_random(scaled_rows(logits, random), random.keys, self._hashes))
            token_ids[slice(None) if random.rows is None else random.rows] = drawn
        if (restricted := metadata.restricted) is not None:
            drawn = possible(*draw_restricted(scaled_rows(logits, restricted), restricted, self._hashes))
            token_ids[slice(None) if restricted.rows is None else restricted.rows] = drawn
        return token_ids


def scaled_rows(logits: Tensor, random: RandomRows) -> Tensor:
    """The rows of `random`, divided by their temperatures; `logits` themselves, overwritten, where they are all rows."""
    rows = logits if random.rows is None else logits[random.rows]
    return rows if random.temperature is None else rows.div_(random.temperature)


def possible(tokens: Tensor, scores: Tensor) -> Tensor:
    """`tokens` as int32, IMPOSSIBLE_TOKEN where the score says that none was possible."""
    return torch.where(scores > -torch.inf, tokens, IMPOSSIBLE_TOKEN).to(torch.int32)
