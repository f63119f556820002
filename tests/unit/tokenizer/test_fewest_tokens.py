"""`FewestTokens` never says more than there are, and says something wherever tokens cover the text."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from inflight.tokenizer.longest_token import fewest_tokens
from tests.support.fakes_tokenizer import train_byte_fallback, train_byte_level

_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(normalizer: normalizers.Normalizer | None = None, *, swallows: str = "") -> tokenizers.Tokenizer:
    """With a token for a run of spaces, or with one that takes along the spaces before or behind it, if it `swallows` them."""
    backend = train_byte_level()
    if normalizer is not None:
        backend.normalizer = normalizer
    end = AddedToken("<|end|>", lstrip=swallows == "before", rstrip=swallows == "behind", normalized=False)
    backend.add_tokens([end] if swallows else [AddedToken(" " * 64, normalized=False), end])
    return backend


KNOWN = {
    "byte level": byte_level(),
    "NFC": byte_level(normalizers.NFC()),
    "swallows before": byte_level(swallows="before"),
    "swallows behind": byte_level(swallows="behind"),
    "byte fallback": train_byte_fallback(),
}
TEXTS = st.lists(
    st.sampled_from(
        [
            " " * 64,
            " ",
            "\n",
            "<|end|>",
            "the ",
            "\u0390",
            "\u03b9\u0308\u0301",
            "\u1100\u1161\u11a8",
            "가",
            "🙂",
            "\x00",
            "�",
            "x",
        ]
    )
)


@pytest.mark.parametrize("kind", KNOWN)
@given(pieces=TEXTS, text=st.text(st.characters(exclude_categories=["Cs"])), repeats=st.integers(1, 50))
@example(pieces=["<|end|>", *[" "] * 500], text="", repeats=50)
@example(pieces=["\u03b9\u0308\u0301"], text="", repeats=50)
def test_no_text_has_fewer(kind: str, pieces: list[str], text: str, repeats: int) -> None:
    backend = KNOWN[kind]
    fewest = fewest_tokens(backend)
    for each in ("".join(pieces) * repeats, text * repeats):
        assert fewest(each) <= len(backend.encode(each, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_long_text_has_many(kind: str) -> None:
    assert fewest_tokens(KNOWN[kind])("the quick brown fox " * 10_000) > 200


def unknown_bytes() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))


def fallback(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=_BYTES, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizer
    return backend


UNKNOWN = {
    "a word may be one unknown token": tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "a run of unknown characters is one token": unknown_bytes(),
    "spaces are dropped": fallback(pre_tokenizers.WhitespaceSplit()),
    "what is split at is dropped": fallback(pre_tokenizers.Split(Regex(" +"), "removed")),
    "accents are dropped": byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
    "spaces are replaced by nothing": byte_level(normalizers.Replace(" ", "")),
    "letters are replaced": byte_level(normalizers.Replace("x", "")),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_of_others_nothing_is_known(why: str) -> None:
    assert fewest_tokens(UNKNOWN[why])("x " * 1_000_000) == 0
