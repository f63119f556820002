"""Each middleware in-process: what passes, what is refused, and what is said about it."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.serving.client import CLIENT
from inflight.entrypoints.serve.access_log import AccessLog, report_dropped
from inflight.entrypoints.serve.api_keys import ApiKeys, read_key_file
from inflight.entrypoints.serve.asgi import Message, Receive, Scope, Send, send_json
from inflight.entrypoints.serve.gate import Gate
from inflight.entrypoints.serve.middlewares import Spellings, wrap
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError
from inflight.line_writer import LineWriter

KEYS = ("first-key-1", "second-key-2")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send_json(send, 200, {"size": size, **scope.get("state", {})})


def call(
    app: Any,
    path: str = "/v1/models",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: Any = (b"",),
    address: str = "1.2.3.4",
) -> tuple[int, dict[str, str], dict[str, Any]]:
    parts = list(body)
    sent: list[Message] = []

    async def receive() -> Message:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"key=secret", "headers": raw}
    asyncio.run(app({**scope, "client": (address, 5)}, receive, send))
    first, *pieces = sent
    assert first["type"] == "http.response.start" and {piece["type"] for piece in pieces} == {"http.response.body"}
    assert [bool(piece.get("more_body")) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    is_json = answered.get("content-type") == "application/json"
    return sent[0]["status"], answered, json.loads(b"".join(piece["body"] for piece in pieces)) if is_json else {}


def wrapped(**settings: Any) -> Any:
    return wrap(echo, ServerSettings(access_log="off", **settings))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/", "/openapi.json", "/healthy", "/health/x", "/unknown", "//v1//models"]
)
@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer wrong", "Basic first-key-1", "Bearer first-key-1 x"])
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
def test_everything_but_health_asks_for_a_key(path: str, method: str, shown: str | None) -> None:
    status, headers, body = call(
        wrapped(api_keys=KEYS), path, method, headers={} if shown is None else {"Authorization": shown}
    )
    assert status == 401
    assert headers["www-authenticate"] == "Bearer"
    assert body["error"]["code"] == "invalid_api_key"
    message = body["error"]["message"]  # clients look for these words
    assert message.startswith("No API key was given" if shown is None else "Incorrect API key provided")
    assert "first-key" not in json.dumps(body)


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_lets_in(key: str) -> None:
    app = wrapped(api_keys=KEYS)
    assert call(app, headers={"Authorization": f"bearer {key}"})[0] == 200
    assert call(app, headers={"X-Api-Key": key})[0] == 200
    assert (
        call(app, headers={"X-Api-Key": key, "Authorization": "Bearer another"})[0] == 200
    )  # as Claude Code may send them
    status, _, body = call(app, "/v1/messages", headers={"X-Api-Key": f"{key}x"})
    error = {"type": "authentication_error", "message": "Incorrect API key provided."}
    assert (status, body) == (401, {"type": "error", "error": error})


@pytest.mark.parametrize("path", ["/health", "/live", "/ping", "/ready", "/health/"])
def test_health_asks_for_none(path: str) -> None:
    assert call(wrapped(api_keys=KEYS), path)[0] == 200
    assert call(wrapped(api_keys=KEYS, metrics_public=True), "/metrics")[0] == 200


@pytest.mark.parametrize("path", ["/llm/health", "/llm/health/", "/health"])
def test_the_prefix_of_a_proxy_is_removed(path: str) -> None:
    assert call(wrapped(api_keys=KEYS, root_path="/llm"), path)[0] == 200
    assert call(wrapped(api_keys=KEYS, root_path="/llm"), "/llmx/health")[0] == 401
    assert call(wrapped(api_keys=KEYS), "/llm/health")[0] == 401


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/messages/count_tokens/", "/v1/messages/count_tokens"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/llm/responses", "/v1/responses"),
        ("/completions", "/v1/completions"),
        ("/v1/models", "/v1/models"),
        ("/completion", "/completion"),
        ("/modelsx", "/modelsx"),
        ("/api/chat", "/api/chat"),
    ],
)
def test_a_path_may_lack_the_version(path: str, seen: str) -> None:
    paths = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])

    asyncio.run(Spellings(app, "/llm")({"path": path, "method": "GET"}, None, None))  # type: ignore[arg-type]
    assert paths == [seen]


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/", "//host", "/a?b", "/<script>", "/a\n"])
def test_a_prefix_that_is_none(root_path: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path=.* is not a path like '/llm'"):
        ServerSettings(root_path=root_path)


def test_all_digests_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(a) or a == b)
    assert ApiKeys(["a", "b", "c"]).accepts(b"a")
    assert len(set(compared)) == 3


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\nfirst-key-1\n\n  second-key-2 \n")
    assert read_key_file(file) == KEYS
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "other")


@pytest.mark.parametrize(
    ("given", "kept"), [("a.B-1:_", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)]
)
def test_request_ids_are_taken_over_or_replaced(given: str, kept: bool) -> None:
    _, headers, body = call(wrapped(), headers={"X-Request-Id": given})
    assert headers["x-request-id"] == body["request_id"]
    assert (headers["x-request-id"] == given) is kept
    assert len(headers["x-request-id"]) <= 128


def test_a_request_has_a_time_of_arrival() -> None:
    start = time.monotonic()
    assert start <= call(wrapped())[2]["arrival_time"] <= time.monotonic()


def test_a_body_is_counted_while_it_comes_and_a_length_is_believed_only_against_the_client() -> None:
    app = wrapped(max_body_bytes=2000)
    assert call(app, body=[b"x" * 1000, b"x" * 1000])[2]["size"] == 2000
    for headers, body in (
        ({}, [b"x" * 1000] * 3),
        ({"Content-Length": "2001"}, [b""]),
        ({"Content-Length": "9" * 4999}, [b""]),
    ):
        status, answered, error = call(app, headers=headers, body=body)
        assert status == 413
        assert answered["connection"] == "close"
        assert error["error"]["type"] == "invalid_request_error"


def test_headers_are_bounded() -> None:
    assert call(wrapped(max_header_bytes=1024), headers={"X": "a" * 1024})[0] == 431
    assert call(wrapped(max_header_bytes=1024), headers={"X": "a" * 900})[0] == 200


def test_cors_is_off_until_origins_are_named() -> None:
    origin = {"Origin": "https://a.example"}
    assert "access-control-allow-origin" not in call(wrapped(), headers=origin)[1]
    app = wrapped(allowed_origins=("https://a.example",), api_keys=KEYS)
    status, headers, _ = call(app, headers=origin)
    assert status == 401
    assert headers["access-control-allow-origin"] == "https://a.example", "a page may read why it was refused"
    assert "access-control-allow-origin" not in call(app, headers={"Origin": "https://b.example"})[1]
    assert call(app, method="OPTIONS", headers=origin)[0] == 401
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    assert call(app, method="OPTIONS", headers=preflight)[0] == 200, "it carries no key"
    assert call(wrapped(api_keys=KEYS), method="OPTIONS", headers=preflight)[0] == 401
    assert "access-control-allow-credentials" not in headers
    with_cookies = wrapped(allowed_origins=("https://a.example",), allow_credentials=True)
    assert call(with_cookies, headers=origin)[1]["access-control-allow-credentials"] == "true"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_a_line_has_no_query_no_key_and_no_line_break(kind: str, tmp_path: Path) -> None:
    file, seen = tmp_path / "log", []
    with file.open("wb") as opened:
        lines = LineWriter(opened.fileno(), report_dropped)
        app = AccessLog(echo, kind, lambda *figures: seen.append(figures), lines)
        call(app, '/x\n"\x1b[2J', headers={"Authorization": "Bearer first-key-1"})
        lines.close(5)
    line = file.read_text()
    assert line.count("\n") == 1
    assert line.isascii()
    assert "secret" not in line
    assert "first-key" not in line
    assert seen[0][:2] == ("unmatched", 200)
    if kind == "json":
        assert json.loads(line)["status"] == 200
        assert json.loads(line)["client"] == "1.2.3.4"


def test_probes_that_went_well_have_no_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as opened:
        lines = LineWriter(opened.fileno(), report_dropped)
        call(AccessLog(echo, "text", None, lines), "/ready")
        call(AccessLog(Gate(lambda reason: None), "text", None, lines), "/ready")
        lines.close(5)
    assert file.read_text().count("\n") == 1
    assert '"GET /ready" 503' in file.read_text()


def test_a_gate_that_failed_stays_shut() -> None:
    refused: list[str] = []
    gate = Gate(refused.append)
    gate.fail()
    gate.open(echo)
    gate.drain()
    assert call(gate, "/live")[0] == 200
    assert call(gate, "/health")[2]["error"]["code"] == "server_dead"
    assert refused == []
    call(gate, "/v1/models")
    assert refused == ["dead"]


def test_a_gate_that_drains_before_the_engine_is_ready_stays_shut() -> None:
    gate = Gate(lambda reason: None)
    gate.drain()
    gate.open(echo)
    status, _, body = call(gate, "/v1/models")
    assert (status, body["error"]["message"]) == (503, "the server is shutting down; try again later")


def test_settings_do_not_show_keys(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("x").info("%s", ServerSettings(api_keys=KEYS))
    assert "first-key" not in caplog.text


@pytest.mark.parametrize(
    ("trusted", "forwarded", "expected"),
    [
        ("127.0.0.1", "9.9.9.9", "1.2.3.4"),  # a client that is no trusted proxy forges an address
        ("none", "9.9.9.9", "1.2.3.4"),
        ("1.2.3.0/24", "9.9.9.9", "9.9.9.9"),
        ("1.2.3.4", "6.6.6.6, 9.9.9.9", "9.9.9.9"),  # the client has sent 6.6.6.6, and the proxy has added 9.9.9.9
        ("1.2.3.4, 9.9.9.9", "6.6.6.6, 9.9.9.9", "6.6.6.6"),
    ],
)
def test_only_trusted_proxies_name_the_client(trusted: str, forwarded: str, expected: str, tmp_path: Path) -> None:
    seen: list[Scope] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send_json(send, 200, {})

    with (tmp_path / "log").open("wb") as opened:
        lines = LineWriter(opened.fileno(), report_dropped)
        app = wrap(note, ServerSettings(forwarded_allow_ips=trusted, access_log="json"), None, lines)
        call(app, headers={"X-Forwarded-For": forwarded, "X-Forwarded-Proto": "https"})
        lines.close(5)
    assert json.loads((tmp_path / "log").read_text())["client"] == expected
    assert seen[0]["client"][0] == expected
    assert seen[0].get("scheme") == (None if expected == "1.2.3.4" else "https")


@pytest.mark.parametrize("given", ["localhost", "127.0.0.1,proxy", "10.0.0.1/8", "1.2.3"])
def test_a_proxy_that_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"forwarded_allow_ips=.*addresses and networks"):
        ServerSettings(forwarded_allow_ips=given)


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "a.localhost", None]
)
def test_a_local_server_without_keys_answers_to_local_names(host: str | None) -> None:
    assert call(wrapped(), headers={} if host is None else {"Host": host})[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "",
        "[::1]evil.example",
        "[::1",
    ],
)
def test_a_local_server_without_keys_refuses_foreign_names(host: str) -> None:
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        status, _, body = call(wrapped(), path, headers={"Host": host})
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
        assert f"{host!r}" in body["error"]["message"]
        assert "--allowed-hosts" in body["error"]["message"]
    assert call(wrapped(), "/ready", headers={"Host": host})[0] == 200, "a probe"


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": KEYS},
        {"uds": "/x"},
        {"ssl_certfile": "a", "ssl_ca_certs": "b"},  # a web page has no certificate of a client
        {"allowed_hosts": ("*",)},
        {"allowed_hosts": ("evil.example",)},
    ],
)
def test_other_servers_answer_to_any_name_or_to_those_given(settings: dict[str, Any]) -> None:
    headers = {"Host": "evil.example:8000", "Authorization": f"Bearer {KEYS[0]}"}
    assert call(wrapped(**settings), headers=headers)[0] == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.1.2.3", "llm.example"])
def test_a_server_without_keys_refuses_foreign_names_wherever_it_listens(address: str) -> None:
    app = wrapped(host=address)
    own = [socket.gethostname(), *([address] if address == "llm.example" else [])]
    for host in ("localhost:8000", "127.0.0.1", "192.168.1.5:8000", "[fd00::1]:80", "10.1.2.3", *own):
        assert call(app, headers={"Host": host})[0] == 200, host
    for host in (
        "evil.example",
        "1.2.3.4.evil.example",
        "2130706433",
        "0x7f.1",
        "[fd00::1",
        "a" + socket.gethostname(),
    ):
        assert call(app, headers={"Host": host})[0] == 403, host


def test_with_names_of_the_option_other_addresses_are_refused() -> None:
    app = wrapped(host="0.0.0.0", allowed_hosts=("a.example",))
    assert [call(app, headers={"Host": host})[0] for host in ("a.example", "127.0.0.1", "10.1.2.3")] == [200, 200, 403]


@pytest.mark.parametrize("names", [("host", "HOST"), ("HOST", "host")])
def test_of_several_hosts_all_have_to_be_allowed(names: tuple[str, str]) -> None:
    headers = dict(sorted(zip(names, ("localhost", "evil.example"), strict=True)))
    status, _, body = call(wrapped(), headers=headers)
    assert status == 403 and "'evil.example'" in body["error"]["message"]


def test_allowed_hosts_may_be_all_names_below_one() -> None:
    app = wrapped(host="0.0.0.0", allowed_hosts=("*.example.com", "other"))
    for host, status in (("a.b.example.com:1", 200), ("example.com", 403), ("badexample.com", 403), ("OTHER", 200)):
        assert call(app, headers={"Host": host})[0] == status, host


def test_a_slash_at_the_end_and_head_are_other_spellings() -> None:
    app = wrap(show_scope, ServerSettings())
    assert call(app, "/v1/models/")[2] == {"path": "/v1/models", "method": "GET"}
    assert call(app, "/")[2]["path"] == "/"
    for path in ("/v1//models", "//v1/models", "//models", "/v1/models//", "///v1///models///"):
        assert call(app, path)[2]["path"].rstrip("/") == "/v1/models", path
    for path in ("/v1/models//data/model", "/v1/models/s3://a/b", "/v1/models/a//b"):
        assert call(app, path)[2]["path"] == path
    assert call(app, "//v1//models/s3://a")[2]["path"] == "/v1/models/s3://a"
    assert call(app, "/health", method="HEAD")[2] == {"path": "/health", "method": "GET"}
    assert call(app, "/v1/completions", method="DELETE")[2]["method"] == "DELETE"


async def show_scope(scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, 200, {"path": scope["path"], "method": scope["method"]})


def test_the_bodies_of_all_requests_are_bounded_together() -> None:
    limits: dict[str, Any] = {"max_body_bytes": 2000, "max_total_body_bytes": 3000}
    held: list[Any] = []

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/hold":
            held.append(await asyncio.to_thread(call, app, "/v1/models", body=[b"x" * 1001]))
            held.append(await asyncio.to_thread(call, app, "/v1/models", body=[b"x" * 1000]))
            held.append(await asyncio.to_thread(call, app, "/v1/models", body=[b"x" * 2001]))
        await send_json(send, 200, {})

    app = wrap(hold, ServerSettings(access_log="off", **limits))
    assert call(app, "/hold", body=[b"x" * 2000])[0] == 200
    (status, headers, body), fits, too_large = held
    assert (status, body["error"]["type"]) == (503, "overloaded_error")
    assert headers["retry-after"].isdigit()
    assert headers["connection"] == "close"
    assert fits[0] == 200
    assert too_large[0] == 413, "it would be refused later, too"
    for _ in range(3):  # what was held has been given back, refused or not
        assert call(app, body=[b"x" * 2000])[0] == 200


def test_an_address_that_fills_the_bodies_is_refused_before_others() -> None:
    refused: list[tuple[str, int]] = []

    async def hold(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/hold":
            for address in ("1.2.3.4", "5.6.7.8", "1.2.3.4", "5.6.7.8"):
                body = b"x" * 200 if address == "1.2.3.4" else b"x" * 10
                status, _, _ = await asyncio.to_thread(call, app, "/v1/models", body=[body], address=address)
                refused.append((address, status))
        await send_json(send, 200, {})

    app = wrap(hold, ServerSettings(access_log="off", max_body_bytes=2000, max_total_body_bytes=2100))
    assert call(app, "/hold", body=[b"x" * 1900])[0] == 200
    assert refused == [("1.2.3.4", 200), ("5.6.7.8", 200), ("1.2.3.4", 503), ("5.6.7.8", 200)]
    assert call(app, body=[b"x" * 2000])[0] == 200, "alone it may have all"


def test_a_client_is_its_key_or_its_connection() -> None:
    seen: list[str] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(CLIENT.get())
        await send_json(send, 200, {})

    def ask(app: Any, key: str, address: str) -> str:
        assert call(app, headers={"Authorization": f"Bearer {key}"}, address=address)[0] == 200
        return seen.pop()

    with_keys = wrap(note, ServerSettings(access_log="off", api_keys=KEYS))
    assert (
        ask(with_keys, KEYS[0], "1.2.3.4") == ask(with_keys, KEYS[0], "5.6.7.8") != ask(with_keys, KEYS[1], "1.2.3.4")
    )
    assert KEYS[0] not in ask(with_keys, KEYS[0], "1.2.3.4")
    without = wrap(note, ServerSettings(access_log="off"))
    assert ask(without, "any", "1.2.3.4") == ask(without, "other", "1.2.3.4") != ask(without, "any", "5.6.7.8")


@pytest.mark.parametrize("keys", [(), KEYS])
def test_an_action_for_all_clients_may_need_a_key_of_its_own(keys: tuple[str, ...]) -> None:
    app = wrapped(api_keys=keys, admin_api_key="admin-key-1")

    def status(path: str, key: str | None) -> int:
        return call(app, path, "POST", {} if key is None else {"x-api-key": key})[0]

    assert status("/reset_prefix_cache", "admin-key-1") == 200
    assert status("/reset_prefix_cache/", "admin-key-1") == 200
    for key in (None, "wrong", *KEYS):
        assert status("/reset_prefix_cache", key) == 401
        assert status("/reset_prefix_cache/", key) == 401
        assert status("/v1/models", key) == (200 if not keys or key in keys else 401)
    assert status("/v1/models", "admin-key-1") == 200
    with pytest.raises(ConfigError, match="shorter than 8"):
        wrapped(admin_api_key="short")
    of_several = ("/models/load", "/v1/models/unload", "/api/pull", "/api/delete")
    assert [status(path, None) for path in of_several] == [401 if keys else 200] * 4
    app = wrapped(api_keys=keys, admin_api_key="admin-key-1", models_dir="models")
    for path in of_several:
        assert [status(path, key) for key in (None, *KEYS, "admin-key-1")] == [401, *[401 for _ in KEYS], 200]


def test_of_two_keys_none_counts() -> None:
    app, right = wrapped(api_keys=KEYS), f"Bearer {KEYS[0]}".encode()
    for shown in ([right, b"Bearer wrong"], [b"Bearer wrong", right], [right, right]):
        assert status_of(app, [(b"authorization", value) for value in shown]) == 401
    key = KEYS[0].encode()
    assert status_of(app, [(b"x-api-key", key), (b"x-api-key", key)]) == 401
    assert status_of(app, [(b"x-api-key", key)]) == 200


def status_of(app: Any, headers: list[tuple[bytes, bytes]]) -> int:
    """Of a GET with exactly these headers, any of them several times."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    return status
