"""The dashboard, the alerts and the page of docs name what the server exposes: all that the page must, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.interface.statistics import FaultStatus, TransferCounts
from inflight.metrics.instruments import INSTRUMENTS
from inflight.metrics.serving import ServingMetrics
from tests.unit.metrics.observed import observe_one_request, scrape, stats

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "dashboards" / "inflight.json").read_text())
ALERTS_FILE = ROOT / "dashboards" / "alerts.yaml"
ALERTS: dict[str, Any] = yaml.safe_load(ALERTS_FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def samples() -> dict[str, set[str]]:
    """Sample name -> its labels."""
    metrics = ServingMetrics("m")
    observe_one_request(metrics)
    transfers = TransferCounts(tiers={"disk": {"stored_bytes": 1}})
    metrics.stats_changed(replace(stats(), transfers=transfers))
    metrics.http_request("/health", 200, 0.1)
    metrics.request_refused("queue_full")
    metrics.faults_changed(FaultStatus(state="healthy", num_recoveries={"rank_died": 1}))
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


@pytest.mark.parametrize(
    "group",
    [
        "recover",
        "resumed_requests",
        "stale_frames",
        "kv_offload_",
        "kv_tier",
        "external_prefix",
        "spec_decode_",
        "image",
        "encoder_",
        "mm_cache_",
    ],
)
def test_faults_tiers_drafts_and_images_are_all_on_panels(group: str) -> None:
    queries = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    wanted = {each.full_name for each in INSTRUMENTS if group in each.name}
    assert wanted
    assert not {name for name in wanted if not re.search(rf"{name}(_total)?\b", queries)}, "no panel has these metrics"


def test_every_alert_asks_for_what_is_there_and_says_which_server_it_is() -> None:
    exposed = samples()
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 8
    for rule in rules:
        names = set(re.findall(r"\w+:\w+", rule["expr"]))
        assert names <= set(exposed) and (names or rule["alert"] == "InflightDown"), rule
        asked = re.findall(r"(\w+:\w+){([^}]*)}", rule["expr"])
        for name, labels in asked:
            assert set(re.findall(r'(\w+)[=!]~?"', labels)) <= exposed[name], rule
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        for grouped in re.findall(r"sum by \(([^)]*)\)", rule["expr"]):
            assert shown <= set(re.split(r",\s*", grouped)), rule


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_alerts_and_fires_them(tmp_path: Path) -> None:
    done = subprocess.run(["promtool", "check", "rules", ALERTS_FILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    server = 'instance="a", model_name="m"'
    fired = {  # alert -> series in which it fires within 10 minutes
        "InflightRecoveryTakesLong": {f"inflight:engine_recovering{{{server}}}": "1x20"},
        "InflightFaults": {f'inflight:recoveries_total{{{server}, cause="rank_died"}}': "0+1x20"},
        "InflightServerErrors": {
            f'inflight:http_requests_total{{{server}, route="/v1/models", status="200"}}': "0+50x20",
            f'inflight:http_requests_total{{{server}, route="/v1/models", status="500"}}': "0+10x20",
        },
        "InflightRefusesRequests": {f'inflight:requests_refused_total{{{server}, reason="queue_full"}}': "0+1x20"},
        "InflightNotReady": {f'inflight:http_requests_total{{{server}, route="/ready", status="503"}}': "0+6x20"},
        "InflightEngineDown": {f"inflight:engine_up{{{server}}}": "0x20"},
    }
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing", instance="a"}})',
                    "eval_time": "15m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ],
        }
        for alert, series in fired.items()
    ]
    healthy = {
        f"inflight:engine_up{{{server}}}": "1x20",
        f"inflight:engine_recovering{{{server}}}": "0x20",
        f'inflight:recoveries_total{{{server}, cause="rank_died"}}': "1x20",
        f'inflight:http_requests_total{{{server}, route="/v1/models", status="200"}}': "0+50x20",
        f"inflight:kv_cache_usage_perc{{{server}}}": "0.99x20",
    }
    tests.append(
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in healthy.items()],
            "promql_expr_test": [{"expr": "count(ALERTS)", "eval_time": "15m", "exp_samples": []}],
        }
    )
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS_FILE)], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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
        *("Traffic", "Latency", "Engine", "KV cache", "HTTP"),
        *("Faults", "KV blocks outside of the KV cache", "Speculative decoding", "Images"),
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
