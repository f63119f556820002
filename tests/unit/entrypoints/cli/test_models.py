"""`inflight pull`, `list`, `show`, `rm`, `ps`: what they print of a cache (filled by test_hub_cache.py) and of servers."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from inflight.entrypoints.cli.conversation import LOCAL_SERVER
from inflight.entrypoints.cli.model_facts import model_facts
from inflight.hub import EMBEDDED_MODEL
from tests.unit.entrypoints.runner import invoke
from tests.unit.test_hub_cache import cache, download, full_cache

__all__ = ["cache", "full_cache"]  # fixtures


def output(*arguments: str) -> str:
    done = invoke(arguments)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def error(*arguments: str) -> tuple[int, str]:
    done = invoke(arguments)
    return done.exit_code, done.stderr.strip()


def test_the_list_of_models_and_their_removal(full_cache: Path) -> None:
    title, *lines = output("list").splitlines()
    assert title.split() == ["MODEL", "SIZE", "MODIFIED"]
    assert [line.split()[:3] for line in lines][-1] == ["org/small", "105", "B"]
    as_json = json.loads(output("list", "--json"))
    assert [each["model"] for each in as_json] == [line.split()[0] for line in lines]
    removed = output("rm", "org/small", "hf.co/org/quants:m-Q8_0.gguf")
    assert removed == "org/small: removed, 105 B are free again\norg/quants:m-Q8_0.gguf: removed, 80 B are free again\n"
    assert len(json.loads(output("list", "--json"))) == len(as_json) - 2
    code, text = error("rm", "org/small")
    assert code == 2 and text.startswith("error: the hub's cache has no model 'org/small'")


def test_a_pulled_model_is_whole(full_cache: Path, tmp_path: Path) -> None:
    assert output("pull", "org/small").startswith(f"org/small: {full_cache}")
    damaged = full_cache / "models--org--small" / "snapshots" / ("a" * 40) / "model.safetensors"
    damaged.resolve().write_bytes(b"1" * 99 + b"0")
    code, text = error("pull", "org/small")
    assert code == 2 and "model.safetensors: the contents differ" in text
    assert error("pull", "org/absent")[0] == 2
    assert "is on this machine already" in error("pull", str(tmp_path))[1]


def test_what_a_model_is(cache: Path, tmp_path: Path) -> None:
    facts = json.loads(output("show", "--json"))
    assert facts == model_facts(None)
    assert facts["architecture"]["family"] == "Qwen3ForCausalLM" and facts["architecture"]["mixers"] == "6 x Attention"
    assert facts["text"] == {
        "takes": ["text"],
        "answers": "text",
        "chat template": True,
        "tool calls": "hermes",
        "reasoning": "none",
    }
    assert facts["weights"]["format"] == "plain"
    named = json.loads(output("show", str(EMBEDDED_MODEL), "--json"))
    assert {**named, "model": {}} == {**facts, "model": {}}
    # of a hub id without weights, as `show` downloads it
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": None}
    download(cache, "org/mixture", {"config.json": json.dumps(config).encode()})
    mixture = json.loads(output("show", "org/mixture", "--json"))
    assert mixture["architecture"]["experts"] == "4 in 6 layers, 2 a token"
    assert mixture["text"]["tokenizer"].startswith("cannot be read")
    assert "family" in output("show", "org/mixture")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/quants:Q2_K", "`inflight pull org/quants:Q2_K` downloads it"),
        ("org/quants:Q8", "`inflight pull org/quants:Q8` downloads it"),  # Q8_0 is there
        ("org/absent", "it is not in the hub's cache"),
        ("./absent", "there is no folder './absent'"),
    ],
)
def test_a_model_that_is_not_there(full_cache: Path, model: str, says: str) -> None:
    code, text = error("show", model)
    assert code == 2 and says in text and "Traceback" not in text


class _Server(http.server.BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        code, body = self.answers.get(self.path, (404, {}))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_servers_serve(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"data": [{"id": "chat", "max_model_len": 4096}, {"id": "other"}]}
    monkeypatch.setattr(_Server, "answers", {"/v1/models": (200, served), "/ready": (200, {})})
    monkeypatch.setattr(_Server, "keys", [])
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    lines = [line.split() for line in output("ps", "--url", f"{address}/v1").splitlines()]
    assert lines == [
        ["MODEL", "CONTEXT", "STATE", "SERVER"],
        ["chat", "4096", "ready", address],
        ["other", "-", "ready", address],
    ]
    assert set(_Server.keys) == {"Bearer secret"}
    states = [
        ((503, {"error": {"message": "the server is shutting down"}}), "the server is shutting down"),
        ((404, {}), "serving"),
        ((500, b"<html>"), "/ready answers 500"),
    ]
    for answer, state in states:
        monkeypatch.setitem(_Server.answers, "/ready", answer)
        assert {each["state"] for each in json.loads(output("ps", "--url", address, "--json"))} == {state}


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ((401, {}), 2, "wants an API key; set OPENAI_API_KEY"),
        ((404, {}), 1, "/v1/models answers 404"),
        ((200, b"Ollama is running"), 1, "something else than a list of models"),
        ((200, {"data": "x"}), 1, "something else than a list of models"),
        ((200, []), 1, "something else than a list of models"),
    ],
)
def test_a_server_that_lists_no_models(
    address: str, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any], code: int, says: str
) -> None:
    monkeypatch.setattr(_Server, "answers", {"/v1/models": answer})
    found, text = error("ps", "--url", address)
    assert found == code and says in text and len(text.splitlines()) == 1


def test_a_server_that_speaks_something_else_than_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        code, text = error("ps", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert code == 1 and "something else than a list of models" in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http://", "http://h:x", "http://h:99999", "http://h:0", "http://a b", "http://[::1"]
)
@pytest.mark.parametrize("program", [("ps",), ("launch", "claude", "--print-env", "--model", "m")])
def test_an_address_that_is_none(program: tuple[str, ...], url: str) -> None:
    code, text = error(*program, "--url", url)
    assert code == 2 and "is no address of a server" in text and len(text.splitlines()) == 1


def test_no_server() -> None:
    assert error("ps", "--url", "http://127.0.0.1:1")[0] == 1
    assert LOCAL_SERVER in invoke(["ps", "--help"]).output
    assert "is no address of a server" in error("ps", "--url", "localhost")[1]
