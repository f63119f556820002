"""`inflight bench serve`: how a server fares under load, with the options and result names of vLLM's `bench serve`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight.entrypoints.cli.command import command
from inflight.errors import ConfigError

if TYPE_CHECKING:
    from inflight.entrypoints.bench_serve.run import RunSettings  # loads the extra

EPILOG = """\b
Examples:
  inflight bench serve --num-prompts 200 --request-rate 10 --goodput "ttft:200 tpot:50"
  inflight bench serve --input-len 1024 --range-ratio 0.5 --prefix-len 512 --num-prefixes 4 --max-concurrency 32
  inflight bench serve --base-url http://gpu-7:8000 --save-result --save-detailed --plot latencies.png

Needs the extra "bench". docs/bench-serve.md says what the figures mean.
"""

SERVER, DATASET, TRAFFIC, SAMPLING, RESULT = "Server", "Requests", "Traffic", "Sampling", "Result"


def _option(group: str, help: str, *names: str, metavar: str | None = None, **bounds: Any) -> Any:  # Any: typer's own
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=group, **bounds)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the requests go."""

    base_url: Annotated[str | None, _option(SERVER, "Of the server, instead of --host and --port.", metavar="URL")] = (
        None
    )
    host: Annotated[str, _option(SERVER, "Of the server.", metavar="NAME")] = "127.0.0.1"
    port: Annotated[int, _option(SERVER, "Of the server.", metavar="N", min=1, max=65535)] = 8000
    endpoint: Annotated[str, _option(SERVER, "/v1/completions or /v1/chat/completions.", metavar="PATH")] = (
        "/v1/completions"
    )
    model: Annotated[
        str | None, _option(SERVER, "The model's name; by default the first that the server names.", "--model", "-m")
    ] = None
    api_key: Annotated[
        str | None, _option(SERVER, "Sent as a bearer token.", metavar="KEY", envvar="INFLIGHT_API_KEY")
    ] = None
    header: Annotated[
        list[str] | None, _option(SERVER, "A header for every request; may be repeated.", metavar="NAME=VALUE")
    ] = None
    timeout: Annotated[float, _option(SERVER, "Seconds after which a request has failed.", metavar="S", min=0.001)] = (
        600.0
    )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url or f"http://{host}:{self.port}"

    def headers(self) -> dict[str, str]:
        headers = dict(_pair("--header", text) for text in self.header or ())
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """What is sent."""

    dataset_name: Annotated[
        str,
        _option(
            DATASET,
            "random token ids, or of a file: custom (JSON lines), sharegpt.",
            "--dataset-name",
            "--dataset",
            metavar="NAME",
        ),
    ] = "random"
    dataset_path: Annotated[Path | None, _option(DATASET, "The file.", metavar="FILE")] = None
    num_prompts: Annotated[int, _option(DATASET, "How many requests are measured.", metavar="N", min=1)] = 100
    num_warmups: Annotated[int, _option(DATASET, "How many more come before, all at once.", metavar="N", min=0)] = 0
    input_len: Annotated[int, _option(DATASET, "Mean prompt tokens, without the prefix.", metavar="N", min=1)] = 512
    output_len: Annotated[int, _option(DATASET, "Mean output tokens.", metavar="N", min=1)] = 128
    range_ratio: Annotated[
        float, _option(DATASET, "Lengths are uniform within the mean x (1 +- this).", metavar="R")
    ] = 0.0
    lognormal_sigma: Annotated[float, _option(DATASET, "Lengths are lognormal, this wide.", metavar="S")] = 0.0
    prefix_len: Annotated[int, _option(DATASET, "Tokens that prompts share at their start.", metavar="N", min=0)] = 0
    num_prefixes: Annotated[int, _option(DATASET, "How many different ones of these.", metavar="N", min=1)] = 1
    max_token_id: Annotated[
        int | None,
        _option(DATASET, "Draw ids below this; by default those /tokenize gives for a text.", metavar="N"),
    ] = None
    seed: Annotated[int, _option(DATASET, "Of prompts, lengths and arrivals.", metavar="N", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """When it is sent."""

    request_rate: Annotated[float, _option(TRAFFIC, "Requests per second; inf sends all at once.", metavar="R")] = (
        math.inf
    )
    burstiness: Annotated[
        float, _option(TRAFFIC, "1 is Poisson; less comes in clumps, more is regular.", metavar="B")
    ] = 1.0
    max_concurrency: Annotated[
        int | None, _option(TRAFFIC, "Hold requests back while so many are under way.", metavar="N", min=1)
    ] = None
    ramp_up_strategy: Annotated[str | None, _option(TRAFFIC, "linear or exponential.", metavar="HOW")] = None
    ramp_up_start_rps: Annotated[float | None, _option(TRAFFIC, "The rate at the first request.", metavar="R")] = None
    ramp_up_end_rps: Annotated[float | None, _option(TRAFFIC, "The rate at the last.", metavar="R")] = None
    burst_on: Annotated[float | None, _option(TRAFFIC, "Send for so many seconds, ...", metavar="S")] = None
    burst_off: Annotated[float | None, _option(TRAFFIC, "... then none for so many.", metavar="S")] = None


@dataclass(frozen=True, kw_only=True)
class SamplingBodyOptions:
    """What every request asks for besides; left out, the server's own defaults hold."""

    temperature: Annotated[float | None, _option(SAMPLING, "0 is greedy.", metavar="T")] = None
    top_p: Annotated[float | None, _option(SAMPLING, "Keep the most probable up to this sum.", metavar="P")] = None
    top_k: Annotated[int | None, _option(SAMPLING, "Keep this many of the most probable.", metavar="K")] = None
    min_p: Annotated[float | None, _option(SAMPLING, "Keep those this near the most probable.", metavar="P")] = None
    frequency_penalty: Annotated[
        float | None, _option(SAMPLING, "For every time a token was emitted.", metavar="F")
    ] = None
    presence_penalty: Annotated[float | None, _option(SAMPLING, "Once for a token that was emitted.", metavar="F")] = (
        None
    )
    repetition_penalty: Annotated[float | None, _option(SAMPLING, "For tokens of prompt or output.", metavar="F")] = (
        None
    )
    ignore_eos: Annotated[
        bool | None,
        _option(
            SAMPLING,
            "Go on past end tokens; the default of random prompts.",
            "--ignore-eos/--no-ignore-eos",
            show_default=False,
        ),
    ] = None
    extra_body: Annotated[str | None, _option(SAMPLING, "More fields of every request's body.", metavar="JSON")] = None

    def body(self, dataset_name: str) -> dict[str, Any]:  # Any: JSON
        names = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty".split()
        body: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.ignore_eos or (self.ignore_eos is None and dataset_name == "random"):
            body["ignore_eos"] = True
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ConfigError("--extra-body is no JSON object")
        return body | extra


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What is made of it."""

    percentile_metrics: Annotated[
        str, _option(RESULT, "Latencies to report: ttft, tpot, itl, e2el.", metavar="NAMES")
    ] = "ttft,tpot,itl,e2el"
    metric_percentiles: Annotated[str, _option(RESULT, "Their percentiles.", metavar="NUMBERS")] = "50,90,99"
    goodput: Annotated[
        list[str] | None,
        _option(RESULT, 'Count requests within these milliseconds: "ttft:200 tpot:50"; also e2el.', metavar="GOALS"),
    ] = None
    save_result: Annotated[bool, _option(RESULT, "Write a JSON file.", "--save-result")] = False
    save_detailed: Annotated[bool, _option(RESULT, "With the figures of every request.", "--save-detailed")] = False
    result_dir: Annotated[Path, _option(RESULT, "The folder of the file.", metavar="FOLDER")] = Path()
    result_filename: Annotated[str | None, _option(RESULT, "The name of the file.", metavar="NAME")] = None
    label: Annotated[str | None, _option(RESULT, "Kept in the file, and in its name.", metavar="TEXT")] = None
    metadata: Annotated[
        list[str] | None, _option(RESULT, "Kept in the file; may be repeated.", metavar="NAME=VALUE")
    ] = None
    plot: Annotated[Path | None, _option(RESULT, "Draw the latency distributions into this PNG.", metavar="FILE")] = (
        None
    )


@command
def serve(
    *,
    server: ServerOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    sampling: SamplingBodyOptions,
    result: ResultOptions,
) -> None:
    """Send requests to an OpenAI-compatible server at their times, however long answers take, and time the answers."""
    from inflight.entrypoints.bench_serve.report import table  # the extra "bench": not for `--help`
    from inflight.entrypoints.bench_serve.run import run

    if result.plot is not None:
        from inflight.entrypoints.bench_serve.plot import plot_latencies  # what is missing is said before the load
    settings = _settings(server, dataset, traffic, sampling, result)
    metadata = dict(_pair("--metadata", text) for text in result.metadata or ())
    load, figures = run(server.url, settings, headers=server.headers(), timeout=server.timeout)
    for line in table(figures, settings.report):
        typer.echo(line)
    if result.save_result:
        path = _save(result, {"label": result.label, **metadata, **figures})
        typer.echo(f"Result: {path}")
    if result.plot is not None:
        plot_latencies(result.plot, f"{figures['model_id']}: {figures['completed']} requests", load.records)
        typer.echo(f"Plot: {result.plot}")
    if not figures["completed"]:
        raise ConnectionError("every request failed")


def _settings(
    server: ServerOptions,
    dataset: DatasetOptions,
    traffic: TrafficOptions,
    sampling: SamplingBodyOptions,
    result: ResultOptions,
) -> RunSettings:
    from inflight.entrypoints.bench_serve.arrivals import Arrivals
    from inflight.entrypoints.bench_serve.dataset import Lengths
    from inflight.entrypoints.bench_serve.report import ReportSettings
    from inflight.entrypoints.bench_serve.run import DatasetSettings, RunSettings

    def lengths(mean: int) -> Lengths:
        return Lengths(mean=mean, range_ratio=dataset.range_ratio, lognormal_sigma=dataset.lognormal_sigma)

    return RunSettings(
        model=server.model,
        endpoint=server.endpoint,
        dataset=DatasetSettings(
            name=dataset.dataset_name,
            path=dataset.dataset_path,
            input_lengths=lengths(dataset.input_len),
            output_lengths=lengths(dataset.output_len),
            prefix_len=dataset.prefix_len,
            num_prefixes=dataset.num_prefixes,
            max_token_id=dataset.max_token_id,
        ),
        arrivals=Arrivals(
            request_rate=traffic.request_rate,
            burstiness=traffic.burstiness,
            ramp_up=traffic.ramp_up_strategy,
            ramp_up_start=traffic.ramp_up_start_rps,
            ramp_up_end=traffic.ramp_up_end_rps,
            burst_on=traffic.burst_on,
            burst_off=traffic.burst_off,
        ),
        report=ReportSettings.parse(result.percentile_metrics, result.metric_percentiles, result.goodput or ()),
        body=sampling.body(dataset.dataset_name),
        num_prompts=dataset.num_prompts,
        num_warmups=dataset.num_warmups,
        max_concurrency=traffic.max_concurrency,
        seed=dataset.seed,
    )


def _save(result: ResultOptions, figures: dict[str, Any]) -> Path:  # Any: JSON
    from inflight.entrypoints.bench_serve.report import DETAILS

    concurrency = "" if figures["max_concurrency"] is None else f"-concurrency{figures['max_concurrency']}"
    model, label = figures["model_id"].split("/")[-1], result.label or figures["backend"]
    name = f"{label}-{figures['request_rate']}qps{concurrency}-{model}-{figures['date']}.json"
    kept = {key: value for key, value in figures.items() if result.save_detailed or key not in DETAILS}
    result.result_dir.mkdir(parents=True, exist_ok=True)
    path = result.result_dir / (result.result_filename or name)
    path.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return path


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{option} {text!r} is no NAME=VALUE")
    return name.strip(), value.strip()
