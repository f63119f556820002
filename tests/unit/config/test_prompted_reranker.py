"""Which models are known as Qwen3-Reranker by their names."""

import pytest

from inflight.config.prompted_reranker import is_qwen3_reranker


@pytest.mark.parametrize(
    ("model", "base", "expected"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3", True),
        ("/models/qwen3-reranker-8b-awq/", "Qwen3", True),
        ("/cache/models--Qwen--Qwen3-Reranker-4B/snapshots/0123", "Qwen3", True),
        ("C:\\models\\Qwen3-Reranker-0.6B-Q8_0.gguf", "Qwen3", True),
        ("/qwen3-reranker-4b-tests/Qwen3-0.6B", "Qwen3", False),
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen2", False),
        ("Qwen/Qwen3-0.6B", "Qwen3", False),
        ("", "Qwen3", False),
    ],
)
def test_names(model: str, base: str, expected: bool) -> None:
    assert is_qwen3_reranker(model, base) is expected
