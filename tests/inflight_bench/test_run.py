"""`inflight bench serve` against a server of known timing: latencies, counts, failures, files."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from inflight.entrypoints.cli.main import app
from tests.inflight_bench.fake_server import FIRST_SECONDS, TOKEN_SECONDS, VOCABULARY, FakeServer

# of a result of vLLM's `bench serve --save-result --save-detailed`
VLLM_NAMES = """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed
failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors max_output_tokens_per_s
max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
mean_client_queue_time_ms p99_client_queue_time_ms
""".split()


def run(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", "--base-url", url, *arguments])


def run_saved(folder: Path, url: str, *arguments: str) -> dict[str, Any]:
    result = run(
        url, "--save-result", "--save-detailed", f"--result-dir={folder}", "--result-filename=r.json", *arguments
    )
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return document


def test_latencies_counts_and_names(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = run_saved(
            tmp_path,
            server.url,
            *("--num-prompts=6", "--input-len=32", "--output-len=5", "--max-concurrency=3", "--temperature=0"),
            *("--goodput", "ttft:10000 tpot:10000", "--metadata=machine=mine", "--num-warmups=2", "--api-key=secret"),
            f"--plot={tmp_path / 'plot.png'}",
        )
    assert set(VLLM_NAMES) <= set(result)
    assert result["model_id"] == "fake/model"
    assert result["machine"] == "mine"
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["input_lens"] == [32] * 6
    assert result["output_lens"] == [5] * 6
    assert result["total_output_tokens"] == 30
    assert result["generated_texts"] == ["xxxxx"] * 6
    assert result["max_concurrent_requests"] <= 3
    least = FIRST_SECONDS + 4 * TOKEN_SECONDS
    assert all(ttft >= FIRST_SECONDS for ttft in result["ttfts"])
    assert all(len(itls) == 4 for itls in result["itls"])
    assert result["mean_itl_ms"] == pytest.approx(1e3 * statistics.mean(itl for itls in result["itls"] for itl in itls))
    # a token that is read late is near the next one, so only the time of the last token has a bound
    assert all(ttft + sum(itls) >= least for ttft, itls in zip(result["ttfts"], result["itls"], strict=True))
    assert result["mean_tpot_ms"] >= result["mean_itl_ms"] * 0.999
    assert result["median_e2el_ms"] >= least * 1e3
    assert result["duration"] >= 2 * least  # two rounds of three
    assert max(result["queue_times"]) >= least * 0.9
    assert result["request_goodput"] == result["request_throughput"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(server.bodies) == 8
    body = server.bodies[-1]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0.0, True, 5)
    assert set(body["prompt"]) <= set(VOCABULARY)
    assert len({tuple(each["prompt"]) for each in server.bodies}) == 8
    assert server.headers[-1]["Authorization"] == "Bearer secret"


def test_a_chat_has_its_prompts_as_text_and_its_role_is_no_token(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = run_saved(
            tmp_path,
            server.url,
            "--endpoint=/v1/chat/completions",
            "--num-prompts=2",
            "--input-len=7",
            "--output-len=3",
        )
    assert result["backend"] == "openai-chat"
    assert result["input_lens"] == [7, 7]
    assert all(ttft >= FIRST_SECONDS for ttft in result["ttfts"])
    assert all(len(itls) == 2 for itls in result["itls"])
    assert server.bodies[0]["max_completion_tokens"] == 3


def test_failures_are_counted_by_what_they_are(tmp_path: Path) -> None:
    faults = {0: "status", 1: "stream", 2: "cut", 3: "abort", 4: "no usage", 5: "no end"}
    with FakeServer(faults) as server:
        result = run_saved(tmp_path, server.url, "--num-prompts=8", "--output-len=2", "--max-concurrency=1")
    assert (result["completed"], result["failed"]) == (2, 6)
    status, stream, cut, abort, no_usage, no_end, *good = result["errors"]
    assert "HTTP 503" in status
    assert "the queue is full" in status
    assert "the engine is gone" in stream
    assert cut != ""
    assert "abort" in abort
    assert "usage" in no_usage
    assert no_end == "the stream ended before [DONE]"
    assert good == ["", ""]
    assert result["output_lens"] == [0, 0, 0, 0, 0, 0, 2, 2]
    assert result["total_output_tokens"] == 4
    assert result["request_goodput"] is None


def test_nothing_but_failures_is_a_failure() -> None:
    with FakeServer({0: "status", 1: "status"}) as server:
        result = run(server.url, "--num-prompts=2")
    assert result.exit_code == 1
    assert "2 failed: HTTP 503" in result.output


def test_slow_answers_do_not_hold_later_requests_back(tmp_path: Path) -> None:
    """Ten answers of 0.21 s each, 100 requests per second: all are sent within 0.1 s or so."""

    def is_on_time() -> bool:
        with FakeServer() as server:
            result = run_saved(tmp_path, server.url, "--num-prompts=10", "--output-len=9", "--request-rate=100")
        starts = result["start_times"]
        assert starts == sorted(starts)
        return max(starts) < 0.2 and result["max_concurrent_requests"] >= 8 and result["p99_client_lag_ms"] < 100

    assert any(is_on_time() for _ in range(10))  # other programs may use the machine


def test_the_same_seed_sends_the_same(tmp_path: Path) -> None:
    sent = []
    for seed in (1, 1, 2):
        with FakeServer() as server:
            run_saved(
                tmp_path, server.url, "--num-prompts=3", "--output-len=1", f"--seed={seed}", "--max-concurrency=1"
            )
        sent.append([body["prompt"] for body in server.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b", "output_tokens": 2}\n{"prompt": [5, 6, 7]}\n')
    with FakeServer() as server:
        run_saved(
            tmp_path, server.url, "--dataset=custom", f"--dataset-path={path}", "--num-prompts=3", "--output-len=1",
            "--max-concurrency=1",
        )  # fmt: skip
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("a b", 2), ([5, 6, 7], 1), ("a b", 2)]
    assert "ignore_eos" not in server.bodies[0]


def test_details_are_saved_on_demand_only(tmp_path: Path) -> None:
    with FakeServer() as server:
        result = run(
            server.url, "--num-prompts=1", "--output-len=1", "--save-result", f"--result-dir={tmp_path}", "--label=l"
        )
    assert result.exit_code == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("l-infqps-model-")
    saved = json.loads(path.read_text())
    assert "p99_ttft_ms" in saved
    assert "itls" not in saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint=/v1/embeddings"], "--endpoint"),
        (["--request-rate=0"], "--request-rate"),
        (["--burst-on=1"], "--burst-off"),
        (["--ramp-up-strategy=sudden"], "linear, exponential"),
        (["--ramp-up-strategy=linear"], "--ramp-up-start-rps"),
        (["--goodput=latency:5"], "ttft, tpot, e2el"),
        (["--goodput=ttft:soon"], "'soon' is not a number"),
        (["--percentile-metrics=ttlt"], "unknown name ttlt"),
        (["--metric-percentiles=101"], "0 to 100"),
        (["--dataset=sonnet"], "random, custom, sharegpt"),
        (["--dataset=custom"], "--dataset-name custom needs --dataset-path"),
        (["--dataset-path=x"], "--dataset-name random does not use --dataset-path"),
        (["--range-ratio=0.5", "--lognormal-sigma=1"], "cannot be combined"),
        (["--extra-body=[1]"], "must be a JSON object"),
        (["--header=x"], "NAME=VALUE"),
        (["--max-token-id=3"], "--max-token-id"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], message: str) -> None:
    result = run("http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_no_server_is_one_line() -> None:
    result = run("http://127.0.0.1:9", "--num-prompts=1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/v1/models gave no answer" in result.output


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name in ("inflight_bench.client", "inflight_bench.run")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    result = run("http://127.0.0.1:9")
    assert result.exit_code == 2
    assert 'pip install "inflight-llm[bench]"' in result.output
