"""`fewest_tokens`: finds how many bytes of a text a tokenizer's longest token covers, for `FewestTokens`."""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from inflight.tokenizer.fewest_tokens import FewestTokens

_NFC_SHRINKS = 3  # NFC divides the bytes of a text by at most 3: U+0390 has six bytes decomposed and two composed
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")


def fewest_tokens(backend: tokenizers.Tokenizer) -> FewestTokens:
    """Its bound is above 0 only if the tokenizer's tokens are parts of the text. For other tokenizers no bound is known."""
    added = backend.get_added_tokens_decoder().values()
    # a token with lstrip or rstrip includes any number of spaces beside it, so then spaces do not count
    spaces_count = not any(token.lstrip or token.rstrip for token in added)
    bytes_per_token = 0
    if _covers_all_bytes(backend) and (shrinks := _normalizer_shrinks(backend)):
        pieces = backend.get_vocab(with_added_tokens=True)
        # The vocabulary's spelling of a token is at least as long as its text.
        bytes_per_token = shrinks * max(len(piece.encode("utf-8")) for piece in pieces)
    return FewestTokens(bytes_per_token, spaces_count)


def _covers_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether every byte becomes part of a known token. If not, there is no bound, because unknown tokens have any length."""
    model = backend.model
    components = list(components_of(backend.pre_tokenizer, "pretokenizers"))
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if any(each["type"] not in _KEEPING_PRE_TOKENIZERS or each.get("behavior") == "Removed" for each in components):
        return False
    pieces: list[str] = []
    if any(each["type"] == "ByteLevel" for each in components):
        pieces = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif model.byte_fallback:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return bool(pieces) and all(backend.token_to_id(piece) is not None for piece in pieces)


def _normalizer_shrinks(backend: tokenizers.Tokenizer) -> int:
    """Returns the largest factor by which the normalizer can reduce the number of bytes of a text; 0 if it is not known."""
    shrinks = 1
    for each in components_of(backend.normalizer, "normalizers"):
        if each["type"] == "NFC":
            shrinks *= _NFC_SHRINKS
        elif each["type"] == "Replace":
            shrinks *= each["pattern"] == {"String": " "} and bool(each["content"])
        elif each["type"] != "Prepend":
            return 0
    return shrinks


def components_of(part: Any, name: str) -> Iterator[dict[str, Any]]:  # Any: a part of a tokenizer; JSON
    """Yields the components of a normalizer, pre-tokenizer or decoder, as JSON. If `part` is a "Sequence" of components, they
    are under the key `name` of its JSON."""
    if part is not None:
        state = json.loads(part.__getstate__())
        yield from state[name] if state["type"] == "Sequence" else [state]
