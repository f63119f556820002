from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from inflight.hub import EMBEDDED_MODEL
from scripts.demo.tasks import KINDS, draw
from scripts.demo.tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, TOOL_TOKENS, render, save_tokenizer, train_tokenizer

CALL = {"function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {}}}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    rng = Random(0)
    return train_tokenizer((render(draw(kind, rng, False).messages) for kind in KINDS for _ in range(20)), 400)


def test_a_conversation_is_rendered_as_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_follow_the_system_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = render(messages, [TOOL])
    assert text.count("system") == 1 and 'Be brief.\n\nTools:\n{"name": "get_time", "parameters": {}}\nCall' in text


@pytest.mark.parametrize("arguments", [{"city": "Oslo"}, '{"city": "Oslo"}'])
def test_arguments_of_a_call_may_be_json_text(arguments: object) -> None:
    call = {"function": {"name": "get_time", "arguments": arguments}}
    text = render([{"role": "assistant", "content": None, "tool_calls": [call]}])
    expected = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert text == f"<|im_start|>assistant\n{expected}<|im_end|>\n"


def test_two_calls_after_text_stand_on_their_own_lines() -> None:
    text = render([{"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]}])
    assert "Wait.\n<tool_call>" in text and "</tool_call>\n<tool_call>" in text


def test_digits_and_control_tokens_stand_alone(trained: Tokenizer) -> None:
    tokens = trained.encode("<|im_start|>user\n2026<tool_call><|im_end|>").tokens
    assert tokens[0] == "<|im_start|>" and tokens[-6:] == ["2", "0", "2", "6", "<tool_call>", "<|im_end|>"]


def test_text_survives_the_round_trip(trained: Tokenizer) -> None:
    text = "Grüße, 世界 🙂\n\n  1 + 2"
    assert trained.decode(trained.encode(text).ids) == text


def test_decoding_keeps_tool_tokens_only(trained: Tokenizer) -> None:
    assert trained.decode(trained.encode("".join((*CONTROL_TOKENS, *TOOL_TOKENS))).ids) == "".join(TOOL_TOKENS)


def test_saved_files_hold_template_and_tokens(trained: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(trained, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE and config["eos_token"] == "<|im_end|>"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("Hi 12").ids == trained.encode("Hi 12").ids


def test_transformers_renders_the_shipped_template_alike() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    rng = Random(1)
    for kind in KINDS:
        sample = draw(kind, rng, False)
        ours = render([*sample.messages, sample.answer], sample.tools)
        assert ours == tokenizer.apply_chat_template(
            [*sample.messages, sample.answer], tools=list(sample.tools) or None, tokenize=False
        )
