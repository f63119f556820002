"""From the figures of all parts to one table: shares of the device's ceilings, relations, and what was to be reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Figures = Mapping[str, Mapping[str, Mapping[str, Any]]]  # part -> figure -> fields; Any: JSON

MODELS = ("qwen3-0.6b", "qwen3-8b")  # the parts whose kernels are in the table
NUM_KERNELS = 6  # of a step; the file has more, and those of the other parts
_LEFT_OUT = ("floor_bytes", "operations", "benchmark", "mean_ms_per_step", "steps")
_NAMES = {"first": "transformers", "second": "inflight"}  # of what is measured in turns: tokens per second


def table(figures: Figures) -> dict[str, dict[str, Any]]:
    """ "part/figure" -> its fields, those that depend on the ceilings included where these were measured."""
    found = {}
    for part, own in figures.items():
        for name, fields in own.items():
            row = {**fields, **_shares(fields, figures), **_untraced(name, own)}
            if name.startswith("kernels/"):
                if part not in MODELS:
                    continue
                row["kernels"] = row["kernels"][:NUM_KERNELS]
            found[f"{part}/{name}"] = {
                _NAMES.get(key, key): value for key, value in row.items() if key not in _LEFT_OUT
            }
    return found


def _shares(fields: Mapping[str, Any], figures: Figures) -> dict[str, float]:
    bandwidth = _value(figures, "ceilings", "bandwidth", "bytes_per_second")
    peak = _value(figures, "ceilings", "matrix_peak", "operations_per_second")
    found = {}
    if "floor_bytes" in fields and bandwidth:
        floor = 1e3 * fields["floor_bytes"] / bandwidth
        found = {"floor_ms": round(floor, 4), "share_of_bandwidth": round(floor / fields["ms_per_step"], 3)}
    if "operations" in fields and peak:
        found = {
            "share_of_peak": round(fields["operations"] / fields["seconds"] / peak, 3),
            "share_of_peak_alone": round(fields["operations"] / fields["seconds_alone"] / peak, 3),
        }
    return found


def _untraced(name: str, own: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Idleness that tracing cannot have caused: the kernels' time of a traced step in the time of one that was not."""
    kind, _, batch = name.partition("/")
    busy = own.get(f"kernels/{batch}", {}).get("busy_us_per_step")
    period = own.get(f"decode/{batch}", {}).get("ms_per_step")
    return {"idle_share_untraced": round(1 - busy / (1e3 * period), 3)} if kind == "idle" and busy and period else {}


def relations(figures: Figures) -> dict[str, float]:
    """Those of docs/benchmarks.md that one device can show; without those whose parts are missing."""
    found = {}
    for model in MODELS:
        one, many = (_value(figures, model, f"decode/{batch}", "tokens_per_second") for batch in (1, 32))
        if one and many:
            found[f"{model}: tokens of batch 32 over batch 1"] = round(many / one, 2)
    for other, name in (("eager", "CUDA graphs"), ("synchronous", "asynchronous scheduling")):
        for batch in (1, 8, 64, 256):
            without = _value(figures, f"qwen3-0.6b-{other}", f"decode/{batch}", "ms_per_step")
            with_it = _value(figures, "qwen3-0.6b", f"decode/{batch}", "ms_per_step")
            if without and with_it:
                found[f"speed with {name} over without, batch {batch}"] = round(without / with_it, 3)
    for name in ("fp8", "int4", "kv-fp8"):
        for batch in (1, 64):
            other_ms = _value(figures, f"qwen3-8b-{name}", f"decode/{batch}", "ms_per_step")
            bf16_ms = _value(figures, "qwen3-8b", f"decode/{batch}", "ms_per_step")
            if other_ms and bf16_ms:
                found[f"qwen3-8b: speed of {name} over bf16, batch {batch}"] = round(bf16_ms / other_ms, 3)
    return found


def goals(figures: Figures) -> dict[str, str]:
    """What was asked for, and whether it is met; without what was not measured."""
    rows = table(figures)
    wanted = [
        ("qwen3-8b/decode/1", "ms_per_step", 4.1, False),
        ("qwen3-0.6b/decode/1", "ms_per_step", 0.46, False),
        ("qwen3-0.6b/throughput", "output_tokens_per_second", 24000, True),
        ("qwen3-8b/prefill/4096", "share_of_peak", 0.75, True),
        ("qwen3-0.6b/idle/64", "waiting_share", 0.02, False),
        ("qwen3-0.6b/idle/64", "step_gap_p50_us", 10, False),
    ]
    found = {}
    for row, field, bound, at_least in wanted:
        value = rows.get(row, {}).get(field)
        if value is not None:
            is_met = value >= bound if at_least else value <= bound
            sign = ">=" if at_least else "<="
            found[f"{row} {field} {sign} {bound}"] = f"{'met' if is_met else 'MISSED'}: {value}"
    return found


def short_table(found: Mapping[str, Any]) -> str:
    """A line for each part, and under it one for each of its measurements: for a reader who sees only the end of an output."""
    lines = []
    for name, part in found["parts"].items():
        tests = "".join(f", {count} {how}" for how, count in part.get("tests", {}).items())
        lines.append(f"{name}: {part['status']}{tests}" + (f" ({part['seconds']:g} s)" if part["seconds"] else ""))
        for row, fields in found["table"].items():
            if row.startswith(f"{name}/"):
                told = [f"{key} {value}" for key, value in fields.items() if isinstance(value, (int, float))]
                if told:
                    lines.append(f"  {row.removeprefix(name + '/')}: {', '.join(told[:4])}")
    return "\n".join(lines)


def _value(figures: Figures, part: str, figure: str, field: str) -> Any:  # Any: JSON, a number
    return figures.get(part, {}).get(figure, {}).get(field)
