"""The preset file: what llama.cpp's users have in theirs is read, wrong values are one clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.router.keep_alive import read_keep_alive
from inflight.entrypoints.router.presets import Preset, read_presets
from inflight.errors import ConfigError

OPTIONS = ("model", "max-model-len", "max-num-seqs", "dtype", "reasoning-parser", "uds")


def read(values: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    if values.get("dtype") == "wrong":
        raise ConfigError("dtype='wrong'")
    server = {name: value for name, value in values.items() if name == "reasoning-parser"}
    return {name: value for name, value in values.items() if name not in server}, server


def presets_of(path: Path, text: str) -> tuple[dict[str, Preset], list[str]]:
    notes: list[str] = []
    (path / "p.ini").write_text(text)
    return read_presets(path / "p.ini", OPTIONS, read, notes.append), notes


def test_a_file_of_llama_cpp(tmp_path: Path) -> None:
    found, notes = presets_of(
        tmp_path,
        """
        version = 1
        ; for all
        [*]
        c = 8192   ; tokens
        n-gpu-layers = 8
        jinja

        [org/name:Q8_0]
        c = 4096
        load-on-startup = true

        [coder]
        LLAMA_ARG_HF_REPO = org/coder
        ctx-size = 0
        np = 4
        alias = me
        reasoning-parser = none
        pin = yes ; it is the usual one
        root-path = /llm
        idle-timeout = 5m
        """.replace("\n        ", "\n"),
    )
    assert found["*"] == Preset(engine={"max-model-len": "8192"})
    assert found["org/name:Q8_0"] == Preset(engine={"max-model-len": "4096"}, loads_on_startup=True)
    coder = found["coder"]
    assert (coder.model, coder.is_pinned, coder.idle_seconds) == ("org/coder", True, 300)
    assert coder.server == {"reasoning-parser": "none"} and coder.engine["max-num-seqs"] == "4"
    assert any("[coder]" in note and "alias (the router sets it)" in note for note in notes)
    assert any("[coder]" in note and "root-path (the router sets it)" in note for note in notes)
    assert all("n-gpu-layers" in note and "jinja" in note for note in notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a]\ndtype = wrong", r"\[a\]: dtype='wrong'"),
        ("[a]\npin = maybe", "pin = 'maybe' is neither true nor false"),
        ("[a]\nidle-timeout = soon", "idle-timeout='soon'"),
        ("[a]\nmodel = x\nmodel = y", "already exists"),
        ("[a]\n[a]", "already exists"),
        ("[a\0b]", "is not the name of a model"),
        ("[" + "a" * 200_000 + "]", "is not the name of a model"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        presets_of(tmp_path, text)


def test_a_byte_order_mark_and_keys_above_the_first_section(tmp_path: Path) -> None:
    found, notes = presets_of(tmp_path, "\ufeff[*]\nc = 512\n[a]\n")
    assert found["a"].engine == {"max-model-len": "512"} and not notes
    found, notes = presets_of(tmp_path, "version = 1\nc = 512\n[a]\n")
    assert found["a"].engine == {} and len(notes) == 1 and notes[0].endswith("ignored above the first section: c")


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_presets(tmp_path / "absent", OPTIONS, read, print)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0), (0.0, 0.0), (-0.0, 0.0), ("0", 0.0), ("0s", 0.0), ("-0s", 0.0), (2.5, 2.5), ("2.5", 2.5), ("300", 300.0),
        (300, 300.0), ("5m", 300.0), ("+5m", 300.0), ("4m60s", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), (".5s", 0.5),
        ("1.s", 1.0), ("100ms", 0.1), ("7us", 7e-6), ("7\u00b5s", 7e-6), ("7\u03bcs", 7e-6), ("7ns", 7e-9),
        (-1, math.inf), (-0.5, math.inf), ("-1", math.inf), ("-1m", math.inf), ("-1h30m", math.inf), (10**400, math.inf),
        (-(10**400), math.inf), (1e300, 1e300), (math.inf, math.inf),
    ],
)  # fmt: skip
def test_keep_alive(value: float | str, seconds: float) -> None:
    assert read_keep_alive(value) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "value",
    ["", " ", "soon", "5 m", " 5m", "m", "s5", ".", ".s", "1.2.3s", "5d", "5M", "1e3", "1_000", "+-5m", "--5m", "5m-", "5m3",
     "nan", "inf", "infinity", "\u0665", math.nan, True, False, None, [], {}, [5]],
)  # fmt: skip
def test_what_is_no_keep_alive(value: Any) -> None:
    with pytest.raises(ConfigError, match="keep_alive="):
        read_keep_alive(value)


def test_a_long_text_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="keep_alive=") as refused:
        read_keep_alive("x" * 10_000)
    assert len(str(refused.value)) < 200
