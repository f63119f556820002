"""Cut texts: the tokens of the whole text, but at most so many; and the end of a long text is not tokenised."""

import random

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from inflight.hub import EMBEDDED_MODEL
from inflight.tokenizer.cut_text import encode_cut

WORDS = "the fox tells Anna a story about rivers 1234 and, perhaps; über Flüsse und 山水 in one day".split()


def word_piece() -> Tokenizer:
    """As BERT's: [CLS] before the text and [SEP] behind it."""
    pieces = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"abcdefghijklmnopqrstuvwxyz,;1234",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz1234"),
    ]
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


BACKENDS = {"embedded": Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json")), "WordPiece": word_piece()}


@pytest.mark.parametrize("name", BACKENDS)
def test_the_tokens_are_those_of_the_whole_text(name: str) -> None:
    backend, rng = BACKENDS[name], random.Random(3)
    special = backend.num_special_tokens_to_add(False)
    for length in (0, 1, 7, 60, 4000):
        text = " ".join(rng.choice(WORDS) for _ in range(length))
        whole = backend.encode(text, add_special_tokens=False).ids
        for most in (special + 1, 5, 17, 128, len(whole) + special, 10**6):
            wanted = max(most - special, 0)
            cut = backend.encode(text, add_special_tokens=False)
            cut.truncate(wanted)
            expected = backend.post_process(cut, None, True).ids
            found = encode_cut(backend, text, most, True)
            assert found == expected, (name, length, most)
            assert len(found) <= max(most, special)
            if name == "WordPiece":
                assert (found[0], found[-1]) == (1, 2), "the special tokens at the end are kept"


def test_the_end_of_a_long_text_is_not_tokenised() -> None:
    seen: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(BACKENDS["embedded"], name)

        def encode_batch(self, texts: list[str], add_special_tokens: bool) -> object:
            seen.extend(map(len, texts))
            return BACKENDS["embedded"].encode_batch(texts, add_special_tokens=add_special_tokens)

    text = " ".join(WORDS) * 20_000
    assert len(encode_cut(Counting(), text, 512, True)) == 512  # type: ignore[arg-type]
    assert sum(seen) < 20_000 < len(text)
