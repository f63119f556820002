"""The requests that the load generator sends: random token ids of the wanted lengths, or the prompts of a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inflight.errors import ConfigError
from inflight_bench.options import DatasetOptions

Messages = list[dict[str, Any]]  # Any: JSON

# No lognormal length is more than this many times the mean, so that one request does not last for most of the run.
LOGNORMAL_LIMIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """`prompt` is token ids, a text, or the messages of a chat. `num_prompt_tokens` is None if only the server knows it."""

    prompt: list[int] | str | Messages
    max_tokens: int
    num_prompt_tokens: int | None = None


def draw_lengths(mean: int, options: DatasetOptions, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` lengths in tokens, each at least 1. Their average is about `mean`."""
    if sigma := options.lognormal_sigma:
        drawn = mean * rng.lognormal(-sigma * sigma / 2, sigma, count)
        lengths = np.clip(np.rint(drawn), 1, LOGNORMAL_LIMIT * mean)
    else:
        low = max(1, int(mean * (1 - options.range_ratio)))
        high = max(low, int(mean * (1 + options.range_ratio)))
        lengths = rng.integers(low, high, count, endpoint=True)
    return [int(length) for length in lengths]


def random_requests(
    count: int, token_ids: Sequence[int], options: DatasetOptions, rng: np.random.Generator
) -> list[BenchRequest]:
    """Make random prompts. Each is one of `num_prefixes` prefixes, followed by about `input_len` ids. All ids are drawn from
    `token_ids`."""
    alphabet = np.asarray(token_ids)
    prefixes = rng.choice(alphabet, (options.num_prefixes, options.prefix_len)).tolist()
    inputs, outputs = (draw_lengths(mean, options, count, rng) for mean in (options.input_len, options.output_len))
    chosen = rng.integers(0, options.num_prefixes, count).tolist()
    requests = []
    for prefix, input_len, output_len in zip(chosen, inputs, outputs, strict=True):
        prompt = prefixes[prefix] + rng.choice(alphabet, input_len).tolist()
        requests.append(BenchRequest(prompt=prompt, max_tokens=output_len, num_prompt_tokens=len(prompt)))
    return requests


def custom_requests(path: Path, count: int, max_tokens: int) -> list[BenchRequest]:
    """Read a file of JSON lines. Each line has `prompt` (a text or token ids) or `messages`, and may have `output_tokens`.

    If a line has no `output_tokens`, the request asks for `max_tokens`. If there are too few lines, they are repeated.

    Raises:
        ConfigError: the file cannot be read or has no prompts, or the form of a line is wrong.
    """
    rows = []
    for number, line in enumerate(_read(path).split("\n"), 1):  # `splitlines` would cut JSON at U+2028
        if line.strip():
            rows.append(_custom_request(_json(line, f"{path}, line {number},"), f"{path}, line {number},", max_tokens))
    return _cycle(rows, count, path)


def sharegpt_requests(path: Path, count: int, max_tokens: int) -> list[BenchRequest]:
    """Use the first turn of each conversation in a ShareGPT file: `[{"conversations": [{"from", "value"}, ...]}, ...]`.

    Raises:
        ConfigError: the file cannot be read or has no prompts, or its form is wrong.
    """
    document = _json(_read(path), str(path))
    if not isinstance(document, list):
        raise ConfigError(f"{path} is not a list of conversations, as a ShareGPT file must be")
    texts = []
    for index, entry in enumerate(document):
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f"{path}: entry {index} has no list named 'conversations'")
        if turns and isinstance(turns[0], dict) and isinstance(turns[0].get("value"), str) and turns[0]["value"]:
            texts.append(turns[0]["value"])
    return _cycle([BenchRequest(prompt=text, max_tokens=max_tokens) for text in texts], count, path)


def _custom_request(row: Any, where: str, max_tokens: int) -> BenchRequest:  # Any: JSON
    row = row if isinstance(row, dict) else {}
    prompt, output_tokens = row.get("prompt", row.get("messages")), row.get("output_tokens", max_tokens)
    if not isinstance(output_tokens, int) or isinstance(output_tokens, bool) or output_tokens < 1:
        raise ConfigError(f"{where} has output_tokens={output_tokens!r}, which is not a positive integer")
    if isinstance(prompt, str) and prompt:
        return BenchRequest(prompt=prompt, max_tokens=output_tokens)
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return BenchRequest(prompt=prompt, max_tokens=output_tokens, num_prompt_tokens=len(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt):
        return BenchRequest(prompt=prompt, max_tokens=output_tokens)
    raise ConfigError(f"{where} has neither a prompt (a text or token ids) nor messages")


def _cycle(rows: list[BenchRequest], count: int, path: Path) -> list[BenchRequest]:
    if not rows:
        raise ConfigError(f"--dataset-path {path} has no prompts")
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
