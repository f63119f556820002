"""Offline generation needs none of the packages that the server, the command line or the benchmarks are made of."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = (
    "fastapi starlette pydantic uvicorn httptools uvloop yaml prometheus_client opentelemetry aiohttp matplotlib typer click "
    "msgspec llguidance transformers xxhash redis obstore"
).split()

SCRIPT = """
import importlib.abc
import sys


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"{name} is hidden")


sys.meta_path.insert(0, Hidden())
from inflight import LLM, SamplingParams

with LLM(num_threads=1, kv_cache_memory_bytes=1 << 24) as llm:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    print(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)[0].outputs[0].text)
"""


def test_offline_generation_without_the_packages_of_the_server() -> None:
    names = [*HIDDEN, "sympy"]  # torch imports sympy in some calls, which takes 1 s; a new rank must start fast
    result = subprocess.run([sys.executable, "-c", SCRIPT, *names], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "5" in result.stdout


GPU_SCRIPT = (
    SCRIPT[: SCRIPT.index("from inflight import")]
    + """
import inflight.attention.triton_paged
import inflight.device.cuda
import inflight.kernels.triton.layer_ops
import inflight.layers.gpu_linear
import inflight.worker.gpu.graph_model_runner
"""
)


def test_what_a_gpu_needs_without_the_packages_of_the_server() -> None:
    result = subprocess.run([sys.executable, "-c", GPU_SCRIPT, *HIDDEN], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
