"""The dashboard and the page of docs name what the server exposes: all that the page must, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from inflight.metrics.instruments import INSTRUMENTS
from inflight.metrics.serving import ServingMetrics
from tests.unit.metrics.observed import observe_one_request, scrape, stats

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "inflight.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def samples() -> dict[str, set[str]]:
    """Sample name -> its labels."""
    metrics = ServingMetrics("m")
    observe_one_request(metrics)
    metrics.stats_changed(stats())
    metrics.http_request("/health", 200, 0.1)
    metrics.request_refused("queue_full")
    found: dict[str, set[str]] = {}
    for name, labels in scrape(metrics):
        found.setdefault(name, {"model_name"}).update(label for label, _ in labels)
    return found


def test_every_query_asks_for_what_is_there() -> None:
    exposed = samples()
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    queries += [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > len(PANELS)
    for query in queries:
        names = re.findall(r"\w+:\w+", query)
        assert names
        assert set(names) <= set(exposed), query
        labels = set(re.findall(r"(\w+)=~?\"", query))
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            labels |= set(re.split(r",\s*", grouped))
        assert labels <= set.intersection(*(exposed[name] for name in names)), query
        assert query.count("(") == query.count(")")


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_panels_are_what_grafana_wants() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"]
    assert DASHBOARD["title"]
    assert [row["title"] for row in DASHBOARD["panels"] if row["type"] == "row"] == [
        *("Traffic", "Latency", "Engine", "KV cache", "HTTP")
    ]
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    for panel in PANELS:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)|\$\{(\w+)\}", json.dumps(DASHBOARD))) <= {
        *((name, "") for name in (*variables, "__rate_interval")),
        *(("", name) for name in variables),
    }


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_page_of_docs_has_every_metric_as_it_is() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    expected = [
        f"| `{each.full_name}` | {', '.join(f'`{alias}`' for alias in each.aliases)} | {each.kind} "
        f"| {', '.join(f'`{label}`' for label in each.labels)} | {each.help} |"
        for each in INSTRUMENTS
    ]
    assert [line for line in page if line.startswith("| `")] == expected
