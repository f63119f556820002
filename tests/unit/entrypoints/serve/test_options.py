"""Flags before the environment before the file before the default, for every option there is; and `--check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.entrypoints.serve.config_file import read_config_file
from inflight.errors import ConfigError
from tests.unit.entrypoints.runner import COMMAND, invoke

SERVE: Any = COMMAND.commands["serve"]
OPTIONS = {
    parameter.name: parameter
    for parameter in SERVE.params
    if parameter.param_type_name == "option" and parameter.name not in ("config", "check")
}


def texts(option: Any) -> tuple[str, str, str]:
    """Three values that can be told apart, as on a command line."""
    if option.is_flag:
        return "true", "false", "true"
    if "JSON" in (option.metavar or ""):
        return '{"a": 1}', '{"a": 2}', '{"a": 3}'
    return "2048", "3072", "4096"


def parsed(arguments: list[str]) -> Any:
    return SERVE.make_context("serve", arguments).params


def flag(option: Any, text: str) -> list[str]:
    if option.is_flag:
        return [max(option.opts if text == "true" else option.secondary_opts, key=len)]
    return [max(option.opts, key=len), text]


@pytest.mark.parametrize("name", OPTIONS)
def test_flag_beats_environment_beats_file_beats_default(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = OPTIONS[name]
    on_line, in_environment, in_file = texts(option)
    expected = {text: parsed(flag(option, text))[name] for text in {on_line, in_file}}
    default = parsed([])[name]
    file = tmp_path / "serve.yaml"
    file.write_text(f"{name.replace('_', '-')}: {in_file}\n")
    from_file = ["--config", str(file)]
    assert parsed(from_file)[name] == expected[in_file]
    monkeypatch.setenv(f"INFLIGHT_SERVE_{name.upper()}", in_environment)
    found = parsed(from_file)[name]
    assert found != expected[in_file]
    assert parsed([])[name] == found
    assert parsed([*from_file, *flag(option, on_line)])[name] == expected[on_line]
    monkeypatch.delenv(f"INFLIGHT_SERVE_{name.upper()}")
    assert parsed([])[name] == default


def test_the_usual_name_of_the_keys_variable_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_API_KEY", "first-key-1 second-key-2")
    assert parsed([])["api_key"] == ["first-key-1", "second-key-2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("check: true", "unknown option 'check'"),
        ("port: 1\nport: 2", "given twice"),
        ("a: &a [1]\nport: *a", "aliases"),
        ("- port", "is a list"),
        ("port: !!python/object:os.system x", "not valid YAML"),
        ("host: 2024-01-01", "put it in quotes"),
        ("api_key: the-secret: x", "line 1, column 20"),
        ('api_key: "the-secret', "not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    try:
        values, problems = read_config_file(file, OPTIONS.keys())
    except ConfigError as error:
        values, problems = {}, [str(error)]
    assert values == {}
    assert len(problems) == 1
    assert message in problems[0]
    assert "secret" not in problems[0], "an error quotes no key"


def test_a_file_of_2_to_the_20_bytes_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1 #".ljust(2**20, "x"))
    assert read_config_file(file, OPTIONS.keys()) == ({"port": "1"}, [])
    with file.open("a") as more:
        more.write("x")
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        read_config_file(file, OPTIONS.keys())


def test_an_option_is_given_once_also_in_two_spellings(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-model-len: 64\nmax_model_len: 128\n")
    values, problems = read_config_file(file, OPTIONS.keys())
    assert values == {"max_model_len": "64"}
    assert problems == [f"config={str(file)!r}: 'max_model_len' is given twice"]


def test_values_of_a_file_are_texts_as_on_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("served-model-name: [a, 5]\nmax-model-len: 64\nseed:\nhf-overrides: {x: [1, true]}\n")
    values, problems = read_config_file(file, OPTIONS.keys())
    assert problems == []
    assert values == {"served_model_name": ["a", "5"], "max_model_len": "64", "hf_overrides": '{"x": [1, true]}'}


def test_check_names_every_conflict_at_once(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"max_body_bytes": 3, "dtype": "float7"}))
    wrong = "--port x --uds /nodir/x --ssl-certfile /nope --chat-template /nope/x.jinja --max-model-len 999999 -tp 7"
    wrong += " --tool-call-parser tulip --reasoning-parser rose"
    overrides = ["--override-generation-config", '{"temperature": -1}']
    done = invoke(["serve", "--check", "--config", str(file), *wrong.split(), *overrides])
    assert done.exit_code == 2
    for part in (
        "port",
        "max_body_bytes=3",
        "float7",
        "/nodir/x",
        "ssl_certfile",
        "x.jinja",
        "999999",
        "size=7",
        "tulip",
        "rose",
        "temperature=-1",
    ):
        assert part in done.output, part
    assert invoke(["serve", "--check", "--port", "0"]).exit_code == 0


def test_a_wrong_option_is_one_line_and_code_2() -> None:
    done = invoke(["serve", "--port", "70000", "--access-log", "xml"])
    assert done.exit_code == 2
    assert done.output.count("error:") == 1
    assert "port=70000" in done.output
    assert "xml" in done.output


@pytest.mark.parametrize(("arguments", "seed"), [([], None), (["--seed", "7"], 7)])
def test_the_seed_reaches_the_engine(arguments: list[str], seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("inflight.entrypoints.serve.command.run_server", lambda _, args: started.append(args) or 0)
    assert invoke(["serve", *arguments]).exit_code == 0
    assert [args.seed for args in started] == [seed]


def test_every_fault_of_a_file_is_told_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: abc\nprot: 3\nmax_num_seqs: x\nbacklog: -1\nhost: 2024-01-01\n")
    done = invoke(["serve", "--check", "--config", str(file)])
    assert done.exit_code == 2
    for part in (
        f"port in {file}: 'abc' should be an integer",
        "unknown option 'prot'; did you mean 'port'?",
        f"max_num_seqs in {file}: 'x' should be an integer",
        f"backlog=-1 (backlog in {file}) is not an integer in [1, 65535]",
        "'host' is a date",
    ):
        assert part in done.output, part
    other = "cannot listen on 127.0.0.1:8000"  # another program uses the default port at this moment
    assert done.output.count("error:") - done.output.count(other) == 5


def test_a_wrong_value_is_told_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_SERVE_PORT", "abc")
    monkeypatch.setenv("INFLIGHT_SERVE_BACKLOG", "0")
    monkeypatch.setenv("INFLIGHT_SERVE_METRICS_PUBLIC", "perhaps")
    done = invoke(["serve", "--check", "--max-model-len", "4x", "--max-body-bytes", "4x", "--port", "0"])
    assert "--max-model-len: '4x' is not a number of tokens like 32768, 32k (32,000) or 32K (32,768)" in done.output
    assert "--max-body-bytes: '4x' is not a number of bytes like 1500000, 512M or 2G" in done.output
    assert "backlog=0 (INFLIGHT_SERVE_BACKLOG) is not an integer in [1, 65535]" in done.output
    assert "INFLIGHT_SERVE_METRICS_PUBLIC: 'perhaps' should be true or false" in done.output
    assert "'abc'" not in done.output, "the command line goes before it"
    assert "INFLIGHT_SERVE_PORT: 'abc' should be an integer" in invoke(["serve", "--check"]).output


def test_variables_of_kubernetes_are_told_and_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 0\n")
    for name, value in (
        ("PORT", "tcp://10.0.0.1:80"),
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT_HTTP", "80"),
        ("PORT_80_TCP_ADDR", "10.0.0.1"),
    ):
        monkeypatch.setenv(f"INFLIGHT_SERVE_{name}", value)
    done = invoke(["serve", "--check", "--config", str(file)])
    assert done.exit_code == 0, done.output
    assert done.output.count("note:") == 1
    assert "INFLIGHT_SERVE_PORT='tcp://10.0.0.1:80' was set by Kubernetes" in done.output
    assert "warning" not in done.output
    monkeypatch.setenv("INFLIGHT_SERVE_PORT", "tcp://10.0.0.1:80")
    assert parsed(["--config", str(file)])["port"] == 0, "the file is asked next"


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_SERVE_PROT", "1")
    monkeypatch.setenv("INFLIGHT_LOG_LEVL", "DEBUG")
    done = invoke(["serve", "--check", "--port", "0"])
    assert done.exit_code == 0
    assert (
        "warning: INFLIGHT_SERVE_PROT is not a variable of Inflight; it is ignored; did you mean INFLIGHT_SERVE_PORT?"
        in done.output
    )
    assert "did you mean INFLIGHT_LOG_LEVEL?" in done.output
