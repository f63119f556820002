"""`DeviceFeatures`: what only some requests ask for, on a GPU: masks, biases, bans, penalties, logprobs.

    of            on the host, where the step is prepared: everything that is known then goes to the device in one copy
    before_draw   raw logits are kept; then, in `processors.py`'s order, masks, allowed tokens, biases, bans, penalties
    after_draw    logprobs of the raw logits

The latter two launch torch operations on tensors whose sizes the host knows: nothing waits for the device. The tokens before
the draws, which the host may not know yet, are read where they are, on the device. A plain step has no `DeviceFeatures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.interface.request import Int32Array
from inflight.kernels.triton.token_masks import triton_apply_token_masks
from inflight.sample.logprobs import LogprobsTensors, gather_logprobs
from inflight.sample.metadata import Bans, GrammarMasks, LogitBias, SamplingMetadata
from inflight.sample.processors import apply_bans, apply_bias
from inflight.sample.rows import BAD_WORDS, OUTPUT_PENALTY, RANDOM, REPETITION, RESTRICTED, IntArray, SamplingRows
from inflight.sample.token_lists import TokenLists

AnyArray = npt.NDArray[Any]  # of whatever dtype
Arrays = dict[str, AnyArray]
Tensors = dict[str, Tensor]

CHUNK_ELEMENTS = 8 * 1024 * 1024  # of temporaries: a few times 64 MB at most


@dataclass(slots=True, kw_only=True)
class DeviceFeatures:
    """Of one step; made by `of` only. `before_draw` and `after_draw` are called once each, in this order, on one stream."""

    tensors: Tensors
    longest_history: int  # of the rows with penalties
    logprobs_rows: Int32Array | None  # [n], the rows that asked
    num_logprobs: int  # the most that any of them asked for
    _raw: Tensor | None = field(default=None, init=False)  # float32 [n, vocab_size], between the two

    @staticmethod
    def of(
        rows: SamplingRows,
        positions: IntArray,
        num_prompt_tokens: IntArray,
        masks: GrammarMasks | None,
        upload: Callable[[AnyArray], Tensor],
    ) -> DeviceFeatures | None:
        """None where nothing is asked for.

        Args:
            rows: of a `SamplingState` on the CPU.
            positions: [num_rows], of the draws: how many tokens (prompt and output) come before each.
            num_prompt_tokens: [num_rows].
            upload: makes a device tensor of an int64 array [n]; called at most once. What it holds is not looked at before
                `before_draw`.
        """
        assert rows.device.type == "cpu", "lists of tokens go to the device with the step"
        plain = replace(rows, features=rows.features & ~(RANDOM | RESTRICTED))
        if masks is None and not plain.features.any():
            return None
        metadata = plain.metadata(positions, num_prompt_tokens)
        arrays = _mask_arrays(masks, metadata, rows.vocab_size)
        if metadata.bias is not None:
            arrays |= {"bias_entries": metadata.bias.entries.numpy(), "bias_values": metadata.bias.values.numpy()}
        if (stops := metadata.min_tokens) is not None:
            arrays |= {
                "stop_entries": stops.entries.numpy(),
                "stop_rows": stops.rows.numpy(),
                "stop_owners": stops.owners.numpy(),
            }
        longest = 0
        if rows.needs_history:
            arrays |= _bad_word_arrays(plain, positions)
            penalties = _penalty_arrays(plain, positions, num_prompt_tokens)
            longest = max((int(penalties[name].max()) for name in penalties if name.endswith("_stops")), default=0)
            arrays |= penalties
        if metadata.logprobs_rows is not None:
            arrays["logprobs_rows"] = metadata.logprobs_rows.astype(np.int64)
        if not arrays:
            return None
        return DeviceFeatures(
            tensors=in_one_copy(arrays, upload),
            longest_history=longest,
            logprobs_rows=metadata.logprobs_rows,
            num_logprobs=metadata.num_logprobs,
        )

    def before_draw(self, logits: Tensor, history: Tensor) -> None:
        """Change `logits` (float32 [num_rows, vocab_size], contiguous) in place.

        Args:
            history: int32 [num_slots, max_model_len]: the token at each position of a slot's sequence, for all positions before
                a draw. Not looked at where no row of the step `needs_history`.
        """
        tensors, flat = self.tensors, logits.view(-1)
        if "logprobs_rows" in tensors:
            self._raw = logits.index_select(0, tensors["logprobs_rows"])
        if "masks" in tensors:
            triton_apply_token_masks(logits, tensors["mask_rows"], tensors["masks"])
        if "bias_entries" in tensors:
            apply_bias(flat, LogitBias(entries=tensors["bias_entries"], values=tensors["bias_values"]))
        if "word_entries" in tensors:
            _ban_bad_words(logits, tensors, history)
        if "stop_entries" in tensors:
            apply_bans(
                logits,
                Bans(entries=tensors["stop_entries"], rows=tensors["stop_rows"], owners=tensors["stop_owners"]),
            )
        if "repetition_rows" in tensors:
            _penalise_repetition(logits, tensors, history[:, : self.longest_history])
        if "output_rows" in tensors:
            _penalise_output(logits, tensors, history[:, : self.longest_history])

    def after_draw(self, tokens: Tensor) -> LogprobsTensors | None:
        """Of the rows `logprobs_rows`. tokens: int32 [num_rows]."""
        if self._raw is None:
            return None
        raw, self._raw = self._raw, None
        return gather_logprobs(raw, tokens.index_select(0, self.tensors["logprobs_rows"]), self.num_logprobs)


def in_one_copy(arrays: Arrays, upload: Callable[[AnyArray], Tensor]) -> Tensors:
    """The arrays as tensors of the same shapes and dtypes, uploaded as one array of int64."""
    starts = np.cumsum([0, *(-(-array.nbytes // 8) for array in arrays.values())])
    words = np.zeros(starts[-1], dtype=np.int64)
    for array, start in zip(arrays.values(), starts[:-1].tolist(), strict=True):
        words.view(np.uint8)[start * 8 : start * 8 + array.nbytes] = array.reshape(-1).view(np.uint8)
    uploaded = upload(words)
    tensors = {}
    for (name, array), start in zip(arrays.items(), starts[:-1].tolist(), strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors[name] = uploaded[start:].view(dtype)[: array.size].view(array.shape)
    return tensors


def _mask_arrays(masks: GrammarMasks | None, metadata: SamplingMetadata, vocab_size: int) -> Arrays:
    """Grammar masks and, as masks too, allowed tokens: both are walls."""
    if masks is None and not metadata.allowed:
        return {}
    allowed = np.zeros((len(metadata.allowed), -(-vocab_size // 32) * 32), dtype=np.bool_)
    for row, tokens in zip(allowed, metadata.allowed, strict=True):
        row[tokens.token_ids.numpy()] = True
    words = np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)
    allowed_rows = np.array([tokens.row for tokens in metadata.allowed], dtype=np.int64)
    if masks is None:
        return {"mask_rows": allowed_rows, "masks": words}
    return {"mask_rows": np.concatenate([masks.rows, allowed_rows]), "masks": np.concatenate([masks.masks, words])}


def _bad_word_arrays(rows: SamplingRows, positions: IntArray) -> Arrays:
    """A table of the words that could be completed, one a line; the tokens before the last one end at the right."""
    having = np.flatnonzero(rows.features & BAD_WORDS)
    lists: list[TokenLists] = rows.lists[having].tolist() if len(having) else []
    words = [
        (row, owner, before, last)
        for owner, (row, of) in enumerate(zip(having.tolist(), lists, strict=True))
        for before, last in of.bad_words
        if len(before) <= positions[row]
    ]
    if not words:
        return {}
    width = max(1, *(len(before) for _, _, before, _ in words))
    before_tokens = np.full((len(words), width), -1, dtype=np.int64)  # -1 equals every token
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


def _penalty_arrays(rows: SamplingRows, positions: IntArray, num_prompt_tokens: IntArray) -> Arrays:
    """Which tokens of its slot's history count for a row, and what each penalty is."""
    arrays: Arrays = {}
    for name, feature, parameters in (
        ("repetition", REPETITION, ("repetition",)),
        ("output", OUTPUT_PENALTY, ("frequency", "presence")),
    ):
        having = np.flatnonzero(rows.features & feature)
        if not len(having):
            continue
        arrays |= {
            f"{name}_rows": having,
            f"{name}_slots": rows.slots[having].astype(np.int64),
            f"{name}_stops": positions[having].astype(np.int64)[:, None],
        }
        arrays |= {
            parameter: np.ascontiguousarray(rows.parameters[parameter][having])[:, None] for parameter in parameters
        }
    if "output_rows" in arrays:
        arrays["output_starts"] = num_prompt_tokens[arrays["output_rows"]].astype(np.int64)[:, None]
    return arrays


