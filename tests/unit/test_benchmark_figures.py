"""The pure parts of the speed and accuracy benchmarks: ratios, tables, the roofline's arithmetic, clocks, losses."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import roofline
from benchmarks.accuracy import LogitsError, relative_error
from benchmarks.compare import engines
from benchmarks.compare.driver import Settings
from benchmarks.compare.engines import Engine, find_before, find_engine
from benchmarks.compare.process import EngineProcess
from benchmarks.compare.table import Column, Pairs, Spread, markdown, table_rows
from benchmarks.in_turns import compare_in_turns
from benchmarks.models import SHAPES
from benchmarks.roofline import Machine, Needs, tokens_per_second
from benchmarks.step_profile import FORWARD, SAMPLE, WAITING, StepClock, least_seconds, shares_of
from benchmarks.task_accuracy import Loss
from inflight.config.parse_architecture import parse_architecture
from inflight.entrypoints.cli.workloads import BY_NAME, Workload

MACHINE = Machine(num_threads=2, read=31.2e9, read_huge_pages=33.8e9, fp32=230e9, bf16=448e9, int8=890e9)
ARCHITECTURE = parse_architecture({"architectures": ["Qwen3ForCausalLM"], **SHAPES["qwen3-0.6b"].fields})
NEEDS = Needs.of(ARCHITECTURE)


def test_the_roofline_of_the_06b_shape() -> None:
    assert NEEDS.layer_weights == 440_401_920 and NEEDS.head_weights == 155_582_464
    limits = {
        name: tokens_per_second(NEEDS, MACHINE, "bf16", BY_NAME[name]) for name in ("decode1", "decode32", "prefill")
    }
    # by hand: 1.19 GB at 33.8 GB/s; prompts of 0.45 TFLOP and 63 steps of 38 GFLOP; (0.90 + 0.12) TFLOP, at 448 GFLOP/s
    assert limits == pytest.approx({"decode1": 28.2, "decode32": 320, "prefill": 449}, rel=0.02)
    assert tokens_per_second(NEEDS, MACHINE, "int4", BY_NAME["decode1"]) > 2 * 28.2 * 1.6
    long, short = (tokens_per_second(NEEDS, MACHINE, "bf16", Workload("", 1, length, 64)) for length in (4096, 16))
    assert long < short / 5  # its prompt counts, and the KV cache is read


def test_the_peak_is_that_of_the_format() -> None:
    assert [MACHINE.peak(name) for name in ("bf16", "int8", "int4")] == [448e9, 890e9, 890e9]
    plain = Machine(num_threads=2, read=2e10, read_huge_pages=1e10, fp32=2e11, bf16=None, int8=None)
    assert [plain.peak(name) for name in ("bf16", "int8")] == [2e11, 2e11]
    assert plain.bandwidth == 2e10
    assert plain.best(plain) == plain
    assert (
        MACHINE.best(Machine(num_threads=2, read=3.5e10, read_huge_pages=1, fp32=1, bf16=9e11, int8=1)).bandwidth
        == 3.5e10
    )


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "roofline.c"  # a hundredth of the work
    text = roofline.SOURCE.read_text().replace("(size_t)1 << 30", "(size_t)1 << 24").replace("1 << 21", "1 << 14")
    source.write_text(text)
    monkeypatch.setattr(roofline, "SOURCE", source)
    found = roofline.measure_machine(1)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.fp32 < 1e13
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises((SystemExit, OSError)):
        roofline.measure_machine(1)


def test_ratios_are_of_one_round() -> None:
    pairs = Pairs(ours=[10, 20, 30], theirs=[10, 10, 10])
    assert pairs.ratio == Spread(2, 1, 3)
    assert str(pairs.ratio) == "2.00 (1.00-3.00)"
    # the machine slows down by half: every round has the same ratio, whatever the medians say
    assert Pairs(ours=[20, 10], theirs=[10, 5]).ratio == Spread(2, 2, 2)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        _ = Pairs(ours=[1, 2], theirs=[1]).ratio


def test_the_table_of_a_comparison() -> None:
    slow, fast = Pairs([10, 12, 14], [5, 6, 7]), Pairs([10, 12, 14], [20, 24, 28])
    columns = {
        "decode1": Column(ours=[10, 12, 14], peers={"a bf16": slow, "b bf16": fast}, roofline=48, goal=15),
        "prefill": Column(ours=[10, 12, 14], peers={"a bf16": slow, "b bf16": slow}, roofline=24, goal=None),
    }
    rows = {row[0]: row[1:] for row in table_rows("inflight bf16", columns)}
    assert rows["inflight bf16"] == ["12.0", "12.0"]
    assert rows["goal"] == ["15", ""]
    assert rows["ours / b bf16"] == ["0.50 (0.50-0.50)", "2.00 (2.00-2.00)"]
    assert rows["best peer"] == ["b bf16", "a bf16"]
    assert rows["ahead of it"] == ["NO", "yes"]
    assert rows["ours / roofline"] == ["25%", "50%"]
    alone = {"decode1": Column(ours=[1], peers={}, roofline=2, goal=None)}
    assert [row[0] for row in table_rows("inflight int4", alone)] == [
        "tokens/s", "roofline", "inflight int4", "ours / roofline",
    ]  # fmt: skip


def test_markdown() -> None:
    assert markdown([["x", "long"], ["longer", "1"]]) == "| x      | long |\n|--------|------|\n| longer | 1    |"


def test_rounds_change_their_order_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str, speeds: list[float]) -> float:
        calls.append(name)
        return speeds.pop(0)

    first, second = [1.0, 10.0, 20.0], [1000.0, 20.0, 40.0]
    row = compare_in_turns("test", "case", lambda: side("a", first), lambda: side("b", second), 2)
    assert row == ["case", "15.0", "30.0", "2.00 (2.00-2.00)"]
    assert calls == ["b", "a", "a", "b", "b", "a"]


def test_a_nested_call_counts_once() -> None:
    now = iter(range(0, 10_000, 10))
    clock = StepClock(lambda: next(now))
    inner = clock.timed("inner", lambda: None)
    outer = clock.timed(FORWARD, lambda: (inner(), inner()))
    sample = clock.timed(SAMPLE, lambda: None)
    inner()  # no step yet: not counted
    for _ in range(3):
        clock.begin_step(8, 8)
        outer()
        sample()
    step = clock.steps[0]
    assert step.nanoseconds == {"inner": 20, FORWARD: 30, SAMPLE: 10}
    assert step.calls == {"inner": 2, FORWARD: 1, SAMPLE: 1}
    steady = {share.kind: share.seconds for share in shares_of(clock.steps, is_steady=True)}
    assert steady == pytest.approx({FORWARD: 30e-9, "inner": 20e-9, SAMPLE: 10e-9, WAITING: 30e-9})
    alone = {share.kind: share.seconds for share in shares_of(clock.steps, is_steady=False)}
    assert alone[WAITING] == pytest.approx(20e-9)


def test_the_parts_of_a_step_need_what_the_step_needs() -> None:
    decode = least_seconds(ARCHITECTURE, MACHINE, "bf16", tokens=8, rows=8, prompt=100)
    cached, pairs = 800, 800
    whole = NEEDS.step_seconds(MACHINE, "bf16", tokens=8, rows=8, cached=cached, pairs=pairs)
    assert sum(decode.values()) == pytest.approx(whole)
    prefill = least_seconds(ARCHITECTURE, MACHINE, "bf16", tokens=1024, rows=1, prompt=0)
    whole = NEEDS.step_seconds(MACHINE, "bf16", tokens=1024, rows=1, cached=0, pairs=1024**2 / 2)
    assert sum(prefill.values()) == pytest.approx(
        whole, rel=0.01
    )  # but for the head, which reads its weights for one row


def test_losses_are_paired() -> None:
    right, wrong = [True] * 100, [True] * 98 + [False] * 2
    assert Loss.of(right, wrong).points == pytest.approx(2.0)
    assert Loss.of(right, right) == Loss(0.0, 0.0)
    assert Loss.of([True, False], [False, True]) == Loss(0.0, pytest.approx(70.7, abs=0.1))


def test_errors_of_logits() -> None:
    truth = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 0.0]], dtype=torch.float64)
    assert LogitsError.of(truth, truth.float()) == LogitsError(0.0, 1.0, 0.0)
    moved = LogitsError.of(truth, torch.tensor([[4.0, 0.0, 0.0], [4.0, 3.0, 0.0]]))
    assert moved.agreement == 0.5 and moved.divergence > 0.1
    assert (
        moved.relative == relative_error(truth, torch.tensor([[4.0, 0.0, 0.0], [4.0, 3.0, 0.0]])) == pytest.approx(0.8)
    )


ECHO = '''#!{python}
"""Stands in for the interpreter of an engine: answers every line, and says how much processor time has passed."""
import json, sys, time
settings = json.loads(sys.argv[3])
assert sys.argv[1:3] == ["-m", "benchmarks.compare.drivers.llamacpp"] and settings["weight_format"] == "q8_0"
now = time.monotonic()
print(json.dumps(dict(imported_at=now, constructed_at=now + 1, first_token_at=now + 3)), flush=True)
for line in sys.stdin:
    if line.strip():
        request = json.loads(line)
        tokens = len(request["prompts"]) * request["output_len"]
        print(json.dumps(dict(seconds=2.0, num_tokens=tokens - (request["output_len"] == 7))), flush=True)
    else:
        print(json.dumps(dict(peak_bytes=123)), flush=True)
'''


def test_an_engine_that_waits_is_stopped(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(ECHO.format(python=sys.executable))
    python.chmod(0o755)
    settings = Settings(
        folder="f", weight_format="q8_0", max_model_len=8, max_num_seqs=8, max_kv_tokens=64, kv_bytes=1 << 30
    )
    with EngineProcess(Engine("llamacpp", "q8_0", python), settings) as process:
        assert process.startup.constructor == pytest.approx(1.0)
        assert process.startup.total > 3.0
        assert state_of(process) == "T"
        assert process.run(Workload("decode8", 8, 16, 4)) == 16.0
        assert process.run(Workload("prefill", 2, 100, 1)) == 100.0
        assert process.peak_bytes() == 123
        assert state_of(process) == "T"
        with pytest.raises(SystemExit, match=r"llamacpp q8_0 produced 6 tokens of 7 in short"):
            process.run(Workload("short", 1, 1, 7))
    assert process._process.poll() == 0
    with EngineProcess(Engine("llamacpp", "q8_0", python), settings) as process:
        os.killpg(process._process.pid, signal.SIGKILL)
        with pytest.raises(SystemExit, match="ended with -9"):
            process.run(Workload("short", 1, 1, 1))


def state_of(process: EngineProcess) -> str:
    """As the kernel says it; a signal takes a moment to act."""
    stat = Path(f"/proc/{process._process.pid}/stat")
    for _ in range(30_000):
        state = stat.read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.01)
    return state


def test_a_model_is_converted_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    log = tmp_path / "log"
    writes = f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('x'); open({str(log)!r}, 'a').write('once')"
    fails = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('half'); sys.exit(1)"
    script = fails

    def command(self: Engine, folder: Path, target: Path) -> list[str]:
        return [sys.executable, "-c", script, str(target)]

    monkeypatch.setattr(Engine, "_convert_command", command)
    engine = Engine("llamacpp", "q4_0", Path(sys.executable))
    with pytest.raises(engines.subprocess.CalledProcessError):
        engine.convert(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]
    script = writes
    assert engine.convert(folder) == engine.convert(folder) == tmp_path / "tiny-q4_0.gguf"
    assert log.read_text() == "once"
    assert Engine("inflight", "int4", Path(sys.executable)).convert(folder) == folder


def test_a_peer_without_an_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="vllm has no environment"):
        find_engine("vllm", "bf16", tmp_path)


def test_an_earlier_checkout_runs_its_own_driver_in_its_own_environment(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make demo"):
        find_before(tmp_path, "int8")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    before = find_before(tmp_path, "int8")
    assert (before.python, before.checkout, before.label) == (python, tmp_path, "inflight before int8")
    with pytest.raises(SystemExit, match="this checkout itself"):
        find_before(engines.REPOSITORY, "int8")


def test_drivers_import_nothing_of_ours() -> None:
    """They run where neither inflight nor torch may be."""
    code = """
import json, pathlib, sys
import benchmarks.compare.convert_gguf
for path in pathlib.Path("benchmarks/compare/drivers").glob("[a-z]*.py"):
    __import__(f"benchmarks.compare.drivers.{path.stem}")
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("inflight", "torch", "numpy")]))
"""
    found = engines.subprocess.run(
        [sys.executable, "-c", code], cwd=engines.REPOSITORY, check=True, stdout=engines.subprocess.PIPE
    )
    assert json.loads(found.stdout) == []
