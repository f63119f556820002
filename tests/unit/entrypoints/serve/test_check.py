"""`inflight serve --check`, part by part: what is wrong with the server's settings, and with the files of a model."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from inflight import hub
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.response_store.store import ResponseStore
from inflight.entrypoints.serve import check
from inflight.entrypoints.serve.check import model_problems, server_problems
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}
INDEX = "model.safetensors.index.json"
EMPTY = (2).to_bytes(8, "little") + b"{}"  # a file without tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose weights nobody reads."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(EMPTY)
    return folder


def problems(folder: Path, **options: Any) -> list[str]:
    return model_problems(EngineArgs(**{"model": str(folder), "skip_tokenizer_init": True, "device": "cpu", **options}))


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"ssl_certfile": "/none.pem"}, ["ssl_certfile='/none.pem' cannot be read"]),
        ({"tool_call_parser": "tulip"}, ["tulip"]),
        ({"reasoning_parser": "rose"}, ["rose"]),
        ({"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}, []),
        ({"tool_call_parser": "deepseek_r1", "reasoning_parser": "hermes"}, ["deepseek_r1", "hermes"]),
        (
            {"uds": "/no/folder/x", "tool_call_parser": "tulip", "reasoning_parser": "rose"},
            ["/no/folder/x", "tulip", "rose"],
        ),
        ({"otlp_traces_endpoint": "http://localhost:4318"}, []),
    ],
)
def test_each_wrong_setting_of_the_server_is_told(settings: dict[str, Any], found: list[str]) -> None:
    told = server_problems(ServerSettings(port=0, **settings))
    assert len(told) == len(found)
    assert all(part in problem for part, problem in zip(found, told, strict=True))


def test_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = server_problems(ServerSettings(port=0, otlp_traces_endpoint="http://localhost:4318"))
    assert "pip install 'inflight-llm[tracing]'" in problem
    assert server_problems(ServerSettings(port=0)) == []


def test_a_taken_address_is_told_and_a_free_one_is_left_free(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (problem,) = server_problems(ServerSettings(port=taken.getsockname()[1]))
    assert "cannot listen on 127.0.0.1" in problem
    assert server_problems(ServerSettings(uds=str(tmp_path / "socket"))) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("new.sqlite", ""),
        ("store.sqlite", ""),
        ("absent/store.sqlite", "No such file or directory"),
        ("notes.txt/store.sqlite", "Not a directory"),
        ("notes.txt", "not a database"),
        ("folder", "unable to open database file"),
    ],
)
def test_the_file_of_stored_responses_is_checked_and_not_made(tmp_path: Path, place: str, why: str) -> None:
    ResponseStore(tmp_path / "store.sqlite").close()
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    found = server_problems(ServerSettings(port=0, response_store=str(tmp_path / place)))
    assert len(found) == bool(why), found
    assert all(why in each and "response_store=" in each for each in found), found
    assert sorted(tmp_path.rglob("*")) == before


def test_a_whole_model_has_no_problem(folder: Path) -> None:
    assert problems(folder) == []
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert problems(folder) == []


def test_weights_larger_than_the_memory_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(folder / "model.safetensors", 8 + len(header) + 2**40)  # without blocks on the disk
    (problem,) = problems(folder)
    assert "1024.00 GiB" in problem and "is free" in problem
    assert problems(folder, load_format="dummy") == []


@pytest.mark.parametrize("content", [b"", EMPTY[:9], EMPTY + b"x", b"{" + EMPTY])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_weight_file_is_told(folder: Path, content: bytes, sharded: bool) -> None:
    """Before, a damaged file was found at the start only."""
    file = folder / "model.safetensors"
    if sharded:
        file = file.rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file.name}}))
        (problem,) = problems(folder)
        assert "says that a is in a.safetensors, but it is not there" in problem
    file.write_bytes(content)
    (problem,) = problems(folder)
    assert problem.startswith(f"{file} cannot be read as safetensors")


def test_a_tensor_in_two_files_is_told(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    for name in ("model.safetensors", "b.safetensors"):
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (problem,) = problems(folder)
    assert "a is both in a.safetensors and in b.safetensors" in problem


def test_a_missing_weight_file_is_reported(folder: Path) -> None:
    weights = {"a": "model.safetensors", "b": "z.safetensors", "c": "y.safetensors", "d": "y.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))
    (problem,) = problems(folder)
    assert f"2 of the 3 weight files that {INDEX} names are missing, for example y.safetensors" in problem
    assert problems(folder, load_format="dummy") == []
    (folder / INDEX).write_text(json.dumps({"weight_map": ["z.safetensors"]}))
    assert problems(folder) == [], "the loader tells it"


def test_a_model_without_weights_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (problem,) = problems(folder)
    assert "has no *.safetensors" in problem and "load_format='dummy'" in problem
    assert problems(folder, load_format="dummy") == []


def test_a_missing_shard_is_told_wherever_the_folder_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder.parent)
    for name in (folder, "model", "./model", "model/", "~/model"):
        (problem,) = model_problems(EngineArgs(model=str(name), skip_tokenizer_init=True, device="cpu"))
        assert "1 of the 2 weight files" in problem and names[1] in problem
    (folder / ".cache/huggingface/download").mkdir(parents=True)
    (folder / ".cache/huggingface/download/x.incomplete").touch()
    (problem,) = problems(folder)
    assert "download is unfinished" in problem


@pytest.mark.parametrize("can_download", [False, True])
def test_weights_of_a_hub_id_may_be_missing_if_the_hub_has_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, can_download: bool
) -> None:
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(hub, "resolve_tokenizer_folder", lambda *_: folder)
    monkeypatch.setattr(check, "can_download", lambda *_: can_download)
    found = model_problems(EngineArgs(model="org/name", skip_tokenizer_init=True, device="cpu"))
    assert ["the hub cannot be reached" in problem for problem in found] == ([] if can_download else [True])


def test_all_problems_of_a_model_are_told_at_once(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "x"}))
    told = problems(folder, skip_tokenizer_init=False)
    parts = ("tokenizer", "temperature", "*.safetensors", "hidden_size")
    assert [part in problem for part, problem in zip(parts, told, strict=True)] == [True] * 4


def test_what_does_not_fit_the_model_is_told(folder: Path) -> None:
    (problem,) = problems(folder, max_model_len=128)
    assert "128" in problem
    assert problems(folder, max_model_len=128, hf_overrides={"max_position_embeddings": 256}) == []
    (problem,) = problems(folder, tensor_parallel_size=3, load_format="dummy")
    assert "tensor_parallel_size=3" in problem


@pytest.mark.parametrize(
    ("config", "options", "is_wrong"),
    [
        ({"temperature": -1}, {}, True),
        ({"temperature": -1}, {"generation_config": "none"}, False),
        ({"temperature": -1}, {"override_generation_config": {"temperature": 0.5}}, False),
        ({"eos_token_id": "x"}, {"generation_config": "none"}, True),
        ({}, {"override_generation_config": {"temperature": -1}, "generation_config": "none"}, True),
        (None, {"override_generation_config": {"eos_token_id": "x"}}, True),
        (None, {}, False),
    ],
)
def test_defaults_of_requests_are_checked(
    folder: Path, config: dict[str, Any] | None, options: dict[str, Any], is_wrong: bool
) -> None:
    """The model's own file counts only if it is used; its end-of-text tokens are always used."""
    if config is not None:
        (folder / "generation_config.json").write_text(json.dumps(config))
    assert len(problems(folder, **options)) == is_wrong


