"""Finds the bytes of a token. Vocabularies spell bytes in GPT-2's printable alphabet, or like sentencepiece, as <0xNN>.

In GPT-2's alphabet (byte-level BPE), each byte is one printable character. Bytes that are printable in Latin-1 are written as
themselves. The other 68 bytes are written as U+0100 and the characters after it, in order (Radford et al. 2019,
`bytes_to_unicode` in github.com/openai/gpt-2).
"""

from __future__ import annotations


def _byte_of_character() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def piece_to_bytes(piece: str) -> bytes:
    """The bytes of a byte-level token. A token with characters outside the alphabet is an added token, whose bytes are its text
    in UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def parse_byte_fallback(piece: str) -> int | None:
    """The byte that a piece like "<0x0A>" spells; None for any other piece."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None
