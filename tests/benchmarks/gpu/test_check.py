"""`scripts/gpu_check`: what is computed from its measurements, that no part takes the others with it, and one run on a CPU."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.check import Check, as_json
from benchmarks.gpu.floors import Floor
from benchmarks.gpu.parts import COMMANDS, TEST_FILES, Part, parts_of
from benchmarks.gpu.processes import PartResult, run_part
from benchmarks.gpu.sizes import CONFIGS, MAX_TOKEN_ID
from benchmarks.gpu.summary import goals, relations, table
from benchmarks.gpu.trace import Gap, Kernel, gaps_of, idleness, kernel_shares, read_events
from benchmarks.robustness.fault_server import descendants
from benchmarks.speed.roofline import Needs
from inflight.config.parse_architecture import parse_architecture
from inflight.hub import read_config
from tests.support.enough_time import with_enough_time
from tests.support.waits import wait_until

ROOT = Path(__file__).parents[3]
TERABYTE = 1e12


def floor_of(model: str) -> Floor:
    needs = Needs.of(parse_architecture(read_config(CONFIGS / model)))
    return Floor(needs=needs, layer_bits=16, head_bits=16, kv_bits=16)


@pytest.mark.parametrize(("model", "milliseconds"), [("qwen3-8b", 3.5), ("qwen3-0.6b", 0.28)])
def test_the_floor_of_one_sequence(model: str, milliseconds: float) -> None:
    assert 1e3 * floor_of(model).decode_bytes(1, 0) / (4.3 * TERABYTE) == pytest.approx(milliseconds, rel=0.02)


def test_a_floor_counts_keys_and_values_and_the_work_of_a_prompt() -> None:
    floor = floor_of("qwen3-8b")
    per_token = 2 * 36 * 8 * 128 * 2
    assert floor.decode_bytes(64, 1000) - floor.decode_bytes(0, 0) == 64 * 1000 * per_token
    smaller = Floor(needs=floor.needs, layer_bits=8, head_bits=16, kv_bits=8)
    assert smaller.decode_bytes(64, 1000) - smaller.decode_bytes(0, 0) == 64 * 1000 * per_token / 2
    assert smaller.decode_bytes(0, 0) == floor.needs.layer_weights + 2 * floor.needs.head_weights
    attention = 4 * 32 * 128 * 36 * 4096**2 / 2
    linear = 2 * (floor.needs.layer_weights * 4096 + floor.needs.head_weights)
    assert floor.prefill_operations(4096) == linear + attention


def test_every_shape_is_a_model_whose_vocabulary_holds_the_prompts() -> None:
    folders = sorted(CONFIGS.iterdir())
    assert [folder.name for folder in folders] == ["qwen3-0.6b", "qwen3-8b", "tiny"]
    assert all(parse_architecture(read_config(folder)).vocab_size >= MAX_TOKEN_ID for folder in folders)


def test_gaps_and_the_gap_between_steps() -> None:
    kernels = []
    # 3 kernels of 10 us, 1 us apart; a copy beside the second; 7 us until the next step, once 57
    for step in range(10):
        start = 40.0 * step + (50.0 if step >= 5 else 0.0)
        kernels += [Kernel("a", start, 10.0), Kernel("b", start + 11, 10.0), Kernel("beside", start + 12, 2.0)]
        kernels += [Kernel("c", start + 22, 11.0)]
    assert gaps_of(kernels)[:3] == [Gap("a", "b", 1.0), Gap("b", "c", 1.0), Gap("c", "a", 7.0)]
    found = idleness(kernels, 10)
    wall = 10 * 40 - 7 + 50
    assert (found.us_per_step, found.num_gaps_per_step, found.median_gap_us) == (wall / 10, 2.9, 1.0)
    assert found.idle_share == pytest.approx((20 + 8 * 7 + 57) / wall)
    assert found.waiting_share == pytest.approx((8 * 6 + 56) / wall)
    assert (found.step_gap_at, found.step_gap_p50_us, found.step_gap_p99_us) == ("c -> a", 7.0, 57.0)
    shares = kernel_shares(kernels, 10)
    assert [(share.name, share.count_per_step, share.us_per_step) for share in shares][:2] == [
        ("c", 1, 11),
        ("a", 1, 10),
    ]
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="no kernels"):
        idleness([], 10)


def test_only_kernels_are_kernels() -> None:
    def event(category: str, name: str, start: float) -> dict[str, object]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 2.0}

    trace = read_events(
        [
            event("kernel", "second", 7.0),
            event("gpu_user_annotation", "step 3", 0.0),
            event("gpu_memcpy", "Memcpy DtoH", 3.0),
            event("kernel", "first", 5.0),
            event("cuda_runtime", "cudaStreamSynchronize", 1.0),
            event("cuda_runtime", "cudaLaunchKernel", 1.0),
        ],
        "kernel",
    )
    assert trace.kernels == [Kernel("first", 5.0, 2.0), Kernel("second", 7.0, 2.0)]
    assert trace.host_calls == {"cudaStreamSynchronize": 1}


def test_the_table_has_shares_relations_and_goals() -> None:
    figures: dict[str, dict[str, dict[str, Any]]] = {
        "ceilings": {"bandwidth": {"bytes_per_second": 4e12}, "matrix_peak": {"operations_per_second": 8e14}},
        "qwen3-8b": {
            "decode/1": {"ms_per_step": 5.0, "tokens_per_second": 200.0, "floor_bytes": 16e9},
            "decode/32": {"ms_per_step": 6.4, "tokens_per_second": 5000.0, "floor_bytes": 17e9},
            "prefill/4096": {"seconds": 0.1, "seconds_alone": 0.2, "operations": 6.4e13},
        },
        "qwen3-8b-fp8": {"decode/1": {"ms_per_step": 2.5}},
        "transformers": {"generate/1": {"benchmark": "transformers", "first": 40.0, "second": 200.0, "ratio": 5.0}},
        "qwen3-0.6b": {"idle/64": {"waiting_share": 0.01}, "kernels/1": {"kernels": [[str(i)] for i in range(12)]}},
        "qwen3-0.6b-eager": {
            "kernels/1": {"kernels": [], "busy_us_per_step": 300.0}, "idle/1": {}, "decode/1": {"ms_per_step": 0.4}
        },
    }  # fmt: skip
    rows = table(figures)
    assert rows["qwen3-8b/decode/1"] == {
        "ms_per_step": 5.0, "tokens_per_second": 200.0, "floor_ms": 4.0, "share_of_bandwidth": 0.8
    }  # fmt: skip
    assert rows["transformers/generate/1"] == {"transformers": 40.0, "inflight": 200.0, "ratio": 5.0}
    assert rows["qwen3-8b/prefill/4096"]["share_of_peak"] == 0.8
    assert rows["qwen3-8b/prefill/4096"]["share_of_peak_alone"] == 0.4
    assert len(rows["qwen3-0.6b/kernels/1"]["kernels"]) == 6
    assert "qwen3-0.6b-eager/kernels/1" not in rows
    assert rows["qwen3-0.6b-eager/idle/1"] == {"idle_share_untraced": 0.25}
    assert relations(figures) == {
        "qwen3-8b: tokens of batch 32 over batch 1": 25.0,
        "qwen3-8b: speed of fp8 over bf16, batch 1": 2.0,
    }
    assert goals(figures) == {
        "qwen3-8b/decode/1 ms_per_step <= 4.1": "MISSED: 5.0",
        "qwen3-8b/prefill/4096 share_of_peak >= 0.75": "met: 0.8",
        "qwen3-0.6b/idle/64 waiting_share <= 0.02": "met: 0.01",
    }


def script(text: str, *, is_test: bool = False, limit_seconds: float = 30.0) -> Part:
    return Part(name="part", arguments=("-c", text), expected_seconds=1, limit_seconds=limit_seconds, is_test=is_test)


def run(part: Part, limit_seconds: float = 30.0) -> tuple[PartResult, list[str]]:
    told: list[str] = []
    return run_part(part, limit_seconds, lambda line: None, told.append), told


def test_a_part_that_dies_keeps_what_it_measured() -> None:
    result, told = run(
        script('print(\'{"figure": "a", "ms": 1}\'); print("noise"); raise SystemExit("no such device")')
    )
    assert (result.status, result.figures) == ("failed", {"a": {"ms": 1}})
    assert "no such device" in result.error
    assert [json.loads(line) for line in told] == [{"part": "part", "figure": "a", "ms": 1}]


def test_a_figure_that_fails_fails_its_part() -> None:
    result, _ = run(script('print(\'{"figure": "a", "error": "out of memory"}\\n{"case": "b", "ratio": 2}\')'))
    assert (result.status, result.figures["b"]) == ("failed", {"ratio": 2})


def test_a_part_that_hangs_is_killed_with_its_processes() -> None:
    text = "import subprocess\nprint('hanging', flush=True)\nsubprocess.run(['sleep', '600'])"

    def check(seconds: float) -> None:
        start = time.monotonic()
        result, _ = run(script(text), limit_seconds=seconds)
        assert time.monotonic() - start < 300
        assert (result.status, result.failures) == ("out of time", ["still running: hanging"])

    with_enough_time(check, first=1.5)  # the line must have come


def test_the_lines_of_pytest_are_read() -> None:
    lines = [
        "tests/gpu/test_x.py::test_a[1-2] PASSED  [ 25%]",
        "tests/gpu/test_x.py::test_b FAILED [ 50%]",
        "tests/gpu/test_x.py::test_c SKIPPED (no llguidance) [ 75%]",
        "FAILED tests/gpu/test_x.py::test_b - AssertionError: 1 == 2",
    ]
    result, told = run(script(f"print({chr(10).join(lines)!r}); raise SystemExit(1)", is_test=True))
    assert (result.status, dict(result.tests)) == ("failed", {"passed": 1, "failed": 1, "skipped": 1})
    assert result.failures == [lines[3]]
    assert len(told) == 1


def test_parts_for_which_no_time_is_left_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(budget_seconds=6.0, folder=None)  # of which 5 are kept for the table
    check.run([script("print('never')")])
    assert (check.results["part"].status, check.results["part"].error) == ("skipped", "no time was left")
    assert json.loads(capsys.readouterr().out)["status"] == "skipped"
    assert as_json(check.results, "cuda")["parts"]["part"]["status"] == "skipped"


def test_what_is_new_fits_its_command_and_the_files_are_there() -> None:
    parts = {command: parts_of(command, "cuda", quick=False) for command in COMMANDS}
    for found in parts.values():
        assert len({part.name for part in found}) == len(found)
    assert COMMANDS["faults"] + COMMANDS["speed"] <= 900 - 60  # the start of the machine
    new = [part for part in parts["faults"] if not part.is_test]
    assert parts["faults"][: len(new)] == new, "tests, which have passed before, come last"
    assert sum(part.expected_seconds for part in new) <= 0.6 * COMMANDS["faults"]
    assert sum(part.expected_seconds for part in parts["speed"]) <= COMMANDS["speed"]
    assert {f"{name}.py" for name in TEST_FILES} == {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert not any(part.is_test for part in parts_of("all", "cpu", quick=False))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_lost_and_no_process_left_at_a_time_out_in_mid_run(tmp_path: Path, number: int) -> None:
    """The part has measured one thing, and hangs with a child."""
    script = f"""
