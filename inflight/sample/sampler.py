"""`Sampler`: draws one token from each row of logits.

The sampler works in these steps, and skips a step that no row needs:

    1. keep the raw logits of rows with logprobs; then masks, biases, bans, penalties    (processors.py)
    2. greedy rows: the exact argmax, the lowest id on a tie
    3. other rows: divide by the temperature, then draw from all tokens                  (draw.py)
       or from the tokens that pass min_p, top_k and top_p                               (candidates.py)
    4. logprobs of the drawn tokens, from the raw logits                                 (logprobs.py)
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.sample.candidates import draw_restricted
from inflight.sample.draw import draw_random, largest_of_rows
from inflight.sample.logprobs import LogprobsTensors
from inflight.sample.noise import token_hashes
from inflight.sample.processors import LogitsProcessors
from inflight.sample.rows import RandomRows, SamplingMetadata

IMPOSSIBLE_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """One token per row, still on the device.

    If all logits of a row are -inf at the draw (a grammar admits no token), or one is NaN or inf (a broken model), no token can
    be drawn. Then the row's token is IMPOSSIBLE_TOKEN (-1), and the request must fail. `logprobs` has only the rows in
    `logprobs_rows`.
    """

    token_ids: Tensor  # int32 [num_rows]
    logprobs: LogprobsTensors | None = None
    logprobs_rows: npt.NDArray[np.int32] | None = None  # [n]


class Sampler:
    """Draws one token per row. The sampler keeps only the hashes of the token ids (noise.py), so no call affects a later
    call."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self._hashes = token_hashes(vocab_size, torch.device(device))

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        processors: LogitsProcessors | None = None,
        history: Tensor | None = None,
    ) -> SamplerOutput:
        """Draw a token for each row.

        If a mask admits only one token, the row draws this token, because the other parameters cannot allow more tokens.
        allowed_token_ids is a second mask: only tokens that both masks admit are drawn.

        Args:
            logits: float32 [num_rows, vocab_size], contiguous; overwritten.
            history: see `LogitsProcessors.apply`; required if there are processors.
        """
        assert logits.shape == (metadata.num_rows, len(self._hashes)), (
            f"logits of shape {tuple(logits.shape)} for {metadata.num_rows} rows and {len(self._hashes)} tokens"
        )
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}"
        assert logits.is_contiguous()
        if processors is None or not len(logits):
            return SamplerOutput(token_ids=self._choose(logits, metadata))
        assert history is not None, "processors need the tokens before the draws"
        processors.apply(logits, history)
        token_ids = self._choose(logits, metadata)
        return SamplerOutput(
            token_ids=token_ids, logprobs=processors.logprobs(token_ids), logprobs_rows=processors.logprobs_rows
        )

    def _choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Choose a token for each row: int32 [num_rows]."""
        if not len(logits):
            return torch.empty(0, dtype=torch.int32, device=logits.device)
        if metadata.all_greedy:
            return possible(*largest_of_rows(logits))
        token_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        if metadata.greedy_rows is not None:
            token_ids[metadata.greedy_rows] = possible(*largest_of_rows(logits[metadata.greedy_rows]))
        if (random := metadata.random) is not None:
            drawn = possible(*draw_random(scaled_rows(logits, random), random.keys, self._hashes))
            token_ids[slice(None) if random.rows is None else random.rows] = drawn
        if (restricted := metadata.restricted) is not None:
            drawn = possible(*draw_restricted(scaled_rows(logits, restricted), restricted, self._hashes))
            token_ids[slice(None) if restricted.rows is None else restricted.rows] = drawn
        return token_ids


def scaled_rows(logits: Tensor, random: RandomRows) -> Tensor:
    """The logits of the rows of `random`, divided by their temperatures. If these are all rows, `logits` is overwritten."""
    rows = logits if random.rows is None else logits[random.rows]
    return rows if random.temperature is None else rows.div_(random.temperature)


def possible(tokens: Tensor, scores: Tensor) -> Tensor:
    """Returns `tokens` as int32, with IMPOSSIBLE_TOKEN where the score is infinite or NaN. On a CPU by numpy: after a forward
    pass nothing is in the caches, and a call of torch takes several times as long as one of numpy."""
    if tokens.device.type == "cpu":
        found = np.where(np.isfinite(scores.numpy()), tokens.numpy(), IMPOSSIBLE_TOKEN)
        return torch.from_numpy(found.astype(np.int32))
    return torch.where(scores.isfinite(), tokens, IMPOSSIBLE_TOKEN).to(torch.int32)