def _ban_bad_words(logits: Tensor, tensors: Tensors, history: Tensor) -> None:
    """`apply_bans` for the words whose first tokens are the last ones of the history.

    A token may end several words of a row, of which some apply: so minima and maxima are written, not values.
    """
    flat, entries = logits.view(-1), tensors["word_entries"]
    tail = history[tensors["word_slots"][:, None], tensors["word_places"].clamp(min=0)]
    applies = ((tail == tensors["word_tokens"]) | (tensors["word_tokens"] < 0)).all(dim=1)
    before = flat[entries]
    flat.scatter_reduce_(0, entries, torch.where(applies, -torch.inf, before), "amin")
    lifted = (logits.index_select(0, tensors["word_rows"]).amax(dim=1) == -torch.inf)[tensors["word_owners"]]
    flat.scatter_reduce_(0, entries, torch.where(lifted, before, -torch.inf), "amax")


def _penalise_repetition(logits: Tensor, tensors: Tensors, history: Tensor) -> None:
    """`apply_repetition_penalties`. Positions at or after the draw are replaced by the row's first token; writing it twice
    is harmless."""
    flat, vocab_size = logits.view(-1), logits.shape[1]
    places = torch.arange(history.shape[1], device=history.device)
    for part in _parts(len(tensors["repetition_rows"]), history.shape[1]):
        tokens = history.index_select(0, tensors["repetition_slots"][part]).to(torch.int64)
        tokens = torch.where(places < tensors["repetition_stops"][part], tokens, tokens[:, :1])
        entries = tensors["repetition_rows"][part, None] * vocab_size + tokens
        before, penalty = flat[entries], tensors["repetition"][part]
        penalised = torch.where(before > 0, before / penalty, before * penalty)
        flat.scatter_(0, entries.view(-1), penalised.view(-1))


def _penalise_output(logits: Tensor, tensors: Tensors, history: Tensor) -> None:
    """`apply_output_penalties`: of the tokens behind the prompt, by how often each came."""
    vocab_size = logits.shape[1]
    places = torch.arange(history.shape[1], device=history.device)
    for part in _parts(len(tensors["output_rows"]), max(vocab_size, history.shape[1])):
        rows = tensors["output_rows"][part]
        tokens = history.index_select(0, tensors["output_slots"][part]).to(torch.int64)
        counts_here = (places >= tensors["output_starts"][part]) & (places < tensors["output_stops"][part])
        counts = logits.new_zeros(len(rows), vocab_size)
        counts.scatter_add_(1, torch.where(counts_here, tokens, 0), counts_here.to(counts.dtype))
        penalties = counts * tensors["frequency"][part] + tensors["presence"][part]
        logits.index_copy_(0, rows, logits.index_select(0, rows) - torch.where(counts > 0, penalties, 0.0))


def _parts(num_rows: int, width: int) -> Iterator[slice]:
    """Rows of `width` temporaries each, a bounded number at a time."""
    step = max(1, CHUNK_ELEMENTS // width)
    return (slice(start, start + step) for start in range(0, num_rows, step))
