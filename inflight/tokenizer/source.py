"""Finds and reads the tokenizer and the chat template of a model: in a folder, by a hub id, or in a GGUF file."""

from pathlib import Path

from inflight.config.gguf_parts import read_gguf
from inflight.config.sentence_transformers import lowers_case
from inflight.damaged_files import named_errors
from inflight.errors import TokenizerError
from inflight.hub import resolve_tokenizer_folder
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.gguf_tokenizer import check_tokens, gguf_chat_template, gguf_tokenizer
from inflight.tokenizer.lower_case import LowerCaseTokenizer
from inflight.tokenizer.tokenizer import Tokenizer


def read_tokenizer(model_folder: Path, tokenizer: str | None) -> Tokenizer:
    """Read the model's own tokenizer, or the tokenizer of another folder or hub id.

    Raises:
        ConfigError: there is no tokenizer, or it cannot be read.
    """
    source = _source(model_folder, tokenizer)
    with named_errors(TokenizerError, source, "its tokenizer"):
        if source.is_file():
            return gguf_tokenizer(read_gguf(source))
        found = folder_tokenizer(source, LowerCaseTokenizer if lowers_case(model_folder) else Tokenizer)
        if tokenizer is None and model_folder.is_file():
            check_tokens(read_gguf(model_folder), found, source)
        return found


def read_chat_template(
    model_folder: Path, tokenizer: str | None, given: str | None, image_token: str = ""
) -> ChatTemplate:
    """Read the chat template of the tokenizer. If `given` (Jinja text, or a file) is not None, it is used instead.
    `image_token`: the model's token for an image, as text; "" if it reads none.

    Raises:
        ConfigError: the template cannot be read, or is not valid.
    """
    source = _source(model_folder, tokenizer)
    with named_errors(TokenizerError, source, "its chat template"):
        if source.is_file():
            return gguf_chat_template(read_gguf(source), given, image_token)
        return ChatTemplate.from_folder(source, given, image_token)


def _source(model_folder: Path, tokenizer: str | None) -> Path:
    """The folder of the tokenizer, or a GGUF file that has no tokenizer.json beside it."""
    source = model_folder if tokenizer is None else resolve_tokenizer_folder(tokenizer)
    if source.is_file() and (source.parent / "tokenizer.json").is_file():
        return source.parent
    return source
