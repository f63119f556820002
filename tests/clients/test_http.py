"""Requests as Java's HttpClient, curl, load balancers and hand-written clients send them."""

from __future__ import annotations

import codecs
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from conversations import MODEL, SUM, SUM_ANSWER, user

BODY = json.dumps({"model": MODEL, "temperature": 0, "messages": [user(SUM)]}).encode()


def ask(
    url: str, api_key: str | None, path: str = "/v1/chat/completions", body: bytes | None = BODY, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    if api_key is not None:
        more["Authorization"] = f"Bearer {api_key}"
    method = "GET" if body is None else "POST"
    connection.request(method, path, body, {"Content-Type": "application/json", **more})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    is_json = (response.headers["content-type"] or "").startswith("application/json")
    return response.status, json.loads(text) if is_json and text else text


def content(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def test_upgrade_to_http2_is_ignored(url: str, api_key: str) -> None:
    """Java's default client sends `Upgrade: h2c` with every request, as does `curl --http2`."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAEAAEAAAAIAAAAA"}
    assert content(ask(url, api_key, **offer)) == SUM_ANSWER


def test_byte_order_mark_is_ignored(url: str, api_key: str) -> None:
    assert content(ask(url, api_key, body=codecs.BOM_UTF8 + BODY)) == SUM_ANSWER


def test_slash_at_the_end(url: str, api_key: str) -> None:
    status, body = ask(url, api_key, path="/v1/chat/completions/")
    assert status in (200, 307), body


@pytest.mark.parametrize("path", ["/ping", "/health"])
def test_probes_need_no_key(url: str, path: str) -> None:
    assert ask(url, None, path=path, body=None)[0] == 200


def test_unknown_path(url: str, api_key: str) -> None:
    status, body = ask(url, api_key, path="/v1/nothing", body=None)
    assert status == 404
    assert body["error"]["message"]


def test_missing_key(url: str) -> None:
    status, body = ask(url, None)
    assert status == 401
    assert body["error"]["type"]
