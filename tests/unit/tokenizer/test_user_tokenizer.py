"""`UserTokenizer` against the tokenizer of transformers on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.errors import InvalidRequestError
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.user_tokenizer import UserTokenizer
from tests.support.fakes_tokenizer import BOS, EOS, USER, save_folder

TEXTS = ["Once upon a time", f"naïve 🙂 {USER} b {EOS}", ""]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}"
    "{{ mood }}{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": "a time"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def both(folder: Path, kind: str = "byte_level") -> tuple[UserTokenizer, Any]:
    from transformers import AutoTokenizer

    save_folder(folder, kind, chat_template=TEMPLATE)
    ours = UserTokenizer(folder_tokenizer(folder), ChatTemplate.from_folder(folder))
    return ours, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_texts_and_tokens(tmp_path: Path, kind: str) -> None:
    ours, theirs = both(tmp_path, kind)
    assert ours(TEXTS) == {name: theirs(TEXTS)[name] for name in ("input_ids", "attention_mask")}
    for text in TEXTS:
        assert ours.tokenize(text) == theirs.tokenize(text)
        for add in (False, True):
            whole = theirs(text, add_special_tokens=add)
            assert ours(text, add_special_tokens=add) == {name: whole[name] for name in ("input_ids", "attention_mask")}
            assert ours([text], add_special_tokens=add)["input_ids"] == [ours.encode(text, add_special_tokens=add)]
            assert ours.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
        assert ours(text) == ours(text, add_special_tokens=True)
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
            assert ours.batch_decode([ids, ids[:2]], skip) == [theirs.decode(row, skip) for row in (ids, ids[:2])]
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.batch_decode([ids]) == [theirs.decode(ids)]
    assert ours.decode(ours.eos_token_id) == theirs.decode(theirs.eos_token_id) == EOS


def test_the_vocabulary(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, "byte_fallback")
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    tokens = [*theirs.convert_ids_to_tokens(range(250, 400)), USER]
    ids = theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_ids_to_tokens(ids) == tokens
    assert ours.convert_tokens_to_ids(tokens) == ids
    assert ours.convert_tokens_to_ids(USER) == theirs.convert_tokens_to_ids(USER)
    for unknown in ("no such token", ["no such token", USER]):
        assert ours.convert_tokens_to_ids(unknown) == theirs.convert_tokens_to_ids(unknown)
    assert ours.convert_ids_to_tokens([len(ours) + 1]) == [""]
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == (theirs.bos_token, theirs.eos_token, theirs.unk_token)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    with pytest.raises(AttributeError):
        _ = ours.no_such_attribute


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tools": [TOOL]},
        {"mood": "merry", "add_generation_prompt": True},
    ],
)
def test_conversations(tmp_path: Path, options: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path)
    text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert ours.apply_chat_template(MESSAGES, tokenize=False, **options) == text
    ids = ours.apply_chat_template(MESSAGES, **options)
    assert ids == theirs.apply_chat_template(MESSAGES, return_dict=False, **options)
    assert ids.count(ours.bos_token_id) == 1


def test_a_model_without_a_template(tmp_path: Path) -> None:
    tokenizer = UserTokenizer(folder_tokenizer(save_folder(tmp_path, "byte_level")), None)
    assert tokenizer.bos_token == BOS
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)
