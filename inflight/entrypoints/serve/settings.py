"""`ServerSettings`: where the server listens, whom it lets in, and its limits. The engine's settings are `EngineArgs`."""

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight import envs
from inflight.entrypoints.serve.api_keys import key_problems
from inflight.entrypoints.written_answer import REASONING_FIELDS
from inflight.errors import ConfigError
from inflight.setting import check_values, setting
from inflight.setting_text import parse_bytes
from inflight.sockets import shown

_server = partial(setting, group="Server")
_access = partial(setting, group="Access")
_limit = partial(setting, group="Limits")
_answer = partial(setting, group="Answers")
_models = partial(setting, group="Several models")
_LONGEST = 7 * 24 * 3600.0
_SECONDS = {"bounds": (0.001, _LONGEST), "metavar": "SECONDS"}
_SECONDS_OR_0 = {**_SECONDS, "bounds": (0, _LONGEST)}
# A request's id is written to logs, traces and the response's header. So it is short, and has no characters that are special
# there.
REQUEST_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"
_SIZE = {"metavar": "BYTES", "parse": parse_bytes}
_PATH = {"metavar": "PATH"}

ANY_ADDRESS = "any address"  # in `accepted_hosts`; no name has a blank
LOCAL_HOSTS = ("localhost", "*.localhost", ANY_ADDRESS)
TEMPORARY_STORE, NO_STORE = "temporary", "none"  # values of `response_store` that are no path
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_MAX_UDS_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of the HTTP server. Each field is also an option of `inflight serve`.

    Raises:
        ConfigError: settings are wrong. The message names all wrong settings, not only the first one.
    """

    host: str = _server("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", metavar="HOST")
    port: int = _server(8000, "Port to listen on; 0 means any free port.", bounds=(0, 65535), metavar="PORT")
    uds: str | None = _server(None, "Listen on this unix socket instead of host and port.", **_PATH)
    root_path: str = _server("", "Prefix of every path that a proxy forwards without removing it.", **_PATH)
    backlog: int = _server(2048, "Connections that the kernel holds until the server accepts them.", bounds=(1, 65535))
    api_server_count: int = _server(
        1, "Processes for HTTP and tokenisation, which share one engine.", bounds=(1, 64), short="-asc"
    )
    headless: bool = _server(False, "Serve no HTTP: run replicas for the server at --data-parallel-address.")
    shutdown_timeout: float = _server(30.0, "Time that running requests have after SIGTERM.", **_SECONDS_OR_0)
    keep_alive_timeout: float = _server(
        75.0,
        "How long an idle connection stays open. A load balancer must close its idle connections earlier.",
        **_SECONDS,
    )
    log_format: str = _server(
        "text",
        "How the log on stderr is written, by all processes. Also: INFLIGHT_LOG_FORMAT.",
        choices=("text", "json"),
        variables=("INFLIGHT_SERVE_LOG_FORMAT", "INFLIGHT_LOG_FORMAT"),
    )
    access_log: str = _server("text", "A line on stdout for every request.", choices=("text", "json", "off"))
    log_stats_interval: float = _server(
        10.0, "Time between two log lines about the engine while it has requests; 0 for none.", **_SECONDS_OR_0
    )
    log_requests: bool = _server(False, "Log a line when a request begins, and one when it ends, without its texts.")
    otlp_traces_endpoint: str | None = _server(
        None, "Send OpenTelemetry traces to this URL (extra: tracing).", metavar="URL"
    )
    api_keys: tuple[str, ...] = _access(
        (),
        "Key that requests must have. May be repeated. Everybody on this machine sees it in `ps`: use INFLIGHT_API_KEY or "
        "--api-key-file instead.",
        option="api_key",
        metavar="KEY",
        variables=envs.API_KEY_VARIABLES,
        is_secret=True,
    )
    api_key_file: str | None = _access(
        None, "File with more keys, one a line; lines that begin with # are comments.", **_PATH
    )
    admin_api_key: str | None = _access(
        None,
        "Key that POST /reset_prefix_cache and /v1/engine/abort must have, and requests that load, unload, pull and delete "
        "models; other keys are not enough then. Requests may have it, too. Use INFLIGHT_SERVE_ADMIN_API_KEY, because "
        "everybody on this machine sees options in `ps`.",
        metavar="KEY",
        is_secret=True,
    )
    metrics_public: bool = _access(False, "Serve /metrics without a key.")
    ssl_certfile: str | None = _access(None, "Speak TLS, and only TLS, with this certificate chain (PEM).", **_PATH)
    ssl_keyfile: str | None = _access(
        None, "Private key of the certificate (PEM). Default: the file of --ssl-certfile.", **_PATH
    )
    ssl_ca_certs: str | None = _access(
        None, "CA certificates (PEM). Clients must show a certificate that one of these has signed.", **_PATH
    )
    allowed_hosts: tuple[str, ...] = _access(
        (),
        "Name that the `Host` header may have; *.example.com for all names below example.com, * for every name. May be "
        "repeated. Default: every name; if the server asks for no key, only addresses, localhost and the name of the machine.",
        metavar="NAME",
    )
    forwarded_allow_ips: str = _access(
        "127.0.0.1",
        "Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses and networks, separated by commas; * for "
        "all, none for no proxy.",
        metavar="LIST",
    )
    allowed_origins: tuple[str, ...] = _access(
        (),
        "Origin whose web pages may send requests (CORS); * for all. May be repeated. Default: none.",
        option="allowed_origin",
        metavar="ORIGIN",
    )
    allowed_methods: tuple[str, ...] = _access(
        ("GET", "POST"),
        "Method that the pages of --allowed-origin may use (CORS). May be repeated. Default: GET, POST.",
        option="allowed_method",
        metavar="METHOD",
    )
    allowed_headers: tuple[str, ...] = _access(
        ("*",),
        "Header that the pages of --allowed-origin may send (CORS). May be repeated. Default: all.",
        option="allowed_header",
        metavar="HEADER",
    )
    allow_credentials: bool = _access(False, "Allow browsers to send cookies (CORS).")
    max_queued_requests: int | None = _limit(
        1024,
        "Sequences that may wait. A request with n answers counts n times. If the queue is full, the status is 503.",
        bounds=(1, 2**20),
    )
    max_queued_tokens: int | None = _limit(
        4 * 2**20, "Prompt tokens that may wait. If there are more, the status is 503.", bounds=(1, 2**40)
    )
    request_timeout: float | None = _limit(
        None, "A request's deadline, from arrival to last token. Default: none.", **_SECONDS
    )
    header_timeout: float = _limit(
        20.0, "Time for the TLS handshake, and then the same time for the headers of a request.", **_SECONDS
    )
    body_timeout: float = _limit(120.0, "Time for a client to send the body after the headers.", **_SECONDS)
    write_timeout: float = _limit(
        60.0, "Time after which the connection of a client that reads nothing is closed.", **_SECONDS
    )
    max_connections: int = _limit(
        4096, "Open connections of each front end. A further one gets status 503.", bounds=(1, 2**20)
    )
    max_body_bytes: int = _limit(
        16 * 2**20, "Largest request body. A larger one gets status 413.", bounds=(1024, 2**32), **_SIZE
    )
    max_total_body_bytes: int = _limit(
        512 * 2**20,
        "Size of all request bodies that a front end has not answered yet. A body beyond it gets status 503.",
        bounds=(1024, 2**40),
        **_SIZE,
    )
    max_header_bytes: int = _limit(
        64 * 2**10,
        "Size of request line and headers together. If they are larger, the status is 431.",
        bounds=(1024, 2**20),
        **_SIZE,
    )
    stream_keep_alive_interval: float | None = _answer(
        10.0,
        "Send a comment, or an event that says nothing new, on a stream after this time without an event.",
        bounds=(0.001, _LONGEST),
        metavar="SECONDS|none",
    )
    served_model_names: tuple[str, ...] = _answer(
        (),
        "Name by which requests ask for the model. May be repeated; answers have the first. Default: the model's own name.",
        option="served_model_name",
        metavar="NAME",
    )
    tool_call_parser: str = _answer("auto", "How the model writes tool calls.", metavar="auto|none|NAME")
    reasoning_parser: str = _answer("auto", "How the model marks its thinking.", metavar="auto|none|NAME")
    reasoning_field: str = _answer(
        "reasoning_content",
        "The member of a chat's answer that has the reasoning. With both, a client that adds them shows each word twice.",
        choices=tuple(REASONING_FIELDS),
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = _answer(  # Any: JSON
        None, "Variables of the chat template, if the request does not set them: '{\"enable_thinking\": false}'."
    )
    strict_fields: bool = _answer(
        False, "Refuse requests with unknown fields. Default: ignore the fields, and name them in the answer's header."
    )
    enable_force_include_usage: bool = _answer(
        False, "Each stream ends with the usage, also if the request does not ask for it."
    )
    strict_model_names: bool = _answer(
        False, "Refuse requests to /v1/messages for models of other names. Default: any name means the served model."
    )
    response_store: str = _answer(
        TEMPORARY_STORE,
        "Where responses of /v1/responses are stored: in a file, which stays; in a temporary file, which is removed when the "
        "server ends; or nowhere.",
        metavar="temporary|none|FILE",
    )
    response_store_bytes: int = _answer(
        2**28,
        "Size of all stored responses together. If there are more, those that were not used for the longest time are removed.",
        bounds=(2**16, 2**44),
        **_SIZE,
    )
    response_store_seconds: float = _answer(
        30 * 24 * 3600.0,
        "How long a stored response is kept after its last use.",
        bounds=(1, 10 * 366 * 24 * 3600.0),
        metavar="SECONDS",
    )
    ui: bool = _answer(
        True, "Show browsers a chat and the engine at /; --no-ui: only what the server is, without scripts."
    )
    disable_fastapi_docs: bool = _answer(False, "Serve neither the page /docs nor /openapi.json.")

    models_dir: str | None = _models(
        None,
        "Serve all models of this folder: a name in a request loads its model. The folder has GGUF files, folders of models, "
        "or folders of either.",
        **_PATH,
    )
    models_preset: str | None = _models(
        None, "INI file with a section of options for each model, as llama.cpp's. Its models are served, too.", **_PATH
    )
    models_max: int = _models(
        4, "Models that are loaded at the same time. The one that was used least recently makes room.", bounds=(1, 1024)
    )
    models_idle_timeout: float | None = _models(
        None,
        "How long a model stays loaded without requests. A request's keep_alive changes it for its model. Default: until "
        "another model needs the room.",
        **_SECONDS,
    )
    models_spare: bool = _models(
        True, "Keep a process ready that has imported its libraries, so that the next model is loaded sooner."
    )
    enable_model_management: bool = _models(
        False, "Let requests pull models into the hub's cache, serve them, and delete them there."
    )

    def __post_init__(self) -> None:
        # Whether settings fit together is checked only if each value by itself is right.
        if problems := list(check_values(ServerSettings, vars(self)).values()) or list(self._conflicts()):
            raise ConfigError("; ".join(problems))

    @property
    def url(self) -> str:
        """The address of the server, as it is shown to people."""
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds is not None:
            return f"{scheme}+unix://{self.uds}"
        return f"{scheme}://{shown(self.host, self.port)}"

    @property
    def serves_several_models(self) -> bool:
        return self.models_dir is not None or self.models_preset is not None

    @property
    def trusted_proxies(self) -> list[str]:
        if self.forwarded_allow_ips == "none":
            return []
        return [entry for part in self.forwarded_allow_ips.split(",") if (entry := part.strip())]

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        return is_loopback(self.host)

    @property
    def asks_for_key(self) -> bool:
        """Whether requests need an API key. A file of keys always has a key, because a file without keys is an error."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def admin_keys(self) -> tuple[str, ...]:
        return () if self.admin_api_key is None else (self.admin_api_key,)

    @property
    def accepted_hosts(self) -> tuple[str, ...]:
        """The names that the `Host` header may have: `allowed_hosts`, or a default if `allowed_hosts` is empty.

        A web page can make its own host name resolve to 127.0.0.1, or to any address that its visitor's machine can reach (DNS
        rebinding), and then read what a server there answers. The `Host` header of such a page's requests has the page's own
        name, which is never an address. So by default a server that asks for neither a key nor a certificate accepts only
        addresses and local names, wherever it listens: a container listens on 0.0.0.0, although its port may be published on
        loopback only. If it asks for one of these, the page cannot give it.
        """
        if self.allowed_hosts:
            return self.allowed_hosts
        if self.uds is not None or self.asks_for_key or self.ssl_ca_certs is not None:
            return ("*",)
        return (*LOCAL_HOSTS, *{name for name in (self.host, socket.gethostname()) if name})

    def _conflicts(self) -> Iterator[str]:
        if not self.response_store:
            yield "response_store='' is no file: give a path, 'temporary' or 'none'"
        if self.root_path and not _PREFIX.fullmatch(self.root_path):
            yield (
                f"root_path={self.root_path!r} is not a path like '/llm' or '/a/llm': each part begins with a slash, and has "
                "only letters, digits and ._~-"
            )
        if self.serves_several_models:
            for name, wrong in (("api_server_count", self.api_server_count != 1), ("headless", self.headless)):
                if wrong:
                    yield f"{name}={getattr(self, name)!r} does not work with models_dir and models_preset: leave it out"
            if self.served_model_names:
                yield (
                    f"served_model_name={self.served_model_names[0]!r} with models_dir or models_preset: models have the names "
                    "of their folders, files and sections"
                )
        else:
            for name in ("models_max", "models_idle_timeout", "models_spare", "enable_model_management"):
                if getattr(self, name) != getattr(ServerSettings, name):
                    yield f"{name} is for several models: give models_dir or models_preset, too"
        yield from key_problems((*self.api_keys, *self.admin_keys))
        if not all(map(_is_network, self.trusted_proxies)):
            yield (
                f"forwarded_allow_ips={self.forwarded_allow_ips!r} is not a list of addresses and networks, separated by "
                "commas, like 127.0.0.1,10.0.0.0/8; give '*' to trust everybody, or 'none' to trust nobody"
            )
        if self.max_total_body_bytes < self.max_body_bytes:
            yield (
                f"max_total_body_bytes={self.max_total_body_bytes}, the limit for all bodies together, is less than "
                f"max_body_bytes={self.max_body_bytes}, the limit for one body"
            )
        if self.uds is not None and len(self.uds.encode()) > _MAX_UDS_BYTES:
            yield f"uds={self.uds!r} is longer than the {_MAX_UDS_BYTES} bytes that a unix socket's path may have"
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    yield f"{name} is given without ssl_certfile, the server's own certificate: give both"
        if self.allow_credentials and not self.allowed_origins:
            yield "allow_credentials is set, but allowed_origins is empty: name the origins that may send cookies"
        if self.allow_credentials and "*" in self.allowed_origins:
            yield "allow_credentials with allowed_origins='*' would let every web page act as its visitor: name the origins"
        if not self.allowed_methods:
            yield "allowed_methods is empty, so no web page could send a request: name some methods, or leave the setting out"
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            yield f"otlp_traces_endpoint={endpoint!r} is not an http:// or https:// URL"


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback address. False if it is a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Whether `text` is an IP address, and not a name."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_network(text: str) -> bool:
    try:
        return text == "*" or bool(ipaddress.ip_network(text))
    except ValueError:
        return False
