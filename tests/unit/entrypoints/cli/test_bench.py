"""`inflight bench offline`: the workloads are those every engine is measured on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import Result

from inflight.entrypoints.cli import bench
from inflight.entrypoints.cli.workloads import BY_NAME, LONG, STANDARD, Workload, select
from tests.unit.entrypoints.fake_engine import FakeEngine
from tests.unit.entrypoints.runner import invoke

# sha256 of the JSON of each workload's prompts, taken from the script that measures the other engines
PROMPT_HASHES = {
    "decode1": "f9176bc23aeaa06e",
    "decode8": "b9615b64c07ac641",
    "decode32": "3902d011bc3bde87",
    "prefill": "8ca60c2d0622b516",
    "mixed": "fa90d8a88803d50a",
    "prefill4k": "b2d12476deb7c6c0",
    "decode1x4k": "b2d12476deb7c6c0",
    "decode1x8k": "e80c508f4530d0ac",
    "decode8x4k": "5495021ff6029860",
}


def run(*arguments: str, engine: FakeEngine) -> Result:
    return invoke(["bench", "offline", *arguments], obj=engine)


def test_the_token_ids_are_the_shared_ones() -> None:
    hashes = {
        name: hashlib.sha256(json.dumps(workload.prompts()).encode()).hexdigest()[:16]
        for name, workload in BY_NAME.items()
    }
    assert hashes == PROMPT_HASHES


def test_the_sizes_are_the_shared_ones() -> None:
    sizes = [(each.name, each.batch_size, each.input_len, each.output_len) for each in (*STANDARD, *LONG)]
    assert sizes == [
        ("decode1", 1, 16, 128),
        ("decode8", 8, 16, 64),
        ("decode32", 32, 16, 64),
        ("prefill", 1, 1024, 1),
        ("mixed", 16, 256, 64),
        ("prefill4k", 1, 4096, 1),
        ("decode1x4k", 1, 4096, 64),
        ("decode1x8k", 1, 8192, 64),
        ("decode8x4k", 8, 4096, 32),
    ]
    assert BY_NAME["prefill"].num_counted_tokens == 1024
    assert BY_NAME["mixed"].num_counted_tokens == 1024


def test_a_small_vocabulary_lowers_the_ids() -> None:
    prompts = Workload("", 4, 100, 1).prompts(max_token_id=50)
    assert {token_id for ids in prompts for token_id in ids} == set(range(3, 50))


def test_select() -> None:
    assert select("all") == list(STANDARD)
    assert select("long, decode1") == [*LONG, STANDARD[0]]
    assert select("decode1,all") == list(STANDARD)
    for names in ("", ",", "decode2", "all,x"):
        with pytest.raises(ValueError, match="the names are: all, long, decode1"):
            select(names)


def test_workloads_run_and_are_written(tmp_path: Path) -> None:
    engine = FakeEngine(max_model_len=4096, max_num_seqs=64)
    path = tmp_path / "results.json"
    done = run("-w", "decode1,prefill", "--repeat", "3", "-o", str(path), "--model", "m", engine=engine)
    assert done.exit_code == 0, done.output
    args = engine.args
    assert args is not None and args.skip_tokenizer_init and not args.enable_prefix_caching
    assert (args.max_num_seqs, args.max_model_len) == (64, 1025)
    assert all(params.greedy and params.ignore_eos for params in engine.params.values())
    document = json.loads(path.read_text())
    assert document["model"] == "m"
    decode, prefill = document["results"]
    assert (decode["workload"], decode["batch_size"], decode["output_len"]) == ("decode1", 1, 128)
    assert len(decode["all_seconds"]) == 3
    assert prefill["tokens_per_s"] > 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["workload", "decode1", "prefill"]


def test_free_sizes() -> None:
    engine = FakeEngine(max_num_seqs=100)
    done = run("--batch-size", "70", "--input-len", "5", "--output-len", "2", engine=engine)
    assert done.exit_code == 0, done.output
    assert engine.args is not None and (engine.args.max_num_seqs, engine.args.max_model_len) == (70, 24)
    assert done.stdout.splitlines()[1].split()[:4] == ["custom", "70", "5", "2"]


def test_sizes_that_are_given_are_used() -> None:
    engine = FakeEngine()
    line = ["--input-len", "5", "--max-num-seqs", "9", "--max-model-len", "200"]
    assert run(*line, engine=engine).exit_code == 0
    assert engine.args is not None and (engine.args.max_num_seqs, engine.args.max_model_len) == (9, 200)
    done = run("-w", "decode1", "--output-len", "5", engine=engine)
    assert done.exit_code == 2 and "give names or sizes" in done.output


@pytest.mark.parametrize(("vocab_size", "end"), [(40, 40), (10**6, 250)])
def test_token_ids_are_in_the_vocabulary(
    vocab_size: int, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No id is above those that every engine is measured with."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(bench, "MAX_TOKEN_ID", 250)
    engine = FakeEngine(max_model_len=10_000)
    monkeypatch.setattr(bench, "start_engine", lambda *given: engine)
    line = ["bench", "offline", "--input-len", "1000", "--output-len", "1", "--model", str(tmp_path)]
    done = invoke(line)
    assert done.exit_code == 0, done.output
    seen = {ord(token_id) for prompt in engine.prompts.values() for token_id in prompt}
    assert min(seen) >= 3 and end - 25 < max(seen) < end
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": "40"}))
    done = invoke(line)
    assert done.exit_code == 2 and "vocab_size='40' is not an integer" in done.output
