"""`ServerSettings`: how the server listens, whom it lets in, and what it bounds. The engine's own are `EngineArgs`."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from inflight.entrypoints.serve.api_keys import key_problems
from inflight.errors import ConfigError

_CHOICES = {"access_log": ("text", "json", "off")}
_BOUNDS = {  # inclusive
    "port": (0, 65535),
    "max_body_bytes": (1024, 2**32),
    "max_total_body_bytes": (1024, 2**40),
    "max_header_bytes": (1024, 2**20),
    "max_connections": (1, 2**20),
    "backlog": (1, 65535),
    "api_server_count": (1, 64),
    "max_queued_requests": (1, 2**20),
    "max_queued_tokens": (1, 2**40),
}
_MAX_SECONDS = 7 * 24 * 3600.0
_SECONDS = (
    "shutdown_timeout",
    "request_timeout",
    "keep_alive_timeout",
    "header_timeout",
    "body_timeout",
    "write_timeout",
    "stream_keep_alive_interval",
    "template_timeout",
    "log_stats_interval",
)
_BOUNDLESS = (
    "max_queued_requests",
    "max_queued_tokens",
    "request_timeout",
    "stream_keep_alive_interval",
)  # None: no bound
_ZERO_SECONDS = ("shutdown_timeout", "log_stats_interval")  # 0: do not wait; write no lines
_FLAGS = (
    "metrics_public",
    "allow_credentials",
    "enable_request_chat_template",
    "strict_fields",
    "log_requests",
    "disable_fastapi_docs",
)
_TEXTS = ("host", "tool_call_parser", "reasoning_parser")
_OPTIONAL_TEXTS = ("uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "otlp_traces_endpoint", "api_key_file")
_TUPLES = (
    "served_model_names",
    "api_keys",
    "allowed_hosts",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
)
LOCAL_HOSTS = ("localhost", "*.localhost")  # beside the loopback addresses, which are always accepted
_MAX_UDS_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """
    Attributes:
        host: address or name to listen on.
        port: 0 takes a free one, which the log names.
        uds: path of a unix socket to listen on instead of host and port.
        served_model_names: what requests may call the model; the first is what answers say. Empty: the model's own name.
        api_keys: any one of them lets a request in. Empty: no key is asked for.
        api_key_file: file that some of `api_keys` were read from, and are read from again at SIGHUP.
        metrics_public: serve /metrics without a key.
        allowed_hosts: names that the `Host` header may have; "*.example.com" is every name below example.com, "*" every name.
            Empty: local names only if the server is local and asks for no key, else every name.
        forwarded_allow_ips: addresses and networks of the proxies whose X-Forwarded-For and X-Forwarded-Proto are believed,
            separated by commas; "*" believes everybody, "" nobody. As uvicorn's.
        max_body_bytes: largest request body; more is a 413.
        max_total_body_bytes: size of the bodies of all requests that a front end has not answered yet; more is a 503.
        max_header_bytes: request line and headers together; more is a 431.
        shutdown_timeout: seconds that requests have to end after SIGTERM.
        request_timeout: seconds from a request's arrival to its last token; None is no deadline.
        keep_alive_timeout: seconds that an idle connection stays open: more than a load balancer keeps its own.
        header_timeout: seconds that a client has to send its request line and headers, and for TLS's handshake before.
        body_timeout: seconds that it has to send the body then.
        write_timeout: if a client reads nothing of its response for this many seconds, its connection is closed.
        stream_keep_alive_interval: seconds without an event after which a stream sends a comment; None: it sends none.
        template_timeout: seconds of processor time in which a chat template of a request must compile and render.
        max_connections: that each front end holds open; one more is a 503, and closed.
        backlog: connections that the kernel holds until they are accepted.
        allowed_origins: of browsers (CORS), "*" for all; empty: no CORS headers are sent.
        allowed_methods: of CORS requests.
        allowed_headers: that CORS requests may send, "*" for all.
        allow_credentials: whether browsers may send cookies along.
        ssl_certfile: PEM file with the certificate chain; with it the server speaks TLS only.
        ssl_keyfile: PEM file with its private key; None: it is in ssl_certfile.
        ssl_ca_certs: PEM file; clients must show a certificate signed by one of these.
        access_log: "text" or "json" lines on stdout, or "off".
        log_stats_interval: seconds between two lines of the log about the engine while there are requests; 0 for no lines.
        log_requests: write a line to the log when a request begins, and one when it ends; never its texts.
        api_server_count: front-end processes, all before one engine.
        max_queued_requests: requests that may wait for the engine; more is a 503. None is no bound.
        max_queued_tokens: prompt tokens that may wait for the engine. None is no bound.
        tool_call_parser: its name, "auto" for the one that fits the chat template, or "none".
        reasoning_parser: the same for a model's thinking.
        enable_request_chat_template: let a request bring a chat template of its own (it runs in the sandbox).
        strict_fields: refuse requests with unknown fields; by default these fields are ignored, and the answer names them.
        disable_fastapi_docs: serve neither the page /docs nor /openapi.json.
        otlp_traces_endpoint: URL that OpenTelemetry traces are sent to.

    Raises:
        ConfigError: names everything that is wrong, not just the first.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    metrics_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    forwarded_allow_ips: str = "127.0.0.1"
    max_body_bytes: int = 16 * 2**20
    max_total_body_bytes: int = 512 * 2**20
    max_header_bytes: int = 64 * 2**10
    shutdown_timeout: float = 30.0
    request_timeout: float | None = None
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0
    body_timeout: float = 120.0
    write_timeout: float = 60.0
    stream_keep_alive_interval: float | None = 10.0
    template_timeout: float = 1.0
    max_connections: int = 4096
    backlog: int = 2048
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("GET", "POST")
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    access_log: str = "text"
    log_stats_interval: float = 10.0
    log_requests: bool = False
    api_server_count: int = 1
    max_queued_requests: int | None = 1024
    max_queued_tokens: int | None = 4 * 2**20
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_request_chat_template: bool = False
    strict_fields: bool = False
    disable_fastapi_docs: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        # A combination is judged only where its parts are what they should be.
        if problems := list(self._wrong_values()) or list(self._conflicts()):
            raise ConfigError("; ".join(problems))

    @property
    def url(self) -> str:
        """Where the server is, for people."""
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds is not None:
            return f"{scheme}+unix://{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"

    @property
    def trusted_proxies(self) -> list[str]:
        return [entry for part in self.forwarded_allow_ips.split(",") if (entry := part.strip())]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.uds is not None or self.host == "localhost":
            return True
        return is_loopback(self.host)

    @property
    def accepted_hosts(self) -> tuple[str, ...]:
        """`allowed_hosts`, or its default if it is empty.

        A web page can give its own name the address 127.0.0.1 (DNS rebinding) and then read what a local server answers.
        Requests of such a page have no key, and the page's name in `Host`.
        """
        if self.allowed_hosts:
            return self.allowed_hosts
        is_unguarded = self.is_local and self.uds is None and not self.api_keys and self.ssl_ca_certs is None
        return LOCAL_HOSTS if is_unguarded else ("*",)

    def _wrong_values(self) -> Iterator[str]:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                yield f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}"
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None and name in _BOUNDLESS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                yield f"{name}={value!r} is not an integer in [{low}, {high}]"
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name in _BOUNDLESS:
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            shortest = 0.0 if name in _ZERO_SECONDS else 0.001
            if not is_number or not shortest <= value <= _MAX_SECONDS:
                yield f"{name}={value!r} is not a number of seconds in [{shortest:g}, {_MAX_SECONDS:.0f}]"
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                yield f"{name}={getattr(self, name)!r} is not True or False"
        for name in (*_TEXTS, *_OPTIONAL_TEXTS):
            value = getattr(self, name)
            if not (value is None and name in _OPTIONAL_TEXTS) and not (isinstance(value, str) and value.strip()):
                yield f"{name}={value!r} is not a text, or is empty"
        if not isinstance(self.forwarded_allow_ips, str) or not all(map(_is_network, self.trusted_proxies)):
            yield (
                f"forwarded_allow_ips={self.forwarded_allow_ips!r} is not a list of addresses and networks, separated by "
                "commas, like 127.0.0.1,10.0.0.0/8; '*' is everybody"
            )
        for name in _TUPLES:
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(entry, str) and entry.strip() for entry in value):
                shown = "" if name == "api_keys" else f"={value!r}"
                yield f"{name}{shown} is not a tuple of texts, none of them empty"

    def _conflicts(self) -> Iterator[str]:
        yield from key_problems(self.api_keys)
        if self.max_total_body_bytes < self.max_body_bytes:
            yield f"max_total_body_bytes={self.max_total_body_bytes} is less than max_body_bytes={self.max_body_bytes}"
        if self.uds is not None and len(self.uds.encode()) > _MAX_UDS_BYTES:
            yield f"uds={self.uds!r} is longer than the {_MAX_UDS_BYTES} bytes that a unix socket's path may have"
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    yield f"{name} needs ssl_certfile, the server's own certificate"
        if self.allow_credentials and not self.allowed_origins:
            yield "allow_credentials needs allowed_origins"
        if self.allow_credentials and "*" in self.allowed_origins:
            yield "allow_credentials with allowed_origins='*' would let every web page act as its visitor: name the origins"
        if not self.allowed_methods:
            yield "allowed_methods is empty: no CORS request could be made; name some, or leave it out"
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            yield f"otlp_traces_endpoint={endpoint!r} is not an http:// or https:// URL"


def _is_network(text: str) -> bool:
    try:
        return text == "*" or bool(ipaddress.ip_network(text))
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether `host` is a loopback address; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
