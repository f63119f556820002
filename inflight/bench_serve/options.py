"""The options of `inflight bench serve`. Each is declared once, with its type, default, bounds and help text."""

# ruff: noqa: RUF009 - the calls in the dataclasses return a `dataclasses.field`

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import typer

from inflight.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DATASETS = ("random", "custom", "sharegpt")
RAMPS = ("linear", "exponential")
FIRST_TOKEN_ID = 3  # in most vocabularies smaller ids are special tokens
# Names of latencies in options -> their short and long names in the report.
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOALS = ("ttft", "tpot", "e2el")
BODY_FIELDS = tuple("temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty".split())
OPTION = "option"  # in the metadata of a field: its `typer.Option`


def option(group: str, default: Any, metavar: str | None, help: str, *names: str, **more: Any) -> Any:
    """A field of a dataclass that becomes an option of a command. `more` are arguments of `typer.Option`."""
    made = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=group, **more)
    return field(default=default, metadata={OPTION: made})


_server, _requests, _traffic, _body, _result = (
    partial(option, group) for group in ("Server", "Requests", "Traffic", "Body", "Result")
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server to which the requests are sent."""

    base_url: str | None = _server(None, "URL", "The server's URL, used instead of --host and --port.")
    host: str = _server("127.0.0.1", "NAME", "The server's host name or address.")
    port: int = _server(8000, "N", "The server's port.", min=1, max=65535)
    endpoint: str = _server(COMPLETIONS, "PATH", f"{COMPLETIONS} or {CHAT}.")
    model: str | None = _server(
        None, None, "The model's name. Default: the first model of the server.", "--model", "-m"
    )
    api_key: str | None = _server(None, "KEY", "Sent as a bearer token.", envvar="INFLIGHT_API_KEY")
    header: list[str] | None = _server(None, "NAME=VALUE", "A header for every request; may be repeated.")
    timeout: float = _server(600.0, "S", "Seconds after which a request has failed.", min=0.001)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url {self.url!r} must begin with http:// or https://")
        if self.endpoint not in (COMPLETIONS, CHAT):
            raise ConfigError(f"--endpoint {self.endpoint!r} must be {COMPLETIONS} or {CHAT}")
        _pairs("--header", self.header)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (self.base_url or f"http://{host}:{self.port}").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return _pairs("--header", self.header) | key


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Which requests are sent. If a line of a dataset file has no output length, its request asks for `output_len` tokens."""

    dataset_name: str = _requests(
        "random",
        "NAME",
        "random (token ids), or the form of a file: custom (JSON lines), sharegpt.",
        "--dataset-name",
        "--dataset",
    )
    dataset_path: Path | None = _requests(None, "FILE", "The file, if the dataset is custom or sharegpt.")
    num_prompts: int = _requests(100, "N", "How many requests are measured.", min=1)
    num_warmups: int = _requests(0, "N", "Requests to send first, all at once, without measuring them.", min=0)
    input_len: int = _requests(512, "N", "Mean prompt tokens, without the prefix.", min=1)
    output_len: int = _requests(128, "N", "Mean output tokens.", min=1)
    range_ratio: float = _requests(0.0, "R", "Lengths are uniform between the mean x (1 - R) and the mean x (1 + R).")
    lognormal_sigma: float = _requests(0.0, "S", "Lengths are lognormal, with this sigma.")
    prefix_len: int = _requests(0, "N", "Tokens of a prefix that several prompts share.", min=0)
    num_prefixes: int = _requests(1, "N", "How many different prefixes there are.", min=1)
    max_token_id: int | None = _requests(
        None, "N", "Draw token ids below this. Default: the ids that /tokenize returns for a text."
    )
    seed: int = _requests(0, "N", "Seed of prompts, lengths and arrivals.", min=0)

    def __post_init__(self) -> None:
        name, path = self.dataset_name, self.dataset_path
        if name not in DATASETS:
            raise ConfigError(f"--dataset-name {name!r} must be one of {', '.join(DATASETS)}")
        if (name == "random") != (path is None):
            wrong = "needs --dataset-path FILE" if path is None else "does not use --dataset-path: leave it out"
            raise ConfigError(f"--dataset-name {name} {wrong}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio {self.range_ratio} must be at least 0 and less than 1")
        if self.lognormal_sigma < 0:
            raise ConfigError(f"--lognormal-sigma {self.lognormal_sigma} must not be negative")
        if self.range_ratio and self.lognormal_sigma:
            raise ConfigError(
                "--range-ratio (uniform lengths) and --lognormal-sigma (lognormal lengths) cannot be combined: leave one out"
            )
        if self.max_token_id is not None and self.max_token_id <= FIRST_TOKEN_ID:
            raise ConfigError(f"--max-token-id {self.max_token_id} must be more than {FIRST_TOKEN_ID}")


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """When requests are sent. With bursts, the rate is the rate within a burst, without the pauses."""

    request_rate: float = _traffic(math.inf, "R", "Requests per second; inf sends all at once.")
    burstiness: float = _traffic(
        1.0, "B", "1 is a Poisson process. Below 1, requests come in clumps. Above 1, they come more regularly."
    )
    max_concurrency: int | None = _traffic(
        None, "N", "Most requests that run at the same time. Further ones wait in the client.", min=1
    )
    ramp_up_strategy: str | None = _traffic(None, "HOW", "linear or exponential.")
    ramp_up_start_rps: float | None = _traffic(None, "R", "The rate at the first request.")
    ramp_up_end_rps: float | None = _traffic(None, "R", "The rate at the last request.")
    burst_on: float | None = _traffic(None, "S", "Length of a burst: send for this many seconds.")
    burst_off: float | None = _traffic(None, "S", "Length of the pause after a burst, in seconds.")

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate} must be positive; inf sends all at once")
        if not 0 < self.burstiness < math.inf:
            raise ConfigError(f"--burstiness {self.burstiness} must be positive and finite")
        if (self.burst_on is None) != (self.burst_off is None):
            raise ConfigError("--burst-on and --burst-off are needed together: give both or neither")
        if self.burst_on is not None and self.burst_off is not None and not min(self.burst_on, self.burst_off) > 0:
            raise ConfigError("--burst-on and --burst-off must be positive")
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if (start, end) != (None, None):
                raise ConfigError(
                    "--ramp-up-start-rps and --ramp-up-end-rps are given without --ramp-up-strategy: give linear or exponential"
                )
            if self.burst_on is not None and math.isinf(self.request_rate):
                raise ConfigError("--burst-on needs a finite --request-rate: at rate inf all requests are sent at once")
            return
        if self.ramp_up_strategy not in RAMPS:
            raise ConfigError(f"--ramp-up-strategy {self.ramp_up_strategy!r} must be one of {', '.join(RAMPS)}")
        if not math.isinf(self.request_rate):
            raise ConfigError("--ramp-up-strategy and --request-rate cannot be combined: leave --request-rate out")
        if start is None or end is None or not 0 < start <= end:
            raise ConfigError(
                f"--ramp-up-strategy needs 0 < --ramp-up-start-rps <= --ramp-up-end-rps, not {start} and {end}"
            )


