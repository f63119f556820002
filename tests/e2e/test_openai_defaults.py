"""What generation_config.json says counts where a request says nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from inflight.engine.serving.async_llm import AsyncLLM
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
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        assert tokens(client) == 3
        assert tokens(client, max_tokens=5) == 5
        lengths = {client.post("/tokenize", json=_chat("x" * count)).json()["count"]: count for count in range(64)}
        nearly_full = _chat("x" * lengths[62])
        assert tokens(client, **nearly_full) == 2, "the default gives way to the room that is left"
        assert tokens(client, **nearly_full, max_tokens=5000) == 2


def _chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_only_a_chat_that_may_think_waits_for_the_end_of_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    submit_all = AsyncLLM.submit_all

    def recorded(self: AsyncLLM, requests: Any, **options: Any) -> Any:
        waits.extend(bool(each.sequences[0].sampling.answer_frame) for each in requests)
        return submit_all(self, requests, **options)

    monkeypatch.setattr(AsyncLLM, "submit_all", recorded)
    shape: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 3}
    answer = {"messages": [*_chat("Is it?")["messages"], {"role": "assistant", "content": "I say"}]}
    with (
        running_server(demo_args(reasoning_end=";;")) as running,
        httpx.Client(base_url=running.url, timeout=300) as client,
    ):
        for path, body, wanted in (
            ("completions", {"prompt": "Is it?"}, False),
            ("chat/completions", _chat("Is it?"), True),
            ("chat/completions", {**answer, "continue_final_message": True, "add_generation_prompt": False}, False),
        ):
            waits.clear()
            response = client.post(f"/v1/{path}", json={**shape, **body})
            assert response.status_code == 200, response.text
            assert waits == [wanted], body
