"""`LogitsProcessors`: changes a step's logits before the draw (masks, biases, bans, penalties).

The processors also compute the log-probabilities of the drawn tokens. Their methods, in the order of the calls:

    of         runs on the host; uploads all data of the step that the host knows, in one copy
    apply      keeps the raw logits of rows with logprobs, then changes the logits in place
    logprobs   computes the log-probabilities of the drawn tokens from the raw logits

The order and the arithmetic are the same as in vLLM and transformers:

    1. grammar masks and allowed_token_ids: the logits of all other tokens become -inf
    2. logit_bias
    3. bad_words, then min_tokens: the logits of the tokens that they forbid become -inf. If this leaves a row without any
       token, these tokens get their logits back. For example, if only end tokens are allowed but min_tokens forbids them, an
       end token is drawn.
    4. repetition penalties, then frequency and presence penalties

`apply` and `logprobs` run torch operations on tensors whose sizes the host knows, so they never wait for a GPU. When a step is
launched, the host may not know the tokens of the steps before it yet, so `apply` reads the tokens of a sequence on the device.
If no row of a step needs a change or log-probabilities (`SamplingRows.is_plain`), no processors are made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.interface.request import Int32Array, ResolvedSampling
from inflight.kernels.token_masks import apply_token_masks
from inflight.sample.logprobs import LogprobsTensors, gather_logprobs
from inflight.sample.rows import (
    ALLOWED,
    BAD_WORDS,
    BIAS,
    LOGPROBS,
    MIN_TOKENS,
    OUTPUT_PENALTY,
    REPETITION,
    GrammarMasks,
    IntArray,
    SamplingRows,
)

AnyArray = npt.NDArray[Any]  # Any: all dtypes
Int64Array = npt.NDArray[np.int64]
Arrays = dict[str, AnyArray]
Tensors = dict[str, Tensor]

# The most elements of a temporary tensor. On a CPU it fits the cache, and on a GPU it needs at most 64 MB.
CHUNK_ELEMENTS = {"cpu": 64 * 1024, "cuda": 8 * 1024 * 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLists:
    """The parameters of a request that are lists of tokens. Ids beyond the vocabulary are left out, as they cannot be drawn.

    Built once, when the request gets its slot (its place in the batch).
    """

    allowed: Int32Array | None  # [ceil(vocab_size / 32)], a mask as in `GrammarMasks`; None: all tokens are allowed
    bias_ids: Int64Array
    bias_values: npt.NDArray[np.float32]
    stop_ids: Int64Array
    bad_words: tuple[tuple[tuple[int, ...], int], ...]  # (the word's first tokens, its last token)

    @staticmethod
    def of(sampling: ResolvedSampling, vocab_size: int) -> "TokenLists":
        params = sampling.params
        bias = {i: value for i, value in (params.logit_bias or {}).items() if i < vocab_size and value}
        return TokenLists(
            allowed=None if params.allowed_token_ids is None else _mask_of(params.allowed_token_ids, vocab_size),
            bias_ids=np.fromiter(bias.keys(), dtype=np.int64),
            bias_values=np.fromiter(bias.values(), dtype=np.float32),
            stop_ids=_within(sampling.stop_token_ids if params.min_tokens else (), vocab_size),
            bad_words=tuple(
                (tuple(word[:-1]), word[-1]) for word in sampling.bad_words_token_ids if word and word[-1] < vocab_size
            ),
        )


@dataclass(slots=True, kw_only=True)
class LogitsProcessors:
    """The processors of one step. Only `of` makes them. Call `apply` once, then `logprobs` once, on the same stream."""

    tensors: Tensors
    # name of a penalty -> for each row with this penalty: begin and end of the positions whose tokens the penalty counts
    spans: dict[str, tuple[IntArray, IntArray]]
    longest_history: int  # the most tokens that are read from a slot's history
    logprobs_rows: Int32Array | None  # [n], the rows whose requests want log-probabilities
    num_logprobs: int  # the most log-probabilities per token that one of these rows wants
    _raw: Tensor | None = field(default=None, init=False)  # float32 [n, vocab_size], from `apply` to `logprobs`

    @staticmethod
    def of(
        rows: SamplingRows,
        positions: IntArray,
        num_prompt_tokens: IntArray,
        masks: GrammarMasks | None,
        upload: Callable[[AnyArray], Tensor],
    ) -> "LogitsProcessors | None":
        """Make the processors of a step; None if no row needs any.

        Args:
            positions: [num_rows], the position of each draw: how many tokens (prompt and output) come before it.
            num_prompt_tokens: [num_rows].
            upload: makes a device tensor of an int64 array [n]; called at most once. Nothing reads the tensor before `apply`.
        """
        arrays = _mask_arrays(rows, masks) | _bias_arrays(rows) | _bad_word_arrays(rows, positions)
        arrays |= _stop_arrays(rows, positions - num_prompt_tokens)
        spans = {}
        for name, feature, parameters, starts in (
            ("repetition", REPETITION, ("repetition",), np.zeros_like(positions)),
            ("output", OUTPUT_PENALTY, ("frequency", "presence"), num_prompt_tokens),
        ):
            having = rows.having(feature)
            if len(having):
                spans[name] = starts[having], positions[having]
                arrays |= {f"{name}_rows": having, f"{name}_slots": rows.slots[having].astype(np.int64)}
                starts, stops = spans[name]
                arrays |= {f"{name}_starts": starts[:, None], f"{name}_stops": stops[:, None]}
                arrays |= {key: np.ascontiguousarray(rows.parameters[key][having])[:, None] for key in parameters}
        having = rows.having(LOGPROBS)
        if len(having):
            arrays["logprobs_rows"] = having
        if not any(array.size for array in arrays.values()):  # for example if the only bias is 0
            return None
        return LogitsProcessors(
            tensors=in_one_copy(arrays, upload),
            spans=spans,
            longest_history=int(positions.max()) if rows.needs_history else 0,
            logprobs_rows=having.astype(np.int32) if len(having) else None,
            num_logprobs=int(rows.parameters["num_logprobs"][having].max(initial=0)),
        )

    def apply(self, logits: Tensor, history: Tensor) -> None:
        """Change `logits` (float32 [num_rows, vocab_size], contiguous) in place.

        Args:
            history: int32 [num_slots, longest_history or more]: the token at each position of a slot's sequence, for all
                positions before a draw.
        """
        tensors = self.tensors
        if "logprobs_rows" in tensors:
            self._raw = logits.index_select(0, tensors["logprobs_rows"])
        if "masks" in tensors:
            apply_token_masks(logits, tensors["mask_rows"], tensors["masks"])
        if "bias_entries" in tensors:
            flat = logits.view(-1)
            entries = tensors["bias_entries"]
            flat.scatter_(0, entries, flat[entries] + tensors["bias_values"])
        if "word_entries" in tensors:
            tail = history[tensors["word_slots"][:, None], tensors["word_places"].clamp(min=0)]
            completes = ((tail == tensors["word_tokens"]) | (tensors["word_tokens"] < 0)).all(dim=1)
            _ban(logits, tensors["word_entries"], tensors["word_rows"], tensors["word_owners"], completes)
        if "stop_entries" in tensors:
            every = torch.ones_like(tensors["stop_entries"], dtype=torch.bool)
            _ban(logits, tensors["stop_entries"], tensors["stop_rows"], tensors["stop_owners"], every)
        if "repetition" in self.spans:
            self._penalise_repetition(logits, history)
        if "output" in self.spans:
            self._penalise_output(logits, history)

    def logprobs(self, tokens: Tensor) -> LogprobsTensors | None:
        """The log-probabilities of the rows `logprobs_rows`. `tokens`: the drawn tokens, int32 [num_rows]."""
        if self._raw is None:
            return None
        raw, self._raw = self._raw, None
        return gather_logprobs(raw, tokens.index_select(0, self.tensors["logprobs_rows"]), self.num_logprobs)

    def _penalise_repetition(self, logits: Tensor, history: Tensor) -> None:
        """Penalise all tokens before the draw as Keskar et al. 2019 (CTRL) do.

        Positive logits are divided by the penalty, and negative logits are multiplied by it.

        If a token occurs several times, its logit is written several times with the same value. So tokens that do not count
        (those at and after the position of the draw) can be replaced by the first token of the row.
        """
        flat = logits.view(-1)
        vocab_size = logits.shape[1]
        for part, tokens, here in self._parts("repetition", history):
            tokens = torch.where(here, tokens, tokens[:, :1])
            entries = self.tensors["repetition_rows"][part, None] * vocab_size + tokens
            before = flat[entries]
            penalty = self.tensors["repetition"][part]
            penalised = torch.where(before > 0, before / penalty, before * penalty)
            flat.scatter_(0, entries.view(-1), penalised.view(-1))

    def _penalise_output(self, logits: Tensor, history: Tensor) -> None:
        """Subtract count * frequency_penalty + presence_penalty from the logit of each token after the prompt.

        If a token occurs several times, its logit is written several times with the same value. So tokens that do not count can
        be replaced by token 0. The logit of token 0 gets its own penalty, which is 0 if token 0 does not occur.
        """
        flat = logits.view(-1)
        vocab_size = logits.shape[1]
        for part, tokens, here in self._parts("output", history):
            ordered = torch.where(here, tokens, vocab_size).sort(dim=1).values
            tokens = torch.where(ordered < vocab_size, ordered, 0)
            counts = torch.searchsorted(ordered, tokens, right=True) - torch.searchsorted(ordered, tokens)
            penalties = counts * self.tensors["frequency"][part] + self.tensors["presence"][part]
            entries = self.tensors["output_rows"][part, None] * vocab_size + tokens
            penalised = flat[entries] - torch.where(counts > 0, penalties, 0.0)
            flat.scatter_(0, entries.view(-1), penalised.view(-1))

    def _parts(self, name: str, history: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the rows with this penalty, some at a time: a slice of the rows, their tokens (int32 [n, m]), and which of
        the tokens count (bool [n, m])."""
        starts, stops = self.spans[name]
        first = 0
        while first < len(stops):
            # All rows of a part are padded to one width. A part has as many rows as CHUNK_ELEMENTS allows, but at least one.
            widths = np.maximum.accumulate(stops[first:]) - np.minimum.accumulate(starts[first:])
            sizes = widths * np.arange(1, len(widths) + 1)
            end = first + max(1, int(np.searchsorted(sizes, CHUNK_ELEMENTS[history.device.type], side="right")))
            part = slice(first, end)
            start = int(starts[first:end].min())
            stop = int(stops[first:end].max())
            tokens = history[:, start:stop].index_select(0, self.tensors[f"{name}_slots"][part])
            places = torch.arange(start, stop, dtype=torch.int64, device=history.device)
            first_places, end_places = (self.tensors[f"{name}_{each}"][part] for each in ("starts", "stops"))
            here = (places >= first_places) & (places < end_places)
            yield part, tokens, here
            first = end


