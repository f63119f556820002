"""`Tokenizer`: encodes and decodes by the `tokenizers` library. folder_tokenizer.py and gguf_tokenizer.py make it."""

import re
from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import AddedToken

from inflight.tokenizer.cut_text import encode_cut
from inflight.tokenizer.failures import decoding_failure, encoding_failure
from inflight.tokenizer.incremental import ByteLevelDecoder, IncrementalDecoder
from inflight.tokenizer.longest_token import components_of, fewest_tokens
from inflight.tokenizer.window_decoder import WindowDecoder

_MAX_PROMPT_CONTEXT = 8  # prompt tokens that an incremental decoder gets as the context of the first output token
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")  # how vocabularies like sentencepiece's spell a byte
_PRINTABLE = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))  # the ranges of Latin-1's printable characters without blanks


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: byte-level BPE spells each byte as one printable character. Bytes that are printable in Latin-1 are
    written as themselves. The other 68 bytes are written as U+0100 and the characters after it, in order (Radford et al. 2019,
    `bytes_to_unicode` in github.com/openai/gpt-2)."""
    printable = [byte for first, last in _PRINTABLE for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """Several threads may use one tokenizer at once: after the constructor, only its cache of tokens' bytes changes.

    Attributes:
        special_tokens: "bos_token", "eos_token", ... -> text; only the tokens that the folder names.
        bos_token_id, eos_token_id, unk_token_id: the ids of these tokens; None if the folder names no such token.
        all_special_ids: the ids of the tokens that `skip_special_tokens` leaves out.
        added_texts: id -> text of each added token, special or not.
        is_byte_level: the vocabulary spells each byte as one character (byte-level BPE).
        has_byte_fallback: bytes that have no other token are tokens like <0x0A> (as in sentencepiece).
        vocab_size: the number of tokens, added tokens included. A model may have more logits than this (padding).
        fewest_tokens: computes a lower bound for the number of tokens of a text, without tokenizing it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        extra_special_tokens: Iterable[str] = (),
    ) -> None:
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, [*self.special_tokens.values(), *extra_special_tokens])
        added = backend.get_added_tokens_decoder()
        ids: dict[str, int | None] = {name: backend.token_to_id(text) for name, text in self.special_tokens.items()}
        self.bos_token_id, self.eos_token_id, self.unk_token_id = (
            ids.get(f"{name}_token") for name in ("bos", "eos", "unk")
        )
        self.added_texts = {token_id: token.content for token_id, token in added.items()}
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.fewest_tokens = fewest_tokens(backend)
        decoders = [each["type"] for each in components_of(backend.decoder, "decoders")]
        self.is_byte_level = decoders == ["ByteLevel"]
        self.has_byte_fallback = "ByteFallback" in decoders
        self._token_bytes: dict[int, bytes] = {}  # filled when tokens occur

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens`: add the tokens of the tokenizer's post-processor (usually a BOS).

        Raises:
            InvalidRequestError: the text contains a lone surrogate, or the library cannot encode it.
        """
        try:
            text.encode("utf-8")
            # `encode_batch` releases the interpreter lock. A million characters take a second, in which other threads must run.
            encoded: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise encoding_failure(error, "prompt") from None
        return encoded

    def encode_cut(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """See `cut_text.encode_cut`. Raises as `encode`."""
        try:
            return encode_cut(self._backend, text, most, add_special_tokens)
        except BaseException as error:
            raise encoding_failure(error, "prompt") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of the tokens. Ids without a token (a model's vocabulary may have such padding) add no text."""
        try:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except BaseException as error:
            raise decoding_failure(error) from None

    def decode_token(self, token_id: int) -> str:
        """The text that a token adds inside a longer text, with its leading space. "�" if it is only a part of a character."""
        if self.is_byte_level:
            return self.token_bytes(token_id).decode("utf-8", "replace")
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]

    def id_to_piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it ("Ġthe", "▁the", "<0x0A>"), or None."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a byte-level token; b"" for an id without a token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            piece = self.id_to_piece(token_id)
            found = self._token_bytes[token_id] = _piece_to_bytes(piece or "")
        return found

    def vocabulary(self) -> dict[str, int]:
        """Each token as the vocabulary spells it -> its id. Added tokens are included."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer, in which its special tokens are marked as special."""
        return str(self._backend.to_str())

    def byte_fallback(self, token_id: int) -> int | None:
        """The byte of a token like <0x0A>, if the tokenizer has byte fallback; otherwise None."""
        if not self.has_byte_fallback:
            return None
        found = _BYTE_PIECE.fullmatch(self.id_to_piece(token_id) or "")
        return None if found is None else int(found[1], 16)

    def incremental_decoder(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder:
        """Returns a decoder for the tokens after the prompt. The docstring of incremental.py defines the decoder's text."""
        skipped = self.all_special_ids if skip_special_tokens else frozenset()
        if self.is_byte_level:
            return ByteLevelDecoder(self.token_bytes, skipped)
        recent = prompt_token_ids[-4 * _MAX_PROMPT_CONTEXT :]
        context = [t for t in recent if t not in skipped and self.id_to_piece(t) is not None]
        return WindowDecoder(self, skipped, context[-_MAX_PROMPT_CONTEXT:])


def _piece_to_bytes(piece: str) -> bytes:
    """The bytes of a byte-level token. A token with characters outside the alphabet is an added token, whose bytes are its text
    in UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def _mark_special(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> None:
    """Mark the tokens with these texts as special, even if tokenizer.json does not. Texts that are no tokens are ignored."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(texts):
        token = added.get(text, AddedToken(text, normalized=False))
        if not token.special and backend.token_to_id(text) is not None:
            token.special = True
            backend.add_special_tokens([token])
