"""`ServerOptions`: the options of `inflight serve` that are not the engine's, named after `ServerSettings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from inflight import envs
from inflight.entrypoints.cli.engine_options import parse_bytes
from inflight.entrypoints.serve.api_keys import read_key_file
from inflight.entrypoints.serve.settings import ServerSettings

SERVER, ACCESS, LIMITS, ANSWERS = "Server", "Access", "Limits", "Answers"
NO_BOUND = "none"


def parse_bound(text: str) -> int | None:
    """A number, or "none" for no bound."""
    if str(text).strip().lower() == NO_BOUND:
        return None
    try:
        return int(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor {NO_BOUND!r}") from None


def parse_seconds(text: str) -> float | None:
    """A number of seconds, or "none" for never."""
    if str(text).strip().lower() == NO_BOUND:
        return None
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number of seconds nor {NO_BOUND!r}") from None


def _server(help: str, *names: str, **more: Any) -> Any:  # Any: typer's own type of an option
    return typer.Option(*names, help=help, rich_help_panel=SERVER, **more)


def _access(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ACCESS, **more)


def _limit(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=LIMITS, **more)


def _answer(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ANSWERS, **more)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Fields have the names and defaults of `ServerSettings`. An option that may be repeated has a singular name here."""

    host: Annotated[str, _server("Address to listen on; 0.0.0.0 for all.", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, _server("Port to listen on; 0 takes a free one.", metavar="PORT")] = 8000
    uds: Annotated[str | None, _server("Listen on this unix socket instead.", metavar="PATH")] = None
    backlog: Annotated[int, _server("Connections that the kernel holds until accepted.", metavar="N")] = 2048
    api_server_count: Annotated[
        int, _server("Processes for HTTP and tokenisation, which share one engine.", metavar="N")
    ] = 1
    shutdown_timeout: Annotated[float, _server("Time that running requests have after SIGTERM.", metavar="SECONDS")] = (
        30.0
    )
    keep_alive_timeout: Annotated[float, _server("How long an idle connection stays open.", metavar="SECONDS")] = 75.0
    access_log: Annotated[str, _server("A line on stdout for every request.", metavar="text|json|off")] = "text"
    log_stats_interval: Annotated[
        float,
        _server("Time between two log lines about the engine while it has requests; 0 for none.", metavar="SECONDS"),
    ] = 10.0
    log_requests: Annotated[
        bool,
        _server(
            "Log a line when a request begins, and one when it ends, without its texts.",
            "--log-requests/--no-log-requests",
            show_default=False,
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None, _server("Send OpenTelemetry traces there (extra: tracing).", metavar="URL")
    ] = None
    api_key: Annotated[
        list[str] | None,
        _access(
            "Key that requests must have. May be repeated. Everybody on this machine sees it in `ps`: use "
            "INFLIGHT_API_KEY or --api-key-file instead.",
            metavar="KEY",
            envvar=list(reversed(envs.API_KEY_VARIABLES)),
        ),
    ] = None
    api_key_file: Annotated[
        str | None, _access("File with more keys, one a line; lines that begin with # are comments.", metavar="PATH")
    ] = None
    metrics_public: Annotated[
        bool, _access("Serve /metrics without a key.", "--metrics-public/--no-metrics-public", show_default=False)
    ] = False
    ssl_certfile: Annotated[str | None, _access("Speak TLS with this certificate chain (PEM).", metavar="PATH")] = None
    ssl_keyfile: Annotated[
        str | None,
        _access("Private key of the certificate (PEM). Default: the file of --ssl-certfile.", metavar="PATH"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None, _access("Clients must show a certificate signed by one of these.", metavar="PATH")
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _access(
            "Name that the `Host` header may have; *.example.com for all names below it, * for every name. May be repeated. "
            "Default: every name; only local names if the server listens on loopback and asks for no key.",
            metavar="NAME",
        ),
    ] = None
    forwarded_allow_ips: Annotated[
        str,
        _access(
            "Proxies whose X-Forwarded-For and X-Forwarded-Proto are believed: addresses and networks, separated by commas; "
            "* for all.",
            metavar="LIST",
        ),
    ] = "127.0.0.1"
    allowed_origin: Annotated[
        list[str] | None,
        _access("Origin whose web pages may send requests (CORS); * for all. May be repeated.", metavar="ORIGIN"),
    ] = None
    allowed_method: Annotated[
        list[str] | None,
        _access("Method that these pages may use (CORS). May be repeated. Default: GET, POST.", metavar="METHOD"),
    ] = None
    allowed_header: Annotated[
        list[str] | None,
        _access("Header that these pages may send (CORS). May be repeated. Default: all.", metavar="HEADER"),
    ] = None
    allow_credentials: Annotated[
        bool,
        _access(
            "Allow browsers to send cookies (CORS).", "--allow-credentials/--no-allow-credentials", show_default=False
        ),
    ] = False
    max_queued_requests: Annotated[
        int | None,
        _limit("Sequences that may wait, n of a request; more is a 503.", parser=parse_bound, metavar=f"N|{NO_BOUND}"),
    ] = 1024
    max_queued_tokens: Annotated[
        int | None, _limit("Prompt tokens that may wait; more is a 503.", parser=parse_bound, metavar=f"N|{NO_BOUND}")
    ] = 4 * 2**20
    request_timeout: Annotated[
        float | None, _limit("A request's deadline, from arrival to last token. Default: none.", metavar="SECONDS")
    ] = None
    header_timeout: Annotated[float, _limit("Time that a client has to send its headers.", metavar="SECONDS")] = 20.0
    body_timeout: Annotated[float, _limit("Time that a client then has to send the body.", metavar="SECONDS")] = 120.0
    write_timeout: Annotated[
        float, _limit("Time after which the connection of a client that reads nothing is closed.", metavar="SECONDS")
    ] = 60.0
    template_timeout: Annotated[
        float, _limit("Processor time that a chat template of a request may take.", metavar="SECONDS")
    ] = 1.0
    max_connections: Annotated[int, _limit("Open connections of each front end; one more is a 503.", metavar="N")] = (
        4096
    )
    max_body_bytes: Annotated[
        int, _limit("Largest request body; more is a 413.", parser=parse_bytes, metavar="BYTES")
    ] = 16 * 2**20
    max_total_body_bytes: Annotated[
        int,
        _limit(
            "Size of all request bodies of a front end together; more is a 503.", parser=parse_bytes, metavar="BYTES"
        ),
    ] = 512 * 2**20
    max_header_bytes: Annotated[
        int, _limit("Size of request line and headers together; more is a 431.", parser=parse_bytes, metavar="BYTES")
    ] = 64 * 2**10
    stream_keep_alive_interval: Annotated[
        float | None,
        _answer(
            "Send a comment on a stream that has had no event for this time.",
            parser=parse_seconds,
            metavar="SECONDS|none",
        ),
    ] = 10.0
    served_model_name: Annotated[
        list[str] | None,
        _answer("Name by which requests ask for the model. May be repeated; answers have the first.", metavar="NAME"),
    ] = None
    tool_call_parser: Annotated[str, _answer("How the model writes tool calls.", metavar="auto|none|NAME")] = "auto"
    reasoning_parser: Annotated[str, _answer("How the model marks its thinking.", metavar="auto|none|NAME")] = "auto"
    enable_request_chat_template: Annotated[
        bool,
        _answer(
            "Let requests bring a chat template of their own.",
            "--enable-request-chat-template/--no-enable-request-chat-template",
            show_default=False,
        ),
    ] = False
    strict_fields: Annotated[
        bool,
        _answer(
            "Refuse requests with unknown fields. Default: ignore the fields, and name them in the answer's header.",
            "--strict-fields/--no-strict-fields",
            show_default=False,
        ),
    ] = False

    disable_fastapi_docs: Annotated[
        bool,
        _answer(
            "Serve neither the page /docs nor /openapi.json.",
            "--disable-fastapi-docs/--no-disable-fastapi-docs",
            show_default=False,
        ),
    ] = False

    def to_values(self) -> dict[str, Any]:  # Any: ServerSettings checks every value
        """By the names of `ServerSettings`, without keys."""
        several = {
            "served_model_names": self.served_model_name,
            "allowed_hosts": self.allowed_hosts,
            "allowed_origins": self.allowed_origin,
            "allowed_methods": self.allowed_method,
            "allowed_headers": self.allowed_header,
        }
        names = {field.name for field in fields(ServerSettings)} - several.keys()
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}
        values |= {name: tuple(given) for name, given in several.items() if given is not None}
        return values

    def read_keys(self) -> tuple[str, ...]:
        """
        Raises:
            ConfigError: the key file cannot be read.
        """
        keys: Sequence[str] = self.api_key or ()
        return (*keys, *(() if self.api_key_file is None else read_key_file(Path(self.api_key_file).expanduser())))
