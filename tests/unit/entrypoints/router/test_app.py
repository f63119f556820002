"""What the router answers itself, without a process of a model. tests/e2e/test_several_models.py has the processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.response_store.responses import StoredResponses
from inflight.entrypoints.router.app import RouterApp
from inflight.entrypoints.router.catalog import Catalog, FolderGoneError
from inflight.entrypoints.router.command import make_catalog
from inflight.entrypoints.router.descriptions import merge_metrics
from inflight.entrypoints.router.loaded_models import LoadedModels
from inflight.entrypoints.router.presets import Preset
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError
from tests.unit.entrypoints.api_client import serving


def ask(
    folder: Path, method: str, path: str, body: bytes = b"", *, may_manage: bool = False, **headers: str
) -> tuple[int, Any]:
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        models = LoadedModels(ServerSettings(models_dir=str(folder)), EngineArgs(), lambda _: False)
        responses = StoredResponses(ServerSettings(response_store="none"))
        catalog = Catalog(folder, {}, has_cache=False)
        app = RouterApp(catalog, models, responses, may_manage=may_manage, allowed_origins=("https://ours",))
        path_only, _, query = path.partition("?")
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path_only, "query_string": query.encode(), "headers": given}
        await app(scope, receive, send)

    asyncio.run(run())
    content = b"".join(each.get("body", b"") for each in sent)
    return sent[0]["status"], json.loads(content) if content.startswith(b"{") else content.decode()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/modelz", 404),
        ("POST", "/v1/chat", 404),
        ("POST", "/generate", 404),
        ("POST", "/api/create", 404),
        ("GET", "/v1/responses/resp_1/other", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/v1/models/a", 405),
        ("PUT", "/api/chat", 405),
        ("DELETE", "/v1/messages", 405),
        ("OPTIONS", "/v1/completions", 204),
        ("OPTIONS", "/nowhere", 404),
    ],
)
def test_what_no_endpoint_has_is_answered_as_by_a_server_with_one_model(
    folder: Path, method: str, path: str, status: int
) -> None:
    """Also if the body names a model: it is not loaded for that."""
    answers = [ask(folder, method, path), ask(folder, method, path, b'{"model": "a"}')]
    with serving() as api:
        one = api.get(path, method=method)
    assert one.status == status and answers == [(status, one.json if one.text else "")] * 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_models_and_their_states(folder: Path) -> None:
    status, found = ask(folder, "GET", "/v1/models")
    assert status == 200
    assert [(each["id"], each["status"]) for each in found["data"]] == [
        ("a", {"value": "unloaded"}),
        ("b", {"value": "unloaded"}),
    ]
    assert ask(folder, "GET", "/v1/models/b")[1]["id"] == "b"
    assert [each["name"] for each in ask(folder, "GET", "/api/tags")[1]["models"]] == ["a", "b"]
    assert ask(folder, "GET", "/api/ps") == (200, {"models": []})
    assert ask(folder, "GET", "/") == (200, "Ollama is running")
    assert ask(folder, "GET", "/ready") == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "why"),
    [
        ("POST", "/v1/chat/completions", b'{"model": "../a"}', 400, "is a path"),
        ("POST", "/v1/chat/completions", b'{"model": "c"}', 404, "there is no model 'c'"),
        ("POST", "/v1/chat/completions", b'{"model": 3}', 400, "must be a string"),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400, "names no model"),
        ("POST", "/v1/chat/completions", b"[1]", 400, "not a JSON object"),
        ("POST", "/v1/chat/completions", b"{", 400, "not a JSON object"),
        ("GET", "/tokenizer_info?model=c", b"", 404, "there is no model 'c'"),
        ("GET", "/v1/models/../../etc", b"", 400, "is a path"),
        ("POST", "/v1/models/unload", b'{"model": "a"}', 400, "is unloaded, not loaded"),
        ("POST", "/api/chat", b'{"model": "a", "keep_alive": "soon"}', 400, "keep_alive='soon'"),
        ("POST", "/v1/completions", b'{"model": "%s"}' % (b"x" * 100_000), 404, "there is no model 'xxx"),
        ("POST", "/api/pull", b'{"model": "org/x"}', 403, "--enable-model-management"),
        ("DELETE", "/api/delete", b'{"model": "a"}', 403, "--enable-model-management"),
    ],
)
def test_refusals(folder: Path, method: str, path: str, body: bytes, status: int, why: str) -> None:
    found, error = ask(folder, method, path, body)
    assert (found, why in json.dumps(error)) == (status, True), error


def test_a_folder_is_never_deleted(folder: Path) -> None:
    status, error = ask(folder, "DELETE", "/api/delete", b'{"model": "a"}', may_manage=True)
    assert status == 403 and "no request may remove it" in error["error"] and (folder / "a").is_dir()
    status, error = ask(folder, "POST", "/api/pull", b'{"model": "/etc"}', may_manage=True)
    assert status == 400 and "is not a hub id" in error["error"]
    assert ask(folder, "POST", "/api/pull", b'{"model": "a", "stream": false}') == (200, {"status": "success"})


def test_a_folder_that_has_gone(folder: Path) -> None:
    async def run() -> None:
        catalog = Catalog(folder, {}, has_cache=False)
        shutil.rmtree(folder)
        with pytest.raises(FolderGoneError, match=r"cannot be read: No such file") as refused:
            catalog.find("a")
        assert str(folder) not in str(refused.value)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/models/load", b'{"model": "a"}'),
        ("POST", "/v1/models/unload", b'{"model": "a"}'),
        ("POST", "/api/pull", b'{"model": "org/x"}'),
        ("POST", "/api/generate", b'{"model": "a"}'),
        ("POST", "/v1/completions", b'{"model": "a"}'),
        ("DELETE", "/api/delete", b'{"model": "a"}'),
        ("OPTIONS", "/v1/completions", b""),
        ("GET", "/tokenizer_info?model=a", b""),
    ],
)
def test_pages_of_other_sites_change_nothing(folder: Path, method: str, path: str, body: bytes) -> None:
    """No request here would be answered without a process, but each is refused before one is started."""
    forms: list[dict[str, str]] = [
        {"sec_fetch_site": "cross-site", "content_type": "text/plain"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://evil.example", "host": "localhost:8000", "content_type": "text/plain; application/json"},
    ]
    for headers in forms:
        status, error = ask(folder, method, path, body, may_manage=True, **headers)
        assert status == 403 and "page of another site" in json.dumps(error), (headers, error)


def test_other_sites_may_read_what_needs_no_model(folder: Path) -> None:
    for path in ("/v1/models", "/health", "/api/tags"):
        assert ask(folder, "GET", path, sec_fetch_site="cross-site")[0] == 200
    unload = ("POST", "/v1/models/unload", b'{"model": "a"}')
    for headers in (
        {"origin": "https://ours", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-origin"},
        {"origin": "http://localhost:8000", "host": "localhost:8000"},
        # the browser has asked before it sent this
        {"sec_fetch_site": "cross-site", "content_type": "application/json"},
    ):
        status, error = ask(folder, *unload, **headers)
        assert (status, "is unloaded" in json.dumps(error)) == (400, True)


@pytest.mark.parametrize("given", ["0", "0.0", '"0"', '"0s"', '"-0m"'])
@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/api/generate", "", {"response": ""}),
        ("/api/generate", '"prompt": "", ', {"response": ""}),
        ("/api/chat", "", {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", '"messages": [], ', {"message": {"role": "assistant", "content": ""}}),
    ],
)
def test_ollamas_way_to_unload(folder: Path, path: str, body: str, text: dict[str, Any], given: str) -> None:
    status, found = ask(folder, "POST", path, f'{{"model": "a", {body}"keep_alive": {given}}}'.encode())
    assert status == 200 and "T" in found.pop("created_at")
    assert found == {"model": "a", **text, "done": True, "done_reason": "unload"}


def test_settings_of_a_model(folder: Path) -> None:
    settings = ServerSettings(models_dir=str(folder), api_keys=("a-long-secret",), host="0.0.0.0", root_path="/llm")
    presets = {"a": Preset(engine={"max_model_len": 64, "dtype": "float32"}, server={"reasoning_parser": "none"})}
    models = LoadedModels(settings, EngineArgs(dtype="bfloat16"), lambda name: name == "dtype")
    known = make_catalog(settings, presets).find("a")
    own, args = models.settings_of(known, "/tmp/x.sock")
    assert (args.model, args.max_model_len, args.dtype) == (str(folder / "a"), 64, "bfloat16")
    assert (own.reasoning_parser, own.uds, own.api_keys, own.root_path) == ("none", "/tmp/x.sock", (), "")
    assert own.served_model_names == ("a", "a:latest") and not own.serves_several_models
    with pytest.raises(ConfigError, match="models_max=1 is less than the 2 models"):
        make_catalog(
            ServerSettings(models_dir=str(folder), models_max=1),
            {"a": Preset(is_pinned=True), "b": Preset(loads_on_startup=True)},
        )


def test_metrics_of_several_models_are_one_text() -> None:
    one = '# HELP x What it is.\n# TYPE x counter\nx{m="a"} 1\n# HELP y Y.\n# TYPE y gauge\ny{m="a"} 2\n'
    other = one.replace('"a"', '"b"')
    assert merge_metrics([one, other]) == (
        '# HELP x What it is.\n# TYPE x counter\nx{m="a"} 1\nx{m="b"} 1\n# HELP y Y.\n# TYPE y gauge\ny{m="a"} 2\ny{m="b"} 2\n'
    )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"models_dir": "x", "api_server_count": 2}, "api_server_count=2 does not work"),
        ({"models_dir": "x", "served_model_names": ("a",)}, "served_model_name='a'"),
        ({"enable_model_management": True}, "is for several models"),
        ({"models_max": 2}, "models_max is for several models"),
        ({"models_spare": False}, "models_spare is for several models"),
        ({"models_idle_timeout": 60.0}, "models_idle_timeout is for several models"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerSettings(**settings)
