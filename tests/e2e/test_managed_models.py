"""A server with several models: they are pulled and deleted by requests, from a hub on this machine; one that does not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.hub import EMBEDDED_MODEL
from tests.e2e.serve_process import ServeProcess, serving
from tests.support.local_hub import LocalHub, local_hub

NAME = "org/tiny"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHub]:
    folder = tmp_path_factory.mktemp("hub")
    for name in (NAME, "org/other"):
        shutil.copytree(EMBEDDED_MODEL, folder / name)
    with local_hub(folder) as made:
        yield made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hub: LocalHub, cache: Path) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "chat").symlink_to(EMBEDDED_MODEL)
    (folder / "presets.ini").write_text(
        "[*]\nctx-size = 128\nkv-cache-memory-bytes = 16M\nnum-threads = 1\n"
        f"[huge]\nmodel = {EMBEDDED_MODEL}\nkv-cache-memory-bytes = 1048576G\n"
    )
    options = ["--models-dir", str(folder), "--models-preset", str(folder / "presets.ini"), "--models-max", "2"]
    variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    with serving(*options, "--enable-model-management", has_name=False, **variables) as made:
        yield made
        made.end_and_leave_nothing()


def names(server: ServeProcess) -> dict[str, str]:
    found: Any = json.loads(server.request("GET", "/v1/models")[1])
    return {each["id"]: each["status"]["value"] for each in found["data"]}


def complete(server: ServeProcess, model: str) -> tuple[int, Any]:
    status, text = server.request("POST", "/v1/completions", {"model": model, "prompt": "Once", "max_tokens": 2})
    return status, json.loads(text)


def test_a_model_is_pulled_served_and_deleted(server: ServeProcess, hub: LocalHub, cache: Path) -> None:
    assert complete(server, NAME)[0] == 404
    status, text = server.request("POST", "/api/pull", {"model": NAME})
    assert status == 200
    states = [json.loads(line) for line in text.splitlines()]
    assert states[0] == {"status": "pulling manifest"} and states[-1] == {"status": "success"}
    assert "model.safetensors" in hub.sent and NAME in names(server)
    hub.sent.clear()
    assert server.request("POST", "/api/pull", {"model": NAME, "stream": False}) == (200, '{"status": "success"}')
    assert hub.sent == []  # it is there
    status, answer = complete(server, NAME)
    assert (status, answer["model"]) == (200, NAME) and names(server)[NAME] == "loaded"
    assert server.request("DELETE", "/api/delete", {"model": NAME})[0] == 200
    assert NAME not in names(server) and complete(server, NAME)[0] == 404
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "status"), [("org/absent", 404), ("../chat", 400), ("/etc", 400), ("a/b/c", 400), ("plain", 400)]
)
def test_a_pull_that_is_refused(server: ServeProcess, name: str, status: int) -> None:
    found, text = server.request("POST", "/api/pull", {"model": name, "stream": False})
    assert found == status and "error" in json.loads(text)


def test_a_damaged_download_is_no_model(server: ServeProcess, hub: LocalHub) -> None:
    hub.damaged.add("model.safetensors")
    status, text = server.request("POST", "/api/pull", {"model": "org/other", "stream": False})
    assert status == 502 and "model.safetensors" in text
    assert complete(server, "org/other")[0] >= 400
    hub.damaged.clear()
    assert server.request("POST", "/api/pull", {"model": "org/other", "stream": False})[0] == 200
    assert complete(server, "org/other")[0] == 200


def test_a_file_of_the_folder_is_not_deleted(server: ServeProcess) -> None:
    assert server.request("DELETE", "/api/delete", {"model": "chat"})[0] == 403
    assert complete(server, "chat")[0] == 200


def test_a_model_that_does_not_fit_is_a_507_with_both_sizes(server: ServeProcess) -> None:
    assert complete(server, "chat")[0] == 200
    status, answer = complete(server, "huge")
    assert (status, answer["error"]["code"]) == (507, "insufficient_memory")
    assert answer["error"]["message"].count("GiB") >= 2, answer
    assert names(server)["huge"] == "unloaded"
    assert complete(server, "chat")[0] == 200  # it was idle, so it may have been unloaded for the other
