"""Log-probabilities of drawn tokens and of prompt tokens, from the raw logits (before masks, penalties and temperature)."""

from typing import NamedTuple

import torch
from torch import Tensor

from inflight.interface.request import LogprobsColumns
from inflight.sample.reductions import row_chunks, softmax_mass, top_tokens


class LogprobsTensors(NamedTuple):
    """The data of `LogprobsColumns` while it is still on the device."""

    token_ids: Tensor  # int32 [n, 1 + k]
    logprobs: Tensor  # float32 [n, 1 + k]
    ranks: Tensor  # int32 [n]

    def to_columns(self) -> LogprobsColumns:
        """Wait for the device, and copy the data to the host."""
        return LogprobsColumns(
            token_ids=self.token_ids.cpu().numpy(), logprobs=self.logprobs.cpu().numpy(), ranks=self.ranks.cpu().numpy()
        )


def gather_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobsTensors:
    """Compute the log-probabilities of `token_ids` (column 0) and of the k most probable tokens (columns 1 to k).

    The k tokens are ordered by falling probability, then rising id. A token's rank is 1 + the number of tokens with a larger
    logit.

    Args:
        logits: float32 [n, vocab_size], raw; not modified.
        token_ids: integers [n]; a token outside the vocabulary (IMPOSSIBLE_TOKEN) gets NaN and rank 1.
        k: 0 or more; if it exceeds the vocabulary's size, that size is used.
    """
    given = token_ids.to(torch.int64)[:, None]
    known = (given >= 0) & (given < logits.shape[1])
    own = logits.gather(1, torch.where(known, given, 0)).masked_fill_(~known, torch.nan)
    normaliser = logits.amax(dim=1, keepdim=True) + softmax_mass(logits).log_()
    ranks = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    for rows in row_chunks(logits):
        chunk = logits[rows]
        greater = torch.gt(chunk, own[rows], out=torch.empty_like(chunk))  # floats sum four times as fast as booleans
        ranks[rows] = 1 + greater.sum(dim=1, dtype=torch.float32).to(torch.int32)
    values, ids = own, given
    if k > 0:
        top_values, top_ids = top_tokens(logits, min(k, logits.shape[1]))
        values = torch.cat([own, top_values], dim=1)
        ids = torch.cat([given, top_ids], dim=1)
    return LogprobsTensors(token_ids=ids.to(torch.int32), logprobs=values - normaliser, ranks=ranks)
