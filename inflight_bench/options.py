"""The options of `inflight bench serve`. Each is declared once, with its type, default, bounds and help text."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

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


def _option(group: str, metavar: str | None, help: str, *names: str, **more: Any) -> Any:  # Any: `typer.Option`'s own
    """What makes a field an option of the command. `more` are arguments of `typer.Option`."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=group, **more)


_server, _requests, _traffic, _body, _result = (
    partial(_option, group) for group in ("Server", "Requests", "Traffic", "Body", "Result")
)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server to which the requests are sent."""

    base_url: Annotated[str | None, _server("URL", "The server's URL, used instead of --host and --port.")] = None
    host: Annotated[str, _server("NAME", "The server's host name or address.")] = "127.0.0.1"
    port: Annotated[int, _server("N", "The server's port.", min=1, max=65535)] = 8000
    endpoint: Annotated[str, _server("PATH", f"{COMPLETIONS} or {CHAT}.")] = COMPLETIONS
    model: Annotated[
        str | None, _server(None, "The model's name. Default: the first model of the server.", "--model", "-m")
    ] = None
    api_key: Annotated[str | None, _server("KEY", "Sent as a bearer token.", envvar="INFLIGHT_API_KEY")] = None
    header: Annotated[list[str] | None, _server("NAME=VALUE", "A header for every request; may be repeated.")] = None
    timeout: Annotated[float, _server("S", "Seconds after which a request has failed.", min=0.001)] = 600.0

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

    dataset_name: Annotated[
        str,
        _requests(
            "NAME",
            "random (token ids), or the form of a file: custom (JSON lines), sharegpt.",
            "--dataset-name",
            "--dataset",
        ),
    ] = "random"
    dataset_path: Annotated[Path | None, _requests("FILE", "The file, if the dataset is custom or sharegpt.")] = None
    num_prompts: Annotated[int, _requests("N", "How many requests are measured.", min=1)] = 100
    num_warmups: Annotated[
        int, _requests("N", "Requests to send first, all at once, without measuring them.", min=0)
    ] = 0
    input_len: Annotated[int, _requests("N", "Mean prompt tokens, without the prefix.", min=1)] = 512
    output_len: Annotated[int, _requests("N", "Mean output tokens.", min=1)] = 128
    range_ratio: Annotated[
        float, _requests("R", "Lengths are uniform between the mean x (1 - R) and the mean x (1 + R).")
    ] = 0.0
    lognormal_sigma: Annotated[float, _requests("S", "Lengths are lognormal, with this sigma.")] = 0.0
    prefix_len: Annotated[int, _requests("N", "Tokens of a prefix that several prompts share.", min=0)] = 0
    num_prefixes: Annotated[int, _requests("N", "How many different prefixes there are.", min=1)] = 1
    max_token_id: Annotated[
        int | None, _requests("N", "Draw token ids below this. Default: the ids that /tokenize returns for a text.")
    ] = None
    seed: Annotated[int, _requests("N", "Seed of prompts, lengths and arrivals.", min=0)] = 0

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

    request_rate: Annotated[float, _traffic("R", "Requests per second; inf sends all at once.")] = math.inf
    burstiness: Annotated[
        float,
        _traffic("B", "1 is a Poisson process. Below 1, requests come in clumps. Above 1, they come more regularly."),
    ] = 1.0
    max_concurrency: Annotated[
        int | None, _traffic("N", "Most requests that run at the same time. Further ones wait in the client.", min=1)
    ] = None
    ramp_up_strategy: Annotated[str | None, _traffic("HOW", "linear or exponential.")] = None
    ramp_up_start_rps: Annotated[float | None, _traffic("R", "The rate at the first request.")] = None
    ramp_up_end_rps: Annotated[float | None, _traffic("R", "The rate at the last request.")] = None
    burst_on: Annotated[float | None, _traffic("S", "Length of a burst: send for this many seconds.")] = None
    burst_off: Annotated[float | None, _traffic("S", "Length of the pause after a burst, in seconds.")] = None

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

    ignore_eos: Annotated[
        bool | None,
        _body(
            None,
            "Do not stop at end tokens. This is the default for random prompts.",
            "--ignore-eos/--no-ignore-eos",
            show_default=False,
        ),
    ] = None
    extra_body: Annotated[str | None, _body("JSON", "More fields of every request's body.")] = None

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

    percentile_metrics: Annotated[str, _result("NAMES", "Latencies to report: ttft, tpot, itl, e2el.")] = (
        "ttft,tpot,itl,e2el"
    )
    metric_percentiles: Annotated[str, _result("NUMBERS", "Percentiles of these latencies.")] = "50,90,99"
    goodput: Annotated[
        list[str] | None,
        _result("GOALS", 'Count requests that meet these goals in milliseconds: "ttft:200 tpot:50"; also e2el.'),
    ] = None
    save_result: Annotated[bool, _result(None, "Write a JSON file.", "--save-result")] = False
    save_detailed: Annotated[
        bool, _result(None, "Also write the figures of each single request.", "--save-detailed")
    ] = False
    result_dir: Annotated[Path, _result("FOLDER", "The folder of the file.")] = Path()
    result_filename: Annotated[str | None, _result("NAME", "The name of the file.")] = None
    label: Annotated[str | None, _result("TEXT", "A label that is written into the file and its name.")] = None
    metadata: Annotated[
        list[str] | None, _result("NAME=VALUE", "A pair that is written into the file; may be repeated.")
    ] = None
    plot: Annotated[Path | None, _result("FILE", "Draw the latency distributions into this PNG.")] = None

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
