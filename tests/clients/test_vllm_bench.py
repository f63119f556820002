"""vLLM's `bench serve`. It has an environment of its own, because it needs torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conversations import MODEL

VLLM_PYTHON = os.environ["INFLIGHT_CLIENT_TESTS_VLLM"]
SCRIPT = Path(__file__).with_name("vllm_bench_serve.py")
TOKENIZER = Path(__file__).resolve().parents[2] / "inflight" / "demo" / "model"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve(url: str, api_key: str, tmp_path: Path, backend: str) -> None:
    num_prompts, output_len = 8, 16
    path = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    command = [VLLM_PYTHON, str(SCRIPT), "--backend", backend, "--base-url", url, "--endpoint", path]
    command += ["--model", MODEL, "--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", "32", "--random-output-len", str(output_len), "--num-prompts", str(num_prompts)]
    command += ["--max-concurrency", "4", "--disable-tqdm", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "result.json"]
    environment = {**os.environ, "OPENAI_API_KEY": api_key, "HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == num_prompts
    assert result["total_output_tokens"] == num_prompts * output_len
    assert result["mean_ttft_ms"] > 0
    assert result["mean_tpot_ms"] > 0
    # Each token has its chunk, so TTFT and the times between chunks are right. Under load two tokens may share a chunk.
    for gaps in result["itls"]:
        assert output_len / 2 <= len(gaps) + 1 <= output_len + 1