import sys
from pathlib import Path
from benchmarks.gpu import check
from benchmarks.gpu.parts import Part
text = 'import os, subprocess; print(\\'{{"figure": "a", "ms": 1}}\\', flush=True); subprocess.run(["sleep", "600"])'
part = Part(name="hangs", arguments=("-c", text), expected_seconds=1, limit_seconds=500)
check.parts_of = lambda *_, **__: [part]
sys.exit(check.main(["faults", "--output", {str(tmp_path)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    path = tmp_path / "gpu_check.json"
    wait_until(
        lambda: path.exists() and "hangs" in json.loads(path.read_text())["figures"] and "ms" in path.read_text()
    )
    wait_until(lambda: len(descendants(process.pid)) == 3)
    _, part, child = descendants(process.pid)
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    assert json.loads(path.read_text())["figures"] == {"hangs": {"a": {"ms": 1}}}
    assert (tmp_path / "gpu_check.log").read_text().splitlines()[0] == 'hangs: {"figure": "a", "ms": 1}'
    if number == signal.SIGTERM:
        assert out.splitlines()[-2:] == ["hangs: interrupted", "  a: ms 1"]
        wait_until(lambda: not Path(f"/proc/{child}/cmdline").exists())
    wait_until(lambda: not Path(f"/proc/{part}/cmdline").exists())
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts/gpu_check"), "speed", "--device", "cpu", "--output", str(tmp_path)]
    # in a clone without .venv it takes the python3 of the PATH: let that be the one that runs this test
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run_command = partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "PATH": path})
    done = run_command([*command, "--only", "ceilings", "qwen3-0.6b"], timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: part["status"] for name, part in found["parts"].items()} == {"ceilings": "ok", "qwen3-0.6b": "ok"}
    assert {
        "ceilings/bandwidth", "ceilings/matrix_peak", "qwen3-0.6b/start_up", "qwen3-0.6b/decode/1", "qwen3-0.6b/decode/4",
        "qwen3-0.6b/prefill/64", "qwen3-0.6b/throughput", "qwen3-0.6b/idle/1", "qwen3-0.6b/kernels/1",
    } == set(found["table"])  # fmt: skip
    assert {"floor_ms", "share_of_bandwidth"} <= set(found["table"]["qwen3-0.6b/decode/1"])
    assert "qwen3-0.6b: ok" in done.stdout
    assert "matrix_peak" in (tmp_path / "gpu_check.log").read_text()
    refused = run_command([*command, "--only", "nothing"], timeout=300)
    assert refused.returncode == 2
    assert "there is no part nothing; there are ceilings" in refused.stderr
