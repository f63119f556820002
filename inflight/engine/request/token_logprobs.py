"""`logprobs_dicts`: log-probabilities as callers get them."""

import numpy as np

from inflight.interface.request import LogprobsColumns
from inflight.outputs import Logprob
from inflight.tokenizer.tokenizer import Tokenizer


def logprobs_dicts(columns: LogprobsColumns, k: int, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    """Returns a dict for each position: first the token itself, then the other tokens among the k most probable ones."""
    token_ids = columns.token_ids[:, : k + 1]
    known = [] if tokenizer is None else np.unique(token_ids).tolist()
    texts = {token_id: tokenizer.decode_token(token_id) for token_id in known} if tokenizer is not None else {}
    ranks = range(token_ids.shape[1])  # the ranks of columns 1 to k
    rows = []
    for ids, values, rank in zip(
        token_ids.tolist(), columns.logprobs[:, : k + 1].tolist(), columns.ranks.tolist(), strict=True
    ):
        row = dict(zip(ids, map(Logprob, values, ranks, map(texts.get, ids)), strict=True))
        row[ids[0]] = Logprob(values[0], rank, texts.get(ids[0]))
        rows.append(row)
    return rows
