"""Draft verification: which of a step's draws are emitted (become output).

A step computes a request's last known token and the d drafts after this token. After each of these tokens the step draws one:
d + 1 draws. Each draw is made from the target model's logits, with the request's parameters, history and mask at that position,
and with the noise of (seed, position), as in a run without drafts.

    input     last    draft 0   draft 1   draft 2
    draw      draw 0  draw 1    draw 2    draw 3       draw 0 == draft 0, draw 1 == draft 1, draw 2 != draft 2:
              ^^^^^^^^^^^^^^^^^^^^^^^^^^               draws 0, 1 and 2 are emitted

Draw j is right (equal to the draw of a run without drafts) if all tokens before it are right. So draw 0 is right, because the
last known token is. If draw 0 equals draft 0, draw 1 was made after the right token, so draw 1 is right, too. By induction all
draws are right up to and including the first draw that differs from its draft, whatever the drafts are. So a run without drafts
emits the same tokens, not only tokens of the same distribution. On average, this rule accepts as many drafts as speculative
sampling (arXiv:2211.17192) with a deterministic proposer. Speculative sampling accepts a draft with the probability that the
target model gives to the draft. A draw from the target model equals the draft with the same probability.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.interface.request import Int32Array

Int64Array = npt.NDArray[np.int64]


def num_emitted(sampled: Tensor, draft_token_ids: Tensor, query_start_loc: Int32Array) -> Tensor:
    """How many of each request's draws are emitted: 1 + the number of its leading drafts that equal their draws.

    Does not wait for the device.

    Args:
        sampled: int32 [num_draws]; IMPOSSIBLE_TOKEN (-1) equals no draft, so no draw after it is emitted.
        draft_token_ids: int32 [n, k]. A request with d + 1 draws has d drafts, which are the first d in its row; d <= k.
        query_start_loc: [n + 1]. Request i has the draws [query_start_loc[i], query_start_loc[i + 1]), at least one.

    Returns:
        int64 [n], each in [1, d + 1].
    """
    starts = query_start_loc[:-1, None].astype(np.int64)
    num_drafts = np.diff(query_start_loc)[:, None] - 1
    num_requests, k = draft_token_ids.shape
    assert len(query_start_loc) == num_requests + 1 and query_start_loc[-1] == len(sampled)
    assert not num_requests or (num_drafts.min() >= 0 and num_drafts.max() <= k), "each request has 1 to k + 1 draws"
    columns = np.arange(k)
    counts = columns < num_drafts  # [n, k]
    rows = torch.from_numpy(np.where(counts, starts + columns, 0)).to(sampled.device, non_blocking=True)
    draws = sampled[rows]
    equal = (draws == draft_token_ids) & (draws >= 0) & torch.from_numpy(counts).to(sampled.device, non_blocking=True)
    return 1 + equal.cumprod(dim=1).sum(dim=1)


def emitted_rows(num_emitted: Int64Array, query_start_loc: Int32Array) -> Int64Array:
    """The indices of the emitted draws in ascending order: the first `num_emitted[i]` draws of each request i.

    Args:
        num_emitted: [n], on the host.
        query_start_loc: [n + 1].
    """
    num_rows = np.diff(query_start_loc)
    offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], num_rows)
    return np.flatnonzero(offsets < np.repeat(num_emitted, num_rows))
