"""`inflight embed`: vectors of a file's rows, as JSON lines and as an array; wrong rows are named, and a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight import LLM
from tests.unit.entrypoints.runner import invoke

TEXTS = ["Anna has a dog.", "What is 2 + 3?", "A story."]
ENGINE = ("--dtype", "float32", "--num-threads", "1", "--max-model-len", "256", "--kv-cache-memory-bytes", "32M")


@pytest.fixture(scope="module")
def expected() -> Iterator[np.ndarray[Any, Any]]:
    with LLM(dtype="float32", num_threads=1, max_model_len=256, kv_cache_memory_bytes=1 << 25) as llm:
        yield np.array([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_and_going_on(tmp_path: Path, expected: np.ndarray[Any, Any]) -> None:
    rows: list[object] = [
        {"text": TEXTS[0]},
        {"id": "b", "text": ""},
        {"text": TEXTS[1], "x": 1},
        {"id": 7, "text": TEXTS[1]},
    ]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert invoke(["embed", "-i", str(source), "-o", str(target), *ENGINE]).exit_code == 0
    found = {row["row"]: row for row in read(target)}
    np.testing.assert_allclose(found[1]["embedding"], expected[0], atol=1e-6)
    np.testing.assert_allclose(found[4]["embedding"], expected[1], atol=1e-6)
    assert found[4]["id"] == 7 and found[1]["num_prompt_tokens"] > 3
    assert "the prompt is empty" in found[2]["error"] and "unknown key 'x'" in found[3]["error"]
    write(source, [*rows, {"text": TEXTS[2]}])
    assert invoke(["embed", "-i", str(source), "-o", str(target), *ENGINE]).exit_code == 0
    assert [row["row"] for row in read(target)][-1] == 5 and len(read(target)) == 5


def test_an_array(tmp_path: Path, expected: np.ndarray[Any, Any]) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": TEXTS[0]}, {"text": 3}, {"text": TEXTS[1]}])
    target = tmp_path / "vectors.npy"
    assert invoke(["embed", "-i", str(source), "-o", str(target), *ENGINE]).exit_code == 0
    array = np.load(target)
    assert array.dtype == np.float32 and np.isnan(array[1]).all()
    np.testing.assert_allclose(array[[0, 2]], expected[:2], atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "vectors.npy"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-i", "nothing.jsonl"], "there is no such file"),
        (["-i", "-", "-o", "x.npy"], "can be read only once"),
        (["-i", __file__, "-o", "-", "--dimensions", "0"], "dimensions=0"),
        (["-i", __file__, "-o", "-", "--prompt-name", "query", *ENGINE], "prompt_name='query' is not a prompt"),
    ],
)
def test_what_is_wrong_is_refused(arguments: list[str], text: str) -> None:
    result = invoke(["embed", *arguments])
    assert result.exit_code == 2 and text in result.output.replace("\n", " ")