@dataclass(frozen=True, kw_only=True)
class BodyOptions:
    """Further fields that every request gets, in addition to the sampling parameters in `BODY_FIELDS`."""

    ignore_eos: bool | None = _body(
        None,
        None,
        "Do not stop at end tokens. This is the default for random prompts.",
        "--ignore-eos/--no-ignore-eos",
        show_default=False,
    )
    extra_body: str | None = _body(None, "JSON", "More fields of every request's body.")

    def __post_init__(self) -> None:
        self._extra()

    def body(self, sampling: Mapping[str, Any], dataset_name: str) -> dict[str, Any]:  # Any: JSON
        """Returns the fields. For a sampling parameter that is not in `sampling`, the server uses its own default."""
        ignores_eos = self.ignore_eos or (self.ignore_eos is None and dataset_name == "random")
        return {**sampling, **({"ignore_eos": True} if ignores_eos else {}), **self._extra()}

    def _extra(self) -> dict[str, Any]:  # Any: JSON
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ConfigError('--extra-body must be a JSON object, as in {"stop": "."}')
        return extra


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Which figures are computed from the answers, and where they are written."""

    percentile_metrics: str = _result("ttft,tpot,itl,e2el", "NAMES", "Latencies to report: ttft, tpot, itl, e2el.")
    metric_percentiles: str = _result("50,90,99", "NUMBERS", "Percentiles of these latencies.")
    goodput: list[str] | None = _result(
        None, "GOALS", 'Count requests that meet these goals in milliseconds: "ttft:200 tpot:50"; also e2el.'
    )
    save_result: bool = _result(False, None, "Write a JSON file.", "--save-result")
    save_detailed: bool = _result(False, None, "Also write the figures of each single request.", "--save-detailed")
    result_dir: Path = _result(Path(), "FOLDER", "The folder of the file.")
    result_filename: str | None = _result(None, "NAME", "The name of the file.")
    label: str | None = _result(None, "TEXT", "A label that is written into the file and its name.")
    metadata: list[str] | None = _result(None, "NAME=VALUE", "A pair that is written into the file; may be repeated.")
    plot: Path | None = _result(None, "FILE", "Draw the latency distributions into this PNG.")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.latencies if name not in LATENCIES]:
            raise ConfigError(f"--percentile-metrics: unknown name {', '.join(unknown)}; give {', '.join(LATENCIES)}")
        if any(not 0 <= value <= 100 for value in self.percentiles):
            raise ConfigError(f"--metric-percentiles {self.metric_percentiles}: each percentile must be from 0 to 100")
        if unknown := [name for name in self.goals if name not in GOALS]:
            raise ConfigError(
                f"--goodput {unknown[0]}: give {', '.join(GOALS)}, each with milliseconds, as in ttft:200"
            )
        _pairs("--metadata", self.metadata)

    @property
    def latencies(self) -> list[str]:
        return [name.strip() for name in self.percentile_metrics.split(",") if name.strip()]

    @property
    def percentiles(self) -> list[float]:
        return [_number("--metric-percentiles", text) for text in self.metric_percentiles.split(",") if text.strip()]

    @property
    def goals(self) -> dict[str, float]:
        """For each latency that has a goal, the largest number of milliseconds with which a request counts as good."""
        goals = (goal.partition(":") for text in self.goodput or () for goal in text.split())
        return {name: _number("--goodput", text) for name, _, text in goals}

    @property
    def named(self) -> dict[str, str | None]:
        """The label and the metadata, which are copied into the result file."""
        return {"label": self.label, **_pairs("--metadata", self.metadata)}


def _pairs(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option} {text!r} does not have the form NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{option}: {text!r} is not a number")
    return value
