"""The parameters of a slot that are lists of tokens: allowed, biased, bad words, stop ids; and their entries in a step.

Built once, when a request takes its slot. A step loops over the rows that have such a list and over nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.sample.metadata import AllowedTokens, Bans, LogitBias, to_device

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLists:
    """A request's lists, without ids beyond the vocabulary: those are never drawn anyway."""

    allowed: Tensor | None  # int64, on the device; None allows all
    bias_ids: Int64Array
    bias_values: Float32Array
    stop_ids: Int64Array
    bad_words: tuple[tuple[tuple[int, ...], int], ...]  # (the tokens before, the one that would complete the word)
    longest_bad_word: int

    @staticmethod
    def of(sampling: ResolvedSampling, vocab_size: int, device: torch.device) -> TokenLists:
        params = sampling.params
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = to_device(_within(params.allowed_token_ids, vocab_size), device)
        bias = {i: value for i, value in (params.logit_bias or {}).items() if i < vocab_size and value}
        words = [word for word in sampling.bad_words_token_ids if word and word[-1] < vocab_size]
        return TokenLists(
            allowed=allowed,
            bias_ids=np.fromiter(bias.keys(), dtype=np.int64),
            bias_values=np.fromiter(bias.values(), dtype=np.float32),
            stop_ids=_within(sampling.stop_token_ids if params.min_tokens else (), vocab_size),
            bad_words=tuple((tuple(word[:-1]), word[-1]) for word in words),
            longest_bad_word=max(map(len, words), default=0),
        )


def allowed_tokens(rows: Sequence[int], lists: Sequence[TokenLists]) -> tuple[AllowedTokens, ...]:
    return tuple(
        AllowedTokens(row=row, token_ids=of.allowed)
        for row, of in zip(rows, lists, strict=True)
        if of.allowed is not None
    )


def logit_bias(rows: Int64Array, lists: Sequence[TokenLists], vocab_size: int, device: torch.device) -> LogitBias:
    owners = np.repeat(rows, [len(of.bias_ids) for of in lists])
    ids = np.concatenate([of.bias_ids for of in lists])
    values = np.concatenate([of.bias_values for of in lists])
    return LogitBias(entries=to_device(owners * vocab_size + ids, device), values=to_device(values, device))


def stop_bans(rows: Int64Array, lists: Sequence[TokenLists], vocab_size: int, device: torch.device) -> Bans | None:
    return _bans(rows, [of.stop_ids for of in lists], vocab_size, device)


def bad_word_bans(
    rows: Int64Array,
    lists: Sequence[TokenLists],
    histories: Iterable[Int32Array],
    vocab_size: int,
    device: torch.device,
) -> Bans | None:
    """Bans of the tokens that would complete a bad word, given each row's tokens so far (prompt and output)."""
    banned = []
    for of, history in zip(lists, histories, strict=True):
        tail = tuple(history[max(0, len(history) - of.longest_bad_word) :].tolist())
        ids = [last for before, last in of.bad_words if not before or tail[-len(before) :] == before]
        banned.append(np.array(ids, dtype=np.int64))
    return _bans(rows, banned, vocab_size, device)


def _bans(rows: Int64Array, banned: Sequence[Int64Array], vocab_size: int, device: torch.device) -> Bans | None:
    counts = np.array([len(ids) for ids in banned], dtype=np.int64)
    if not counts.any():
        return None
    rows, banned, counts = rows[counts > 0], [ids for ids in banned if len(ids)], counts[counts > 0]
    owners = np.repeat(np.arange(len(rows)), counts)
    entries = rows[owners] * vocab_size + np.concatenate(banned)
    return Bans(entries=to_device(entries, device), rows=to_device(rows, device), owners=to_device(owners, device))


def _within(ids: Iterable[int], vocab_size: int) -> Int64Array:
    return np.array(sorted({i for i in ids if i < vocab_size}), dtype=np.int64)
