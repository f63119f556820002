"""The commands of README.md and docs/: how they are found in a page, and the folder in which they run.

A page's fenced blocks are read in order. A block marked `sh` is cut into commands; a `python` block is one script. A command
that serves is started in the background, and the commands after it find the server on its port.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from scripts.demo.vision.folder import make_config, make_tokenizer
from scripts.demo.vision.train import Trainer, export, make_model
from tests.support import gguf_models
from tests.support.gguf_files import Number, floats, write_gguf

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.md")])
LANGUAGES = frozenset({"sh", "python", "text", "json", "yaml", "js", "ini", "nginx", "toml"})
EMBEDDED_MODEL = ROOT / "inflight" / "demo" / "model"
COMMIT = "0" * 40

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_NOT_RUN = re.compile(r"^ *<!-- (?:not run:|run by) (.+?)\s*-->$")
_SERVES = re.compile(r"^(?:\w+=\S+ )*inflight serve\b(?!.*(--check|--help|--version))", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """
    Attributes:
        line: of its opening fence, from 1.
        language: the word behind the fence; empty if there is none.
        not_run: why the commands cannot run in a test, or which test runs them; empty if they run here.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        indent, language = opening.groups()
        marked = _NOT_RUN.match(lines[number - 1]) if number else None
        reason = marked.group(1) if marked else ""
        end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
        text = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        found.append(Block(name, number + 1, language, text, reason))
        number = end + 1
    return found


def commands_of(block: Block) -> list[str]:
    """The commands of an `sh` block: a line each, or several lines that a backslash, a quote or a here-document joins."""
    commands: list[str] = []
    pending = ""
    for line in block.text.splitlines(keepends=True):
        pending += line
        if pending.rstrip("\n").endswith("\\"):
            continue
        parsed = subprocess.run(["bash", "-n"], input=pending, capture_output=True, text=True)
        if parsed.returncode != 0 or "here-document" in parsed.stderr:
            continue
        if any(each.strip() and not each.lstrip().startswith("#") for each in pending.splitlines()):
            commands.append(pending.strip())
        pending = ""
    assert not pending.strip(), f"{block.page}:{block.line}: bash cannot read: {pending}"
    return commands


def serves(command: str) -> bool:
    return _SERVES.match(command) is not None


def port_of(command: str) -> int:
    found = re.search(r"--port[ =](\d+)", command)
    return int(found.group(1)) if found else 8000


def indented_commands(page: Path) -> Iterator[str]:
    """Lines of indented code that hold a command, outside fences: they would not be run."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced and re.match(r"^ {4}(inflight|python|pip|make|curl|docker) ", line):
            yield f"{page.name}:{number}: {line.strip()}"


def make_workspace(folder: Path, gguf: Path) -> Path:
    """A folder that looks like the repository's root and has the models that pages name. `gguf`: the embedded model."""
    workspace = folder / "workspace"
    workspace.mkdir(parents=True)
    for each in ROOT.iterdir():
        if each.name not in {".git", ".pytest_cache", ".hypothesis"}:
            (workspace / each.name).symlink_to(each)
    shutil.copytree(EMBEDDED_MODEL, workspace / "my-model")
    shutil.copy(gguf, workspace / "my-model.gguf")
    return workspace


def make_hub(cache: Path, hub_ids: dict[str, list[str]], gguf: Path) -> None:
    """Put the embedded model into a cache of the hub.

    Args:
        gguf: the embedded model.
        hub_ids: repository of the hub -> its GGUF files; none: it holds safetensors.
    """
    for name, files in hub_ids.items():
        repository = cache / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / COMMIT
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        if files:
            snapshot.mkdir(parents=True)
            for file in files:
                shutil.copy(gguf, snapshot / file)
        else:
            shutil.copytree(EMBEDDED_MODEL, snapshot)


def write_model_of_drawings(folder: Path) -> None:
    """What `python -m scripts.demo.vision.train` writes, with weights that are not trained."""
    folder.parent.mkdir(parents=True)
    export(Trainer(make_model(make_config()), make_tokenizer(), num_steps=1), folder)


def write_embedded_gguf(path: Path) -> Path:
    """The embedded model as a GGUF file in 16 bits, with its tokenizer and its chat template."""
    config = AutoConfig.from_pretrained(EMBEDDED_MODEL)
    tokenizer = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    settings = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_text())
    added = {each["content"]: each["special"] for each in tokenizer["added_tokens"]}
    vocabulary = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    metadata: dict[str, Any] = {
        **gguf_models.metadata_of("qwen3", config),
        "general.name": "embedded",
        "qwen3.context_length": Number("I", config.max_position_embeddings),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Number("i", [{None: 1, True: 3, False: 4}[added.get(token)] for token in tokens]),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": Number("I", config.eos_token_id),
        "tokenizer.chat_template": settings["chat_template"],
    }
    metadata.pop("tokenizer.ggml.bos_token_id")
    tensors = {}
    for name, weight in load_file(EMBEDDED_MODEL / "model.safetensors").items():
        *_, module, suffix = name.split(".")
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        dtype = torch.bfloat16 if weight.dim() == 2 else torch.float32
        tensors[f"{layer}{gguf_models.NAMES[module]}.{suffix}"] = floats(weight.to(dtype))
    return write_gguf(path, metadata, tensors)
