"""Settings of the server that do not fit together, the ones beside them that do, and what follows from settings."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError

ORIGIN = {"allowed_origins": ("https://a.example",)}


@pytest.mark.parametrize(
    ("wrong", "message", "right"),
    [
        ({"root_path": "llm"}, "is not a path", {"root_path": "/a/llm"}),
        ({"root_path": "/llm/"}, "is not a path", {"root_path": ""}),
        ({"forwarded_allow_ips": "10.0.0.1/8"}, "list of addresses", {"forwarded_allow_ips": "10.0.0.0/8, ::1"}),
        ({"forwarded_allow_ips": "1.2.3.4,proxy"}, "list of addresses", {"forwarded_allow_ips": "*"}),
        (
            {"max_body_bytes": 2**20 + 1, "max_total_body_bytes": 2**20},
            "limit for all bodies",
            {"max_body_bytes": 2**20, "max_total_body_bytes": 2**20},
        ),
        ({"uds": "/" + "é" * 54}, "bytes that a unix socket's path", {"uds": "/" + "é" * 53}),
        ({"ssl_keyfile": "k"}, "ssl_keyfile is given without", {"ssl_keyfile": "k", "ssl_certfile": "c"}),
        ({"ssl_ca_certs": "a"}, "ssl_ca_certs is given without", {"ssl_ca_certs": "a", "ssl_certfile": "c"}),
        ({"allow_credentials": True}, "allowed_origins is empty", {"allow_credentials": True, **ORIGIN}),
        (
            {"allow_credentials": True, "allowed_origins": ("https://a.example", "*")},
            "every web page",
            {"allowed_origins": ("*",)},
        ),
        ({"allowed_methods": ()}, "no web page could", {"allowed_methods": ("GET",)}),
        (
            {"otlp_traces_endpoint": "collector:4318"},
            "is not an http:// or",
            {"otlp_traces_endpoint": "https://collector:4318"},
        ),
    ],
)
def test_conflicts(wrong: dict[str, Any], message: str, right: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ServerSettings(**wrong)
    assert ";" not in str(error.value).replace("; give", "")  # one problem
    ServerSettings(**right)


@pytest.mark.parametrize(
    ("settings", "url", "is_local"),
    [
        ({"host": "127.0.0.1", "port": 80}, "http://127.0.0.1:80", True),
        ({"host": "::1", "port": 80, "ssl_certfile": "c"}, "https://[::1]:80", True),
        ({"host": "localhost", "port": 80}, "http://localhost:80", True),
        ({"host": "0.0.0.0", "port": 80}, "http://0.0.0.0:80", False),
        ({"host": "0.0.0.0", "uds": "/run/x"}, "http+unix:///run/x", True),
        ({"host": "a.example", "uds": "/run/x", "ssl_certfile": "c"}, "https+unix:///run/x", True),
        ({"host": "a.example", "port": 80}, "http://a.example:80", False),
    ],
)
def test_where_the_server_is(settings: dict[str, Any], url: str, is_local: bool) -> None:
    made = ServerSettings(**settings)
    assert (made.url, made.is_local) == (url, is_local)


def test_who_is_trusted() -> None:
    assert ServerSettings(forwarded_allow_ips="none").trusted_proxies == []
    assert ServerSettings(forwarded_allow_ips="127.0.0.1, 10.0.0.0/8,").trusted_proxies == ["127.0.0.1", "10.0.0.0/8"]
    assert not ServerSettings().asks_for_key
    assert ServerSettings(api_keys=("a-long-enough-key",)).asks_for_key
    assert ServerSettings(api_key_file="keys").asks_for_key
