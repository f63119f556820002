"""Writes a model that follows a script, for tests of coding agents: python scripted_model.py FOLDER

The model thinks, calls the program's shell tool, and, when it has the result, answers ANSWER. So a real program runs its whole
loop with a real server, in milliseconds, and always in the same way. The model has one layer, whose weights are zero, so each
token depends only on the token before it. Each piece of a script is one token. Each script has a mark, which is a token, too.
The chat template ends the prompt with the mark of the script for the request's tools. The next token is the first piece.
"""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

ANSWER = "SCRIPTED-ANSWER-42"
MARKER = "marker"  # the file that the shell tool writes
END = "<|im_end|>"
HIDDEN_SIZE = 256  # at least the number of new tokens, because each new token has its own dimension of the hidden state
DEMO = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"  # its tokenizer is extended

# The tools that have scripts: name -> the name of the argument with the command. Some programs' tools also need an argument
# `description`, and others refuse it. So each tool has a second script, with a description.
TOOLS = {
    "exec_command": "cmd",
    "Bash": "command",
    "bash": "command",
    "run_shell_command": "command",
    "execute_bash": "command",
    "run_commands": "commands",
    "shell": "command",
    "get_weather": "city",
}
DESCRIBED = "described "

TEMPLATE = """
{%- set state = namespace(script='text', has_result=false) %}
{%- for tool in tools or [] %}
{{- (tool | tojson) + '\\n' }}
{%- set name = tool.function.name %}
{%- set parameters = tool.function.parameters or {} %}
{%- set name = 'DESCRIBED' + name if (parameters.properties or {}).description is defined else name %}
{%- if state.script == 'text' and name in NAMES %}{%- set state.script = name %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{%- set state.has_result = true %}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{%- set script = 'text' if state.has_result else state.script %}
{%- set silent = enable_thinking is defined and not enable_thinking %}
{{- '<|im_start|>assistant\\n' + ('<|say ' if silent else '<|think ') + script + '|>' }}
{%- endif %}"""


def scripts() -> dict[str, list[str]]:
    """Returns script -> [its thought, the pieces after it]. Equal pieces of different scripts are one token, so they must have
    the same next piece."""
    found = {"text": ["<think>\nText will do.\n</think>\n\n", "SCRIPTED-", "ANSWER-", "42"]}
    for name, argument in TOOLS.items():
        for prefix in ("", DESCRIBED):
            command = f"echo {prefix}{name} | tee {MARKER}"
            value = [command] if argument == "commands" else "Oslo" if argument == "city" else command
            arguments = {argument: value, **({"description": "Write a marker"} if prefix else {})}
            call = f'<tool_call>\n{{"name": "{name}", "arguments": '
            pieces = [f"{call}{json.dumps(arguments)[:-1]}", "}}\n</tool_call>"]
            found[prefix + name] = [f"<think>\nI use {prefix}{name}.\n</think>\n\n", *pieces]
    return found


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    known: dict[str, int] = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    first_new = max([*tokenizer["model"]["vocab"].values(), *known.values()]) + 1
    following: dict[int, int] = {}  # token -> the next one

    def token_of(text: str, *, special: bool = False) -> int:
        if text not in known:
            known[text] = first_new + len(known) - num_known
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
            tokenizer["added_tokens"].append({"id": known[text], "content": text, **flags})
        return known[text]

    num_known = len(known)
    for name, (thought, *pieces) in scripts().items():
        chain = [token_of(f"<|think {name}|>", special=True), *map(token_of, (thought, *pieces)), known[END]]
        following |= dict(pairwise(chain))
        following[token_of(f"<|say {name}|>", special=True)] = chain[2]
    vocab_size = first_new + len(known) - num_known
    assert vocab_size - first_new <= HIDDEN_SIZE
    _write_tokenizer(folder, tokenizer)
    _write_weights(folder, vocab_size, first_new, following)


def _write_tokenizer(folder: Path, tokenizer: object) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    config = json.loads((DEMO / "tokenizer_config.json").read_text("utf-8"))
    names = json.dumps([name for name in scripts() if name != "text"])
    config["chat_template"] = TEMPLATE.replace("DESCRIBED", DESCRIBED).replace("NAMES", names)
    config["model_max_length"] = 131072
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    shutil.copy(DEMO / "generation_config.json", folder)


def _write_weights(folder: Path, vocab_size: int, first_new: int, following: dict[int, int]) -> None:
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    config |= {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    embedding, head = torch.zeros(vocab_size, HIDDEN_SIZE), torch.zeros(vocab_size, HIDDEN_SIZE)
    for token, after in following.items():
        embedding[token, token - first_new] = 1.0
        head[after, token - first_new] = 4.0
    layer = "model.layers.0."
    ones = {"model.norm": HIDDEN_SIZE, f"{layer}input_layernorm": HIDDEN_SIZE}
    ones |= {
        f"{layer}post_attention_layernorm": HIDDEN_SIZE,
        f"{layer}self_attn.q_norm": 32,
        f"{layer}self_attn.k_norm": 32,
    }
    zeros = {"self_attn.q_proj": (64, HIDDEN_SIZE), "self_attn.k_proj": (32, HIDDEN_SIZE)}
    zeros |= {"self_attn.v_proj": (32, HIDDEN_SIZE), "self_attn.o_proj": (HIDDEN_SIZE, 64)}
    zeros |= {"mlp.gate_proj": (64, HIDDEN_SIZE), "mlp.up_proj": (64, HIDDEN_SIZE), "mlp.down_proj": (HIDDEN_SIZE, 64)}
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    weights |= {f"{name}.weight": torch.ones(size) for name, size in ones.items()}
    weights |= {f"{layer}{name}.weight": torch.zeros(shape) for name, shape in zeros.items()}
    halves = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
