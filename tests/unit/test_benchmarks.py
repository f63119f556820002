"""The pure parts of `benchmarks/`: what is computed from the measurements."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import cast

import jsonschema
import pytest

from benchmarks import models
from benchmarks.control_plane import by_phase
from benchmarks.hidden_control_plane import large_vocabulary, mean_period_ms
from benchmarks.models import SHAPES, Shape, model_folder, weight_bytes
from benchmarks.pipeline_overlap import Measured, busy_milliseconds
from benchmarks.report import memory_bytes, percentile, print_table
from benchmarks.soak import draw_requests, growth_bytes
from benchmarks.step_picture import draw_steps, lanes, window
from benchmarks.step_text import text_steps
from benchmarks.structured_extraction import regex_of, schema_of
from inflight.config.engine import SchedulerConfig
from inflight.timeline import Event
from scripts.demo.evaluate import held_out_samples


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    random.Random(0).shuffle(values)
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_phases_are_summed_per_step() -> None:
    def event(step_id: int, phase: str, milliseconds: int) -> Event:
        return Event(step_id, phase, 0, milliseconds * 1_000_000)

    whole = [event(3, phase, 1 + i) for i, phase in enumerate(("plan", "prepare", "forward", "sample", "commit"))]
    times = by_phase([*whole, event(4, "plan", 100)])  # step 4 is not over
    assert times["plan+prepare"] == [3.0]
    assert (times["plan"], times["forward"], times["commit"]) == ([1.0], [3.0], [5.0])


def test_the_steady_period_sees_bubbles_and_no_stalls() -> None:
    def steady(periods: list[float]) -> float:
        scheduler = cast(SchedulerConfig, None)  # it has no part in the period
        return Measured(periods=periods, slowest_stage=20.0, events={}, scheduler=scheduler).steady

    assert steady([20.0, 20.0, 50.0] * 20) == pytest.approx(30.0)
    assert steady([20.0] * 40 + [500.0] + [20.0] * 40) == pytest.approx(20.0)
    assert steady([20.0, 30.0]) == pytest.approx(25.0)


def test_steps_as_text() -> None:
    engine = [Event(7, "plan", 0, 10), Event(8, "plan", 500, 510), Event(7, "wait", 10, 990)]
    rank = [Event(7, "forward", 100, 600), Event(18, "forward", 650, 2000)]
    assert text_steps({"engine": engine, "rank 0": rank}, 0, 1000, width=10).splitlines() == [
        "engine plan    |7    8    |",
        "       wait    |7........7|",
        "rank 0 forward | 777778888|",
        "                0   0.0 ms",
    ]


def test_a_picture_of_steps(tmp_path: Path) -> None:
    milliseconds = 1_000_000
    ranks = [
        [Event(i, phase, start * milliseconds, end * milliseconds)]
        for i in range(10)
        for phase, start, end in (("receive", 20 * i, 20 * i + 1), ("forward", 20 * i + 1, 20 * i + 20))
    ]
    rank = [event for events in ranks for event in events]
    events = {"engine": [Event(i, "plan", 0, 1) for i in range(10)], "rank 0": rank}
    assert window(events, 4) == (61 * milliseconds, 140 * milliseconds)  # steps 3 to 6
    assert lanes(events) == [("engine", "plan"), ("rank 0", "receive"), ("rank 0", "forward")]
    assert busy_milliseconds(rank, 10) == pytest.approx(19.0)
    draw_steps({"one": events, "two": events}, 4, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_mean_period_counts_stalls() -> None:
    ends = [1_000_000, 6_000_000, 31_000_000, 36_000_000]
    events = [Event(i, phase, end - 10, end) for i, end in enumerate(ends) for phase in ("forward", "sample")]
    assert mean_period_ms(events) == pytest.approx(35 / 3)


def test_a_larger_vocabulary_keeps_the_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 10, "hidden_size": 4}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    target = large_vocabulary(folder, 99, tmp_path / "large")
    assert json.loads((target / "config.json").read_text()) == {"vocab_size": 99, "hidden_size": 4}
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "tokenizer.json"]


def test_growth_is_that_after_the_warm_up() -> None:
    assert growth_bytes([0, 50, 100, 100, 100, 100, 100, 100]) == 0
    assert growth_bytes([0, 10, 20, 30, 40, 50, 60, 70]) == 40
    assert growth_bytes([5]) == 0


def test_the_soak_draws_the_same_requests_again() -> None:
    requests = list(draw_requests(1, 200, 128, 48))
    assert requests == list(draw_requests(1, 200, 128, 48))
    assert requests != list(draw_requests(2, 200, 128, 48))
    assert max(len(prompt) for prompt, _, _ in requests) < 128 + 64
    assert any(params.n == 2 for _, params, _ in requests)
    assert any(abort_after is not None for _, _, abort_after in requests)


def test_a_right_extraction_satisfies_its_constraints() -> None:
    for sample in held_out_samples("extraction", 50):
        schema, answer = schema_of(sample), sample.answer["content"]
        jsonschema.validate(json.loads(answer), schema)
        assert re.fullmatch(regex_of(schema), answer, re.ASCII)
        assert not re.fullmatch(regex_of(schema), answer.replace(": ", ":"), re.ASCII)


def test_memory_of_this_process() -> None:
    assert 2**20 < memory_bytes("VmRSS") <= memory_bytes("VmHWM")
    with pytest.raises(ValueError, match="VmNone"):
        memory_bytes("VmNone")


def test_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "x"], [["a", 1], ["longer", 100]])
    assert capsys.readouterr().out == "\nname      x\na         1\nlonger  100\n"


def test_a_shape_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(shape: Shape, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(shape.fields))

    def fail(shape: Shape, folder: Path) -> None:
        write(shape, folder)
        raise OSError("disk full")

    monkeypatch.setattr(models, "write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        model_folder("llama-tiny", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(models, "write_model", write)
    folder = model_folder("llama-tiny", tmp_path)
    assert json.loads((folder / "config.json").read_text()) == SHAPES["llama-tiny"].fields
    monkeypatch.setattr(models, "write_model", fail)
    assert model_folder("llama-tiny", tmp_path) == folder == model_folder(str(folder), tmp_path)
    with pytest.raises(SystemExit):
        model_folder("no-such-model", tmp_path)


@pytest.mark.full
def test_a_model_is_written(tmp_path: Path) -> None:
    folder = model_folder("llama-tiny", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert {name: config[name] for name in SHAPES["llama-tiny"].fields} == SHAPES["llama-tiny"].fields
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert weight_bytes(folder) == pytest.approx(2 * 4 * (256 * 256 * 3 + 256 * 768 * 3) + 2 * 2 * 4096 * 256, rel=0.01)
    assert (folder / "tokenizer.json").is_file()
