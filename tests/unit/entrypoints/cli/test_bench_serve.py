"""`inflight bench serve`: what reaches the load generator, and what is done with its figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inflight_bench import plot, report, run
from tests.unit.entrypoints.runner import invoke


class Played:
    """In place of the load generator and its reports."""

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.saved: list[Any] = []
        self.plots: list[tuple[Any, ...]] = []
        self.figures: dict[str, Any] = {"model_id": "org/m", "completed": 3}

    def run(self, *given: Any) -> tuple[Any, dict[str, Any]]:
        self.runs.append(given)
        return SimpleNamespace(records=["the records"]), self.figures

    def table(self, figures: Any, options: Any) -> list[str]:
        assert figures is self.figures and options is self.runs[-1][-1]
        return ["first line", "second line"]

    def save(self, figures: Any, options: Any) -> Path:
        assert figures is self.figures
        self.saved.append(options)
        return Path("/saved.json")

    def plot(self, *given: Any) -> None:
        self.plots.append(given)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(run, "run", played.run)
    monkeypatch.setattr(report, "table", played.table)
    monkeypatch.setattr(report, "save", played.save)
    monkeypatch.setattr(plot, "plot_latencies", played.plot)
    return played


def test_options_reach_the_load_generator(played: Played) -> None:
    line = "bench serve --port 7 --num-prompts 5 --request-rate 2 --temperature 0.5 --goodput ttft:200"
    done = invoke(line.split())
    assert (done.exit_code, done.output) == (0, "first line\nsecond line\n")
    ((server, dataset, traffic, body, result),) = played.runs
    assert (server.url, dataset.num_prompts, traffic.request_rate) == ("http://127.0.0.1:7", 5, 2.0)
    assert body["temperature"] == 0.5 and "top_p" not in body
    assert result.goodput == ["ttft:200"]
    assert not played.saved and not played.plots


def test_figures_are_written_and_drawn_if_asked_for(played: Played, tmp_path: Path) -> None:
    file = tmp_path / "x.png"
    done = invoke(["bench", "serve", "--save-result", "--plot", str(file)])
    assert done.exit_code == 0
    assert done.output == f"first line\nsecond line\nResult: /saved.json\nPlot: {file}\n"
    assert played.saved == [played.runs[0][-1]]
    assert played.plots == [(file, "org/m: 3 requests", ["the records"])]


def test_a_run_in_which_every_request_failed_is_an_error(played: Played) -> None:
    played.figures["completed"] = 0
    done = invoke(["bench", "serve", "--save-result"])
    assert done.exit_code == 1 and "every request failed" in done.output
    assert "first line" in done.output and len(played.saved) == 1
