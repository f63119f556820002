r"""`find_split`: how a byte-level tokenizer in a GGUF file splits a text into words, before it merges the bytes of each word.

`tokenizer.ggml.pre` names it. llama.cpp's converter gives the names. The tokenizer.json of the named model has the patterns.
Files made before May 2024 have no name.
"""

import logging
from dataclasses import dataclass

from inflight.config.gguf_file import GgufFile

logger = logging.getLogger(__name__)

PRE = "tokenizer.ggml.pre"
_DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Split:
    """
    Attributes:
        patterns: regular expressions in the syntax of Oniguruma. Each one splits the pieces that the ones before it left.
        has_whole_words: whether a word that is a token becomes this token, even if no merges lead to it.
        has_bos: whether a text begins with BOS, if the file does not say it.
        is_nfc: whether a text is brought into Unicode's normal form C first.
        encoder: of encoders, "bert" or "roberta": which tokens are around a text and between the texts of a pair. "" of others.
    """

    patterns: tuple[str, ...]
    has_whole_words: bool = False
    has_bos: bool = False
    is_nfc: bool = False
    encoder: str = ""


_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"  # English words that are written together with the word before them
_GPT2_WORDS = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_GPT2 = rf"{_GPT2_WORDS}|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: int, *, letters: str = r"\p{L}", punctuation: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """The pattern of OpenAI's vocabulary cl100k, with at most `digits` digits in a piece. Many models have variants of it."""
    words = rf"(?i:{_SHORT})|[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"{words}|\p{{N}}{{1,{digits}}}| ?{punctuation}|{_LINES_AND_SPACES}"


def _o200k(digits: int, *, after_word: str) -> str:
    """The pattern of OpenAI's vocabulary o200k: a word ends where a capital letter follows a small one."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{capitals}*{small}+{after_word}|{before}{capitals}+{small}*{after_word}"
    return rf"{words}|\p{{N}}{{1,{digits}}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


_LLAMA_3 = Split(patterns=(_cl100k(3),), has_whole_words=True, has_bos=True)
_GROUPS = {
    # as llama.cpp splits: punctuation, then GPT-2's words, then digits in threes
    (_DEFAULT,): Split(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2", "olmo", "mellum", "trillion", "granite-docling", "a.x-4.0"): Split(patterns=(_GPT2,)),
    ("roberta-bpe",): Split(patterns=(_GPT2,), encoder="roberta"),
    ("modern-bert",): Split(patterns=(_GPT2,), is_nfc=True, encoder="bert"),
    ("refact", "smollm", "starcoder", "minerva-7b"): Split(patterns=(r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "midm-2.0"): _LLAMA_3,
    # Llama 3's vocabulary, and no BOS (SmolLM3)
    ("smaug-bpe",): Split(patterns=_LLAMA_3.patterns, has_whole_words=True),
    ("dbrx", "glm4", "chatglm-bpe"): Split(patterns=_LLAMA_3.patterns),
    ("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"): Split(patterns=(_cl100k(1),), is_nfc=True),
    ("qwen35",): Split(
        patterns=(_cl100k(1, letters=r"[\p{L}\p{M}]", punctuation=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), is_nfc=True
    ),
    ("seed-coder",): Split(patterns=(_cl100k(1, punctuation=r"[^\s\p{L}\p{N}\r\n]+"),)),
    ("tekken",): Split(patterns=(_o200k(1, after_word=""),), has_whole_words=True, has_bos=True),
    ("gpt-4o",): Split(patterns=(_o200k(3, after_word=f"(?i:{_SHORT})?"),)),
    ("deepseek-coder",): Split(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
}
SPLITS = {name: split for names, split in _GROUPS.items() for name in names}


def find_split(file: GgufFile, bos_token: str | None) -> Split | None:
    """Returns None if the file names a split that is not known."""
    pre = file.metadata.get(PRE)
    if pre is None:
        return _split_without_name(file, bos_token)
    return SPLITS.get(pre) if isinstance(pre, str) else None


def _split_without_name(file: GgufFile, bos_token: str | None) -> Split:
    if file.metadata.get("general.architecture") == "qwen2":  # all its models of that time share one tokenizer
        return SPLITS["qwen2"]
    if bos_token == "<|begin_of_text|>":
        return _LLAMA_3
    logger.warning(
        "%s has no %s: texts are split as llama.cpp splits them then, which may not be as the model has learned it; put the "
        "model's tokenizer.json beside the file, or name its folder or hub id with tokenizer=...",
        file.path,
        PRE,
    )
    return SPLITS[_DEFAULT]
