"""From where a tokenizer and a chat template are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.errors import ModelNotFoundError, TokenizerError
from inflight.tokenizer.source import read_chat_template, read_tokenizer
from tests.support.fakes_tokenizer import save_folder
from tests.support.gguf_files import Number, write_gguf

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(model_folder: Path, tokenizer: str | None, given: str | None = None) -> str:
    return read_chat_template(model_folder, tokenizer, given).render(MESSAGES, add_generation_prompt=False)


def test_a_folder_of_its_own_counts_before_the_models(tmp_path: Path) -> None:
    model = save_folder(tmp_path / "model", "byte_level", chat_template="model {{ messages[0].content }}")
    other = save_folder(tmp_path / "other", "metaspace", chat_template="other {{ messages[0].content }}")
    sizes = [read_tokenizer(model, name).vocab_size for name in (None, str(other), str(model))]
    assert sizes[0] == sizes[2] > sizes[1]
    assert [render(model, name) for name in (None, str(other))] == ["model Hi", "other Hi"]
    assert [render(model, name, "given {{ messages[0].role }}") for name in (None, str(other))] == ["given user"] * 2
    with pytest.raises(ModelNotFoundError):
        read_tokenizer(model, str(tmp_path / "absent"))


def test_a_gguf_file_and_a_folder_beside_it(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": Number("i", [1, 1, 1]),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "file {{ messages[0].content }}",
    }
    model = write_gguf(tmp_path / "model.gguf", metadata, {})
    assert read_tokenizer(model, None).encode("ab") == [2]
    assert render(model, None) == "file Hi"
    assert render(model, None, "given {{ messages[0].role }}") == "given user"
    save_folder(tmp_path, "byte_level", chat_template="folder {{ messages[0].content }}")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json is not of the model in .*model\.gguf: token 0 is .* and 'a' here"
    ):
        read_tokenizer(model, None)
    assert read_tokenizer(model, str(tmp_path)).vocab_size > 3  # the user has named it
    vocabulary = read_tokenizer(tmp_path, None).vocabulary()
    same = sorted(vocabulary, key=vocabulary.__getitem__)
    types = Number("i", [1] * len(same))
    write_gguf(model, {**metadata, "tokenizer.ggml.tokens": same, "tokenizer.ggml.token_type": types}, {})
    assert read_tokenizer(model, None).vocab_size == len(same) > 3
    assert render(model, None) == "folder Hi"


def test_a_template_that_is_not_valid_is_named_in_one_line(tmp_path: Path) -> None:
    save_folder(tmp_path, "byte_level", chat_template="{{ messages }}\n{% for")
    with pytest.raises(TokenizerError, match="'default' is not valid, line 2: ") as refused:
        render(tmp_path, None)
    assert str(refused.value).startswith(f"{tmp_path}: ") and "\n" not in str(refused.value)
    assert render(tmp_path, None, "{{ messages[0].content }}") == "Hi"
    with pytest.raises(TokenizerError, match=r"^the chat template 'default'"):
        render(tmp_path, None, "{% for")
