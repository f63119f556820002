"""`inflight serve`: what its command line starts, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.settings import ServerSettings
from tests.unit.entrypoints.runner import invoke

HEADLESS = ["--headless", "-dp", "2", "-dpl", "1", "-dpr", "1", "-dpa", "127.0.0.1"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr("inflight.entrypoints.serve.command.run_server", lambda *given: started.append(given))
    monkeypatch.setattr("inflight.entrypoints.serve.headless.run_headless", lambda *given: started.append(given))
    return started


@pytest.mark.parametrize("line", ["/a", "/a --model /a", "--model /a"])
def test_a_model_may_be_named_in_two_ways(started: list[tuple[Any, ...]], line: str) -> None:
    assert invoke(["serve", "--port", "7", *line.split()]).exit_code == 0
    assert started == [(ServerSettings(port=7), EngineArgs(model="/a"))]


def test_a_model_is_named_once(started: list[tuple[Any, ...]]) -> None:
    done = invoke(["serve", "/a", "--model", "/b"])
    assert done.exit_code == 2 and started == []
    assert "MODEL is '/a', but --model is '/b': give only one of the two" in done.output


def test_the_model_of_the_command_line_beats_that_of_the_environment(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFLIGHT_SERVE_MODEL", "/b")
    assert invoke(["serve"]).exit_code == invoke(["serve", "/a"]).exit_code == 0
    assert [args.model for _, args in started] == ["/b", "/a"]


def test_a_wrong_key_file_is_told_with_the_other_problems(started: list[tuple[Any, ...]], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("short\n")
    done = invoke(["serve", "/a", "--model", "/b", "--api-key-file", str(file)])
    assert done.exit_code == 2 and started == []
    assert "shorter than 8 characters" in done.output and "give only one of the two" in done.output
    file.write_text("long-enough\n")
    assert invoke(["serve", "--api-key-file", str(file)]).exit_code == 0
    assert started[0][0].api_key_file == str(file)


def test_a_headless_server_runs_replicas_only(started: list[tuple[Any, ...]]) -> None:
    assert invoke(["serve", "/a", *HEADLESS]).exit_code == 0
    ((args,),) = started
    assert args.model == "/a" and args.replicas == range(1, 2)


def test_a_check_starts_nothing(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.entrypoints.serve.check.server_problems", lambda settings: [f"of {settings.port}"])
    monkeypatch.setattr("inflight.entrypoints.serve.check.model_problems", lambda args: [f"of {args.model}"])
    done = invoke(["serve", "/a", "--port", "7", "--check"])
    assert done.exit_code == 2 and started == []
    assert done.output == "error: of 7\nerror: of /a\n"
    monkeypatch.setattr("inflight.entrypoints.serve.check.server_problems", lambda settings: [])
    monkeypatch.setattr("inflight.entrypoints.serve.check.model_problems", lambda args: [])
    done = invoke(["serve", "/a", "--check"])
    assert (done.exit_code, done.output) == (0, "no problem found; weights have not been read\n")
    done = invoke(["serve", "--check", "--port", "70000", "--max-num-seqs", "0"])
    assert done.exit_code == 2 and done.output.count("error: ") == 2


def test_each_of_several_models_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the options of its own section, and those of the command line count more."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    presets = tmp_path / "presets.ini"
    presets.write_text("[a]\nmax-model-len = 64\nmax-num-seqs = 3\n")
    monkeypatch.setattr(
        "inflight.entrypoints.serve.check.model_problems",
        lambda args: [f"{Path(args.model).name}, {args.max_model_len}, {args.max_num_seqs}"],
    )
    done = invoke(
        ["serve", "--models-dir", str(tmp_path), "--models-preset", str(presets), "--max-num-seqs", "5", "--check"]
    )
    assert done.exit_code == 2
    assert done.output.splitlines() == ["error: a: a, 64, 5", "error: b: b, None, 5"]


@pytest.mark.parametrize("text", ["disabled", "no", "FALSE", "7", "maybe", ""])
def test_a_flag_of_a_section_is_true_or_false(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    presets = tmp_path / "presets.ini"
    presets.write_text(f"[a]\nenable-prefix-caching = {text}\n")
    monkeypatch.setattr(
        "inflight.entrypoints.serve.check.model_problems",
        lambda args: [f"prefix caching: {args.enable_prefix_caching}"],
    )
    done = invoke(["serve", "--models-dir", str(tmp_path), "--models-preset", str(presets), "--check"])
    if text in ("7", "maybe"):
        assert f"[a]: enable-prefix-caching = '{text}' is neither true nor false" in done.output
    else:
        assert done.output == f"error: a: prefix caching: {text == ''}\n"


def test_the_key_of_vllm_is_a_key(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "key-of-vllm")
    assert invoke(["serve"]).exit_code == 0
    assert invoke(["serve", "--api-key", "key-of-flag"]).exit_code == 0, "as in vLLM, the flag goes before the variable"
    assert [settings.api_keys for settings, _ in started] == [("key-of-vllm",), ("key-of-flag",)]


def test_variables_of_other_engines_are_named_or_refused(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    done = invoke(["serve"])
    assert done.exit_code == 0 and len(started) == 1
    assert done.output.count("VLLM_LOGGING_LEVEL") == 1 and "INFLIGHT_LOG_LEVEL" in done.output
    monkeypatch.setenv("LLAMA_API_KEY", "key-of-llama")
    for line in (["serve"], ["serve", "--check"]):
        done = invoke(line)
        assert done.exit_code == 2 and len(started) == 1
        assert "LLAMA_API_KEY is set, but" in done.output
    assert invoke(["serve", "--api-key", "key-of-flag"]).exit_code == 0
