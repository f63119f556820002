"""What generation_config.json says counts where a request says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx

from inflight.hub import EMBEDDED_MODEL
from tests.e2e.openai_server import demo_args, running_server


def test_the_models_own_max_new_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3}))
    chat = {"messages": [{"role": "user", "content": "What is 7 + 5?"}], "ignore_eos": True}

    def tokens(client: httpx.Client, **more: Any) -> int:
        body = client.post("/v1/chat/completions", json={**chat, **more, "model": None}).json()
        count: int = body["usage"]["completion_tokens"]
        assert body["choices"][0]["finish_reason"] == "length"
        return count

    with (
        running_server(demo_args(model=str(folder), max_model_len=64)) as running,
        httpx.Client(base_url=running.url, timeout=30) as client,
    ):
        assert tokens(client) == 3
        assert tokens(client, max_tokens=5) == 5
        lengths = {client.post("/tokenize", json=_chat("x" * count)).json()["count"]: count for count in range(64)}
        nearly_full = _chat("x" * lengths[62])
        assert tokens(client, **nearly_full) == 2, "the default gives way to the room that is left"
        assert tokens(client, **nearly_full, max_tokens=5000) == 2


def _chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}
