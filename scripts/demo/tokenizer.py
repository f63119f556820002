"""The embedded model's tokenizer: byte-level BPE trained on generated text, and a ChatML template with tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from inflight.tokenizer.chat_template import ChatTemplate
from scripts.demo.tasks import Message, Tool

PAD_TOKEN, START_TOKEN, END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PAD_TOKEN, START_TOKEN, END_TOKEN)  # removed from decoded text
TOOL_TOKENS = ("<tool_call>", "</tool_call>")  # kept in decoded text, for a tool parser to find
PAD_ID, START_ID, END_ID = range(3)
MAX_LENGTH = 2048

# Qwen's split: a word takes the space before it, every digit stands alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\n' + (system + '\n\n' if system else '') + 'Tools:' }}
{%- for tool in tools %}
{{- '\n' + ((tool.function if tool.function is defined else tool) | tojson) }}
{%- endfor %}
{{- '\nCall a tool with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif system %}
{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set function = call.function if call.function is defined else call %}
{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson %}
{{- '\n' if message.content and loop.first else '' }}
{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' + arguments + '}\n</tool_call>' }}
{{- '' if loop.last else '\n' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


_TEMPLATE = ChatTemplate({"default": CHAT_TEMPLATE})


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = False) -> str:
    return _TEMPLATE.render(messages, tools=tools or None, add_generation_prompt=add_generation_prompt)


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    control_tokens: Sequence[str] = CONTROL_TOKENS,
    kept_tokens: Sequence[str] = TOOL_TOKENS,
) -> Tokenizer:
    """`control_tokens` get the first ids, then `kept_tokens`. Only the former are removed from decoded text."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*control_tokens, *kept_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in control_tokens
    return Tokenizer.from_str(json.dumps(saved))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers and Inflight read."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_TOKEN,
        "pad_token": PAD_TOKEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
