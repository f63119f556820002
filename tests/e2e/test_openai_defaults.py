"""What generation_config.json says counts where a request says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx

from inflight.hub import EMBEDDED_MODEL
from tests.e2e.openai_server import demo_args, running_server


def test_the_models_own_max_new_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    chat = {"messages": [{"role": "user", "content": "What is 7 + 5?"}], "ignore_eos": True}

    def tokens(client: httpx.Client, **more: int) -> int:
        body = client.post("/v1/chat/completions", json={**chat, **more, "model": None}).json()
        count: int = body["usage"]["completion_tokens"]
        return count

    with (
        running_server(demo_args(model=str(folder))) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
    ):
        assert tokens(client) == 3
        assert tokens(client, max_tokens=5) == 5
