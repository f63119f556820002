"""What is sent: prompts of random token ids with the lengths asked for, or those of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inflight.errors import ConfigError

Messages = list[dict[str, Any]]  # Any: JSON

# Long tails are cut here, in means: a single prompt must not be the whole run.
LOGNORMAL_LIMIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """`prompt`: token ids, a text, or a chat's messages; `num_prompt_tokens` is None where only the server can tell."""

    prompt: list[int] | str | Messages
    max_tokens: int
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Of mean about `mean`: uniform within `mean` x (1 +- range_ratio), or lognormal where `lognormal_sigma` is positive."""

    mean: int
    range_ratio: float = 0.0
    lognormal_sigma: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio {self.range_ratio} must be at least 0 and less than 1")
        if self.lognormal_sigma < 0:
            raise ConfigError(f"--lognormal-sigma {self.lognormal_sigma} must not be negative")
        if self.range_ratio and self.lognormal_sigma:
            raise ConfigError("lengths are uniform (--range-ratio) or lognormal (--lognormal-sigma), not both")

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Each at least 1."""
        if self.lognormal_sigma:
            sigma = self.lognormal_sigma
            drawn = self.mean * rng.lognormal(-sigma * sigma / 2, sigma, count)
            lengths = np.clip(np.rint(drawn), 1, LOGNORMAL_LIMIT * self.mean)
        else:
            low = max(1, int(self.mean * (1 - self.range_ratio)))
            high = max(low, int(self.mean * (1 + self.range_ratio)))
            lengths = rng.integers(low, high, count, endpoint=True)
        return [int(length) for length in lengths]


def random_requests(
    count: int,
    token_ids: Sequence[int],
    input_lengths: Lengths,
    output_lengths: Lengths,
    rng: np.random.Generator,
    *,
    prefix_len: int = 0,
    num_prefixes: int = 1,
) -> list[BenchRequest]:
    """Prompts of ids out of `token_ids`: one of `num_prefixes` prefixes, then as many more as `input_lengths` says."""
    alphabet = np.asarray(token_ids)
    prefixes = rng.choice(alphabet, (num_prefixes, prefix_len)).tolist()
    inputs, outputs = input_lengths.draw(count, rng), output_lengths.draw(count, rng)
    chosen = rng.integers(0, num_prefixes, count).tolist()
    requests = []
    for prefix, input_len, output_len in zip(chosen, inputs, outputs, strict=True):
        prompt = prefixes[prefix] + rng.choice(alphabet, input_len).tolist()
        requests.append(BenchRequest(prompt=prompt, max_tokens=output_len, num_prompt_tokens=len(prompt)))
    return requests


def custom_requests(path: Path, count: int, max_tokens: int) -> list[BenchRequest]:
    """JSON lines of `prompt` (a text or token ids) or `messages`, each with `output_tokens` if not `max_tokens`.

    The file is read over and over until there are `count`.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is something else.
    """
    rows = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            rows.append(_custom_request(_json(line, f"{path}, line {number},"), f"{path}, line {number},", max_tokens))
    return _cycle(rows, count, path)


def sharegpt_requests(path: Path, count: int, max_tokens: int) -> list[BenchRequest]:
    """The first thing said in each conversation of a ShareGPT file: `[{"conversations": [{"from", "value"}, ...]}, ...]`.

    Raises:
        ConfigError: the file cannot be read, or is something else.
    """
    document = _json(_read(path), str(path))
    if not isinstance(document, list):
        raise ConfigError(f"{path} is no list of conversations")
    texts = []
    for index, entry in enumerate(document):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"{path}: entry {index} has no list of conversations")
        if turns and isinstance(turns[0], dict) and isinstance(turns[0].get("value"), str) and turns[0]["value"]:
            texts.append(turns[0]["value"])
    return _cycle([BenchRequest(prompt=text, max_tokens=max_tokens) for text in texts], count, path)


def _custom_request(row: Any, where: str, max_tokens: int) -> BenchRequest:  # Any: JSON
    row = row if isinstance(row, dict) else {}
    prompt, output_tokens = row.get("prompt", row.get("messages")), row.get("output_tokens", max_tokens)
    if not isinstance(output_tokens, int) or isinstance(output_tokens, bool) or output_tokens < 1:
        raise ConfigError(f"{where} has output_tokens={output_tokens!r}, which is no positive integer")
    if isinstance(prompt, str) and prompt:
        return BenchRequest(prompt=prompt, max_tokens=output_tokens)
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return BenchRequest(prompt=prompt, max_tokens=output_tokens, num_prompt_tokens=len(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt):
        return BenchRequest(prompt=prompt, max_tokens=output_tokens)
    raise ConfigError(f"{where} has neither a prompt (a text or token ids) nor messages")


def _cycle(rows: list[BenchRequest], count: int, path: Path) -> list[BenchRequest]:
    if not rows:
        raise ConfigError(f"{path} has no prompts")
    return [rows[index % len(rows)] for index in range(count)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}") from error


def _json(text: str, where: str) -> Any:  # Any: JSON
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
