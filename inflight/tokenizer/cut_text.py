"""`encode_cut`: tokenises the beginning of a text."""

import tokenizers

_CHARACTERS_PER_TOKEN = 8  # more than most texts have
_MARGIN = 16  # so many tokens before a cut may differ from those of the whole text


def encode_cut(backend: tokenizers.Tokenizer, text: str, most: int, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`, at most `most`: those at the end are left out, but not the special tokens around the text. Raises
    what `tokenizers` raises."""
    num_special = backend.num_special_tokens_to_add(False) if add_special_tokens else 0
    encoding = cut_encoding(backend, text, max(most - num_special, 0))
    ids: list[int] = backend.post_process(encoding, None, add_special_tokens).ids
    return ids


def cut_encoding(backend: tokenizers.Tokenizer, text: str, most: int) -> tokenizers.Encoding:
    """The first `most` tokens of a text, without special tokens. Of a long text only the beginning is tokenised."""
    length = _CHARACTERS_PER_TOKEN * (most + _MARGIN)
    text.encode("utf-8")  # a lone surrogate is refused, wherever it is
    while True:
        part = text if len(text) <= length else text[: _last_space(text, length)]
        # `encode_batch` releases the interpreter lock
        [encoding] = backend.encode_batch([part], add_special_tokens=False)
        if part is text or len(encoding.ids) >= most + _MARGIN:
            break
        length *= 4
    encoding.truncate(most)
    return encoding


def _last_space(text: str, length: int) -> int:
    """Where the last blank of `text[:length]` is, because tokenizers divide a text there; `length` if there is none near."""
    found = text.rfind(" ", length // 2, length)
    return found if found > 0 else length
