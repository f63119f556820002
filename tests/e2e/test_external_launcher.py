"""A script that torchrun starts once per rank: all ranks return the outputs of one process, and die together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from inflight import LLM
from tests.e2e import external_launcher_script
from tests.support.model_zoo import VOCAB_SIZE, write_model

SCRIPT = external_launcher_script.__file__
MAX_SECONDS = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return write_model(config, tmp_path_factory.mktemp("launched") / "model", seed=1)


class Launched:
    """torchrun and its ranks, in a process group of their own."""

    def __init__(self, folder: Path, out: Path, tp: int, pp: int, mode: str = "") -> None:
        self.out, self.num_ranks = out, tp * pp
        program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp * pp)]
        command = [*program, str(SCRIPT), str(folder), str(out), str(tp), str(pp), mode]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS": "300"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> tuple[int, str]:
        try:
            printed, _ = self.process.communicate(timeout=MAX_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            printed, _ = self.process.communicate()
            pytest.fail(f"did not end:\n{printed}")
        return self.process.returncode, printed

    def results(self) -> list[Any]:
        return [json.loads((self.out / f"rank {rank}.json").read_text()) for rank in range(self.num_ranks)]


def one_process(folder: Path) -> list[Any]:
    with LLM(str(folder), **external_launcher_script.ENGINE) as llm:
        return external_launcher_script.outputs(llm)


def check_layout(folder: Path, out: Path, tp: int, pp: int) -> None:
    launched = Launched(folder, out, tp, pp)
    code, printed = launched.wait()
    assert code == 0, printed
    assert "died" not in printed
    ranks = launched.results()
    for rank in ranks[1:]:
        assert rank == ranks[0]  # to the last bit of every logprob
    expected = json.loads(json.dumps(one_process(folder)))
    assert [row["token_ids"] for row in ranks[0]["outputs"]] == [row["token_ids"] for row in expected]
    for got, wanted in zip(ranks[0]["outputs"], expected, strict=True):
        assert got["logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
    assert len(ranks[0]["available_memory"]) == tp * pp


def test_tensor_parallel_ranks_return_the_outputs_of_one_process(folder: Path, tmp_path: Path) -> None:
    check_layout(folder, tmp_path, 2, 1)


@pytest.mark.full
def test_tensor_and_pipeline_parallel_ranks_return_the_outputs_of_one_process(folder: Path, tmp_path: Path) -> None:
    check_layout(folder, tmp_path, 2, 2)


def test_a_rank_that_dies_ends_the_others_at_once(folder: Path, tmp_path: Path) -> None:
    """Rank 1 kills itself in the middle; rank 0 writes what it saw before torchrun ends it."""
    launched = Launched(folder, tmp_path, 2, 1, "die")
    code, printed = launched.wait()
    assert code != 0, printed
    assert (tmp_path / "died").exists(), printed
    died_at = float((tmp_path / "died").read_text())
    seen_at, error = json.loads((tmp_path / "error 0.json").read_text())
    assert "rank 1" in error, error
    assert seen_at - died_at < 60.0  # and not after the time limit of a step


@pytest.mark.full
def test_ranks_with_other_prompts_are_told(folder: Path, tmp_path: Path) -> None:
    launched = Launched(folder, tmp_path, 2, 1, "differ")
    code, printed = launched.wait()
    assert code != 0, printed
    errors = [json.loads(path.read_text())[1] for path in sorted(tmp_path.glob("error *.json"))]
    assert any("all ranks must make the same calls with the same arguments" in error for error in errors), errors
