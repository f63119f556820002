"""What a recorder knows of the C++ functions, against their declarations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.kernels.cpu import tape_functions
from inflight.kernels.cpu.tape_functions import TAPED

FOLDER = Path(tape_functions.__file__).parent
ROWS = ("num_rows", "num_tokens", "count")  # `count`: of values, a multiple of the number of rows


@pytest.fixture(scope="module")
def declared() -> dict[str, list[str]]:
    """Name of a function -> the names of its parameters."""
    found = re.findall(r"INFLIGHT_EXPORT [^(]*?(\w+)\(([^)]*)\)", (FOLDER / "kernels.h").read_text(encoding="utf-8"))
    return {name: re.findall(r"(\w+)\s*(?:,|$)", parameters) for name, parameters in found}


@pytest.mark.parametrize("name", TAPED)
def test_the_indices_are_those_of_the_arguments(name: str, declared: dict[str, list[str]]) -> None:
    parameters = declared[name]
    expected_rows = [i for i, parameter in enumerate(parameters) if parameter in ROWS]
    assert expected_rows == ([] if TAPED[name].rows is None else [TAPED[name].rows])
    expected_out = [i for i, parameter in enumerate(parameters) if parameter == "out"]
    assert expected_out == ([] if TAPED[name].out is None else [TAPED[name].out])


def test_the_order_is_that_of_the_table_in_cpp() -> None:
    text = (FOLDER / "tape.cpp").read_text(encoding="utf-8")
    table = text[text.index("kFunctions[]") :]
    assert re.findall(r"call_function<(\w+)>", table[: table.index("};")]) == list(TAPED)
