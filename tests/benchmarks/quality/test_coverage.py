"""The table of benchmarks.coverage, and what it calls wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from benchmarks.quality import coverage


def test_the_table_has_a_column_for_each_way_and_names_the_version() -> None:
    exact, close = {"result": "exact", "why": ""}, {"result": "close", "why": ""}
    refused = {"result": "refused", "why": "UnsupportedModelError: X on Inflight's KV cache: it has | no plan. More"}
    found = {"a": {"float32": exact, "bfloat16": close}, "b": {"float32": exact, "bfloat16": refused}}
    text = coverage.table(found, ["float32", "bfloat16"])
    assert f"transformers {transformers.__version__}, of 2 types" in text
    assert "`float32`: 2 exact, 0 refused, 0 wrong" in text and "`bfloat16`: 1 close, 1 refused, 0 wrong" in text
    assert "all columns: `a`." in text
    assert text.splitlines()[-1] == "| `b` | exact | refused | it has / no plan |"


@pytest.mark.parametrize(("column", "result"), [("float32", "exact"), ("bfloat16", "close"), ("int8", "close")])
def test_a_right_model(tmp_path: Path, column: str, result: str) -> None:
    found = coverage.check_type("llama", tmp_path / "model", [column])[column]
    assert found["result"] == result, found["why"]


@pytest.mark.parametrize("column", ["float32", "bfloat16", "int8"])
def test_a_wrong_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """The check at the start is left out, and the engine has other weights in one projection."""
    from inflight.layers.linear import RowParallelLinear

    finish = RowParallelLinear.finish_loading

    def changed(self: RowParallelLinear) -> None:
        weight = self.stored.assemble(self.weight.data)
        assert isinstance(weight, list)
        self.weight.data = weight[0].roll(1, 0)
        self.stored = type(self.stored)(self.method, self.dtype)
        finish(self)

    monkeypatch.setattr(RowParallelLinear, "finish_loading", changed)
    monkeypatch.setattr("inflight.models.transformers_fallback.self_check._compare", lambda *_: None)
    assert coverage.check_type("llama", tmp_path / "model", [column])[column]["result"] == "wrong"


def test_in_float32_a_thousandth_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = coverage._log_probabilities

    def moved(*arguments: object) -> list[tuple[float, float]]:
        return [(value + 2e-4, behind) for value, behind in right(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(coverage, "_log_probabilities", moved)
    found = coverage.check_type("llama", tmp_path / "model", ["float32"])["float32"]
    assert found["result"] == "wrong" and "log-probability by 2.0e-04" in found["why"]


def test_values_of_earlier_layers_reach_the_second_sequence(tmp_path: Path) -> None:
    """Zaya's layers take values from the layers before them."""
    assert coverage.check_type("zaya", tmp_path / "model", ["float32"])["float32"]["result"] == "exact"
