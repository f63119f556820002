"""`inflight serve --check`: what is wrong with a model's files, found without reading the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.serve.check import model_problems, server_problems
from inflight.entrypoints.serve.settings import ServerSettings
from tests.support.model_zoo import FAMILY_CONFIGS

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without a tokenizer, with weights that nobody reads."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILY_CONFIGS["llama"][0].to_dict()))
    (tmp_path / "model.safetensors").write_text("not read")
    return tmp_path


def problems(folder: Path, **arguments: Any) -> list[str]:
    given = {"model": str(folder), "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 64, **arguments}
    return model_problems(EngineArgs(**given))


def test_a_model_without_problems(folder: Path) -> None:
    assert problems(folder) == []


def test_weight_files_that_are_missing(folder: Path) -> None:
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "2.safetensors", "c": "1.safetensors"}})
    )
    assert problems(folder) == [
        f"{folder}: 2 of the weight files that {INDEX} lists are missing, for example '1.safetensors'"
    ]
    (folder / INDEX).write_text("{}")
    assert problems(folder) == []
    (folder / "model.safetensors").unlink()
    (found,) = problems(folder)
    assert found.startswith(f"{folder} has no *.safetensors file; add the weights")
    assert problems(folder, load_format="dummy") == []


def test_a_generation_config_that_is_wrong(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -3}')
    assert ["temperature=-3" in each for each in problems(folder)] == [True]
    assert problems(folder, generation_config="none") == []
    assert problems(folder, override_generation_config={"temperature": 0.5}) == []
    (folder / "generation_config.json").write_text('{"eos_token_id": "no"}')
    assert ["eos_token_id" in each for each in problems(folder, generation_config="none")] == [True]


def test_all_problems_are_told_at_once(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").write_text('{"temperature": -3}')
    found = problems(folder, skip_tokenizer_init=False, max_model_len=10**6, chat_template="/nowhere/a.jinja")
    for part in ("tokenizer", "/nowhere/a.jinja", "temperature=-3", "no *.safetensors file", "max_model_len=1000000"):
        assert any(part in each for each in found), part
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    found = problems(folder)  # what depends on the architecture cannot be told
    assert "temperature=-3" in found[0] and "is missing; it is needed to build the model" in found[-1]


def test_a_tokenizer_is_checked_though_the_model_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    found = problems(missing, skip_tokenizer_init=False, tokenizer=str(tmp_path / "none"))
    assert len(found) >= 2 and str(missing) in found[0] and str(tmp_path / "none") in found[1]
    assert len(problems(missing, skip_tokenizer_init=False)) == 1


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"tool_call_parser": "tulip"}, "tulip"),
        ({"reasoning_parser": "rose"}, "rose"),
        ({"ssl_certfile": "/nope.pem", "ssl_keyfile": "/nope.key"}, "/nope"),
        ({"uds": "/nodir/x"}, "/nodir/x"),
    ],
)
def test_settings_of_the_server(settings: dict[str, Any], part: str) -> None:
    (found,) = server_problems(ServerSettings(**{"port": 0, **settings}))
    assert part in found
    assert server_problems(ServerSettings(port=0)) == []


def test_traces_need_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(port=0, otlp_traces_endpoint="http://127.0.0.1:4317")
    for is_installed in (True, False):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=is_installed: object() if found else None)
        assert [each.partition(" needs")[0] for each in server_problems(settings)] == (
            [] if is_installed else ["otlp_traces_endpoint"]
        )