def in_one_copy(arrays: Arrays, upload: Callable[[AnyArray], Tensor]) -> Tensors:
    """Upload the arrays as one array of int64. Returns them as tensors of the same shapes and dtypes."""
    starts = np.cumsum([0, *(-(-array.nbytes // 8) for array in arrays.values())])
    words = np.zeros(starts[-1], dtype=np.int64)
    for array, start in zip(arrays.values(), starts[:-1].tolist(), strict=True):
        first_byte = start * 8
        words.view(np.uint8)[first_byte : first_byte + array.nbytes] = array.reshape(-1).view(np.uint8)
    uploaded = upload(words)
    tensors = {}
    for (name, array), start in zip(arrays.items(), starts[:-1].tolist(), strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors[name] = uploaded[start:].view(dtype)[: array.size].view(array.shape)
    return tensors


def _mask_arrays(rows: SamplingRows, masks: GrammarMasks | None) -> Arrays:
    """One mask for each row that has allowed tokens, or is under a grammar, or both."""
    by_row = {} if masks is None else dict(zip(masks.rows.tolist(), masks.masks, strict=True))
    having = rows.having(ALLOWED)
    for row, lists in zip(having.tolist(), _lists_of(rows, having), strict=True):
        assert lists.allowed is not None
        by_row[row] = by_row[row] & lists.allowed if row in by_row else lists.allowed
    if not by_row:
        return {}
    return {"mask_rows": np.array(list(by_row), dtype=np.int64), "masks": np.stack(list(by_row.values()))}


def _bias_arrays(rows: SamplingRows) -> Arrays:
    having = rows.having(BIAS)
    if not len(having):
        return {}
    lists = _lists_of(rows, having)
    owners = np.repeat(having, [len(of.bias_ids) for of in lists])
    return {
        "bias_entries": owners * rows.vocab_size + np.concatenate([of.bias_ids for of in lists]),
        "bias_values": np.concatenate([of.bias_values for of in lists]),
    }


def _stop_arrays(rows: SamplingRows, num_emitted: IntArray) -> Arrays:
    having = rows.having(MIN_TOKENS)
    if len(having):
        having = having[num_emitted[having] < rows.parameters["min_tokens"][having]]
    if not len(having):
        return {}
    ids = [of.stop_ids for of in _lists_of(rows, having)]
    owners = np.repeat(np.arange(len(having)), [len(each) for each in ids])
    return {
        "stop_entries": having[owners] * rows.vocab_size + np.concatenate(ids),
        "stop_rows": having,
        "stop_owners": owners,
    }


def _bad_word_arrays(rows: SamplingRows, positions: IntArray) -> Arrays:
    """Make a table of the bad words that a draw could complete. Each line of the table has the tokens of one word without its
    last token, aligned at the right."""
    having = rows.having(BAD_WORDS)
    words = [
        (row, owner, before, last)
        for owner, (row, of) in enumerate(zip(having.tolist(), _lists_of(rows, having), strict=True))
        for before, last in of.bad_words
        if len(before) <= positions[row]
    ]
    if not words:
        return {}
    width = max(1, *(len(before) for _, _, before, _ in words))
    before_tokens = np.full((len(words), width), -1, dtype=np.int64)  # -1 matches every token
    for line, (_, _, before, _) in zip(before_tokens, words, strict=True):
        line[width - len(before) :] = before
    word_rows = np.array([row for row, _, _, _ in words], dtype=np.int64)
    return {
        "word_entries": word_rows * rows.vocab_size + np.array([last for _, _, _, last in words], dtype=np.int64),
        "word_rows": having,
        "word_owners": np.array([owner for _, owner, _, _ in words], dtype=np.int64),
        "word_slots": rows.slots[word_rows].astype(np.int64),
        "word_places": positions[word_rows].astype(np.int64)[:, None] + np.arange(-width, 0),
        "word_tokens": before_tokens,
    }


def _ban(logits: Tensor, entries: Tensor, rows: Tensor, owners: Tensor, applies: Tensor) -> None:
    """Forbid tokens. If this leaves a row without any token, the row's forbidden tokens get their logits back.

    A token may occur in several entries. It is forbidden if at least one of them applies. The order of the entries does not
    matter, because only minima and maxima are written.

    Args:
        entries: int64 [m], the indices in the flat logits of the tokens that may be forbidden.
        rows: int64 [n], the rows that have entries.
        owners: int64 [m], the index in `rows` of each entry's row.
        applies: bool [m], whether the entry's token is forbidden.
    """
    flat = logits.view(-1)
    before = flat[entries]
    flat.scatter_reduce_(0, entries, torch.where(applies, -torch.inf, before), "amin")
    lifted = (logits.index_select(0, rows).amax(dim=1) == -torch.inf)[owners]
    flat.scatter_reduce_(0, entries, torch.where(lifted, before, -torch.inf), "amax")


def _lists_of(rows: SamplingRows, having: Int64Array) -> Sequence[TokenLists]:
    """The token lists of the rows `having`. Each of these rows must have token lists."""
    return rows.lists[having].tolist() if len(having) else ()


def _mask_of(ids: Iterable[int], vocab_size: int) -> Int32Array:
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    allowed[_within(ids, vocab_size)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32, copy=False)


def _within(ids: Iterable[int], vocab_size: int) -> Int64Array:
    return np.array(sorted({i for i in ids if i < vocab_size}), dtype=np.int64)