def test_a_tokenizer_is_checked_even_without_its_model(folder: Path) -> None:
    missing = folder / "none"
    (problem,) = problems(missing)
    assert "none" in problem
    told = problems(missing, tokenizer=str(folder), skip_tokenizer_init=False)
    assert len(told) > 1 and told[0] == problem and "tokenizer" in told[1]


def test_a_hub_id_downloads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def resolve_tokenizer_folder(*arguments: Any) -> Path:
        asked.append(("small files", *arguments))
        return folder

    def resolve_model_folder(*arguments: Any) -> Path:
        asked.append(("all files", *arguments))
        return folder

    monkeypatch.setattr(hub, "resolve_tokenizer_folder", resolve_tokenizer_folder)
    monkeypatch.setattr(hub, "resolve_model_folder", resolve_model_folder)
    monkeypatch.setattr(check, "can_download", lambda *_: True)
    (folder / "model.safetensors").unlink()
    args: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "revision": "r"}
    assert model_problems(EngineArgs(model="org/name", **args)) == [], "weights are not there yet"
    (folder / "config.json").unlink()
    assert len(model_problems(EngineArgs(model="org/name", **args))) == 1
    model_problems(EngineArgs(model="org/name:Q8_0", **args))
    model_problems(EngineArgs(model=str(folder), **args))
    assert asked == [
        ("small files", "org/name", "r"),
        ("small files", "org/name", "r"),
        ("all files", "org/name:Q8_0", "r"),
        ("all files", str(folder), "r"),
    ]


def test_a_wrong_machine_is_one_of_the_problems(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def detect_machine(device: str) -> Any:
        raise ConfigError(f"a wrong variable for {device}")

    monkeypatch.setattr(check, "detect_machine", detect_machine)
    (folder / "model.safetensors").unlink()
    told = problems(folder)
    assert "*.safetensors" in told[0] and told[1:] == ["a wrong variable for cpu"]
