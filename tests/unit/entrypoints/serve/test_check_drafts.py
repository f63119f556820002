"""`inflight serve --check` with drafts made by a model: each kind of drafter with each fault, told as the start tells it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from inflight.config import weight_room
from inflight.config.engine_args import EngineArgs
from inflight.engine.start.model_files import resolve_config
from inflight.entrypoints.serve import check_drafts
from inflight.entrypoints.serve.check import model_problems
from inflight.errors import ConfigError
from tests.support.eagle_models import served_config, write_head
from tests.support.fakes_tokenizer import save_folder
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.mtp_models import write_mtp_model

KINDS = ("draft_model", "eagle", "eagle3", "mtp")
WITH_FOLDER = KINDS[:3]
# vLLM's names of MTP, each for its family
MTP_NAMES = ("deepseek_mtp", "qwen3_next_mtp", "ernie_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_5_mtp")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind -> the served model, and the folder of its drafter."""
    root = tmp_path_factory.mktemp("models")
    served = write_model(served_config(), root / "served", seed=0)
    with_layer = write_mtp_model(FAMILY_CONFIGS["qwen3_5"][0], root / "with_layer", seed=0)
    return {
        "draft_model": (served, write_model(served_config(), root / "draft", seed=1)),
        "eagle": (served, write_head(served, root / "eagle", "eagle", seed=2)),
        "eagle3": (served, write_head(served, root / "eagle3", "eagle3", seed=3, head_size=60)),
        "mtp": (with_layer, with_layer),
    }


def arguments(served: Path, drafting: Any, **more: Any) -> EngineArgs:
    fields: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True, "device": "cpu", **more}
    return EngineArgs(model=str(served), speculative_config=drafting, **fields)


def told(served: Path, drafting: Any, **more: Any) -> str:
    """The one problem that the check finds. A start is refused with the same words."""
    args = arguments(served, drafting, **more)
    (problem,) = model_problems(args)
    with pytest.raises(ConfigError) as error:
        resolve_config(args)
    assert str(error.value).removeprefix("speculative_config: ") in problem
    return problem


def drafting(kind: str, folder: Path, **fields: Any) -> dict[str, Any]:
    return {"method": kind, **({} if kind == "mtp" else {"model": str(folder)}), **fields}


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_has_no_problem(models: dict[str, tuple[Path, Path]], kind: str) -> None:
    served, folder = models[kind]
    assert model_problems(arguments(served, drafting(kind, folder))) == []
    assert resolve_config(arguments(served, drafting(kind, folder))).draft_model is not None


@pytest.mark.parametrize("kind", WITH_FOLDER)
def test_a_missing_folder(models: dict[str, tuple[Path, Path]], kind: str) -> None:
    assert "/no/such/folder" in told(models[kind][0], drafting(kind, Path("/no/such/folder")))


@pytest.mark.parametrize("kind", WITH_FOLDER)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file(models: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str, file: str) -> None:
    served, folder = models[kind]
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    (copied / file).unlink()
    (problem,) = model_problems(arguments(served, drafting(kind, copied)))
    assert str(copied) in problem and file.split(".")[-1] in problem


@pytest.mark.parametrize("kind", WITH_FOLDER)
def test_a_damaged_file(models: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    served, folder = models[kind]
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    (copied / "model.safetensors").write_bytes(b"\xff" * 32)
    (problem,) = model_problems(arguments(served, drafting(kind, copied)))
    assert "model.safetensors" in problem


def changed(folder: Path, into: Path, **fields: Any) -> Path:
    copied = Path(shutil.copytree(folder, into))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, **fields}))
    return copied


@pytest.mark.parametrize("kind", WITH_FOLDER)
def test_another_vocabulary(models: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    served, folder = models[kind]
    other = changed(folder, tmp_path / "other", vocab_size=77)
    problem = told(served, drafting(kind, other))
    assert "another vocabulary" in problem and "77" in problem


def test_the_first_other_token(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    served = Path(shutil.copytree(models["draft_model"][0], tmp_path / "served"))
    draft = Path(shutil.copytree(models["draft_model"][1], tmp_path / "draft"))
    for folder in (served, draft):
        save_folder(folder, "byte_level")
    file = draft / "tokenizer.json"
    text = json.loads(file.read_text())
    numbers = text["model"]["vocab"]
    one, other = sorted(numbers, key=lambda token: numbers[token])[40:42]
    numbers[one], numbers[other] = numbers[other], numbers[one]
    file.write_text(json.dumps(text))
    size = max(numbers.values()) + 100
    for folder in (served, draft):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    problem = told(served, drafting("draft_model", draft), skip_tokenizer_init=False)
    assert f"is {one!r} in the served model, and {other!r} in the draft model" in problem


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_another_hidden_size(models: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str) -> None:
    served, _ = models[kind]
    config = served_config()
    config.hidden_size *= 2
    larger = write_model(config, tmp_path / "larger", seed=0)
    head = write_head(larger, tmp_path / "head", kind, seed=0)
    assert "another hidden size" in told(served, drafting(kind, head))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_of_the_other_kind(models: dict[str, tuple[Path, Path]], kind: str) -> None:
    other = "eagle3" if kind == "eagle" else "eagle"
    assert f"give method={other!r}" in told(models[kind][0], drafting(kind, models[other][1]))


def test_a_layer_that_the_file_lacks(models: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    served = Path(shutil.copytree(models["mtp"][0], tmp_path / "served"))
    tensors = load_file(served / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.fc")}
    save_file(without, served / "model.safetensors", metadata={"format": "pt"})
    assert "mtp.fc are missing" in told(served, {"method": "mtp"})
    assert "is a family without such a layer" in told(models["eagle"][0], {"method": "mtp"})
    assert model_problems(arguments(served, {"method": "auto"})) == []


@pytest.mark.parametrize("name", MTP_NAMES)
def test_names_of_vllm(models: dict[str, tuple[Path, Path]], name: str) -> None:
    """Each is MTP, whichever family the model is of."""
    served, _ = models["mtp"]
    assert model_problems(arguments(served, {"method": name})) == []
    drafter = resolve_config(arguments(served, {"method": name})).draft_model
    assert drafter is not None and drafter.architecture.hidden_inputs is not None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "medusa"}, "'medusa'"),
        ({"method": "ngram_mtp"}, "'ngram_mtp'"),
        ({"method": 3}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": "four"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 1.5}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"num_speculative_tokens": [4]}, "num_speculative_tokens"),
        ({"tokens": 4}, "tokens"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_fields(models: dict[str, tuple[Path, Path]], kind: str, fields: dict[str, Any], words: str) -> None:
    served, folder = models[kind]
    assert words in told(served, drafting(kind, folder, **fields))


@pytest.mark.parametrize("kind", WITH_FOLDER)
@pytest.mark.parametrize("size", [0, 2, "one"])
def test_several_ranks_for_a_drafter(models: dict[str, tuple[Path, Path]], kind: str, size: Any) -> None:
    served, folder = models[kind]
    assert "draft_tensor_parallel_size" in told(served, drafting(kind, folder, draft_tensor_parallel_size=size))


def test_a_value_that_is_no_object(models: dict[str, tuple[Path, Path]]) -> None:
    assert "method" in told(models["mtp"][0], {})
    for given in ("ngram", 4, ["mtp"]):
        with pytest.raises(ConfigError, match="is not a dictionary"):
            arguments(models["mtp"][0], given)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_for_the_drafter(
    models: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The served model alone would fit."""
    served, folder = models[kind]
    needed: list[int] = []
    check: Callable[..., None] = weight_room.check_room

    def record(room: Any, *others: Any) -> None:
        needed.append(room.num_bytes)
        check(room, *others)

    monkeypatch.setattr("inflight.entrypoints.serve.check.check_room", record)
    assert model_problems(arguments(served, None)) == []
    assert model_problems(arguments(served, drafting(kind, folder))) == []
    assert needed[0] < needed[1]
    monkeypatch.setattr(weight_room, "available_bytes", lambda: needed[0])
    assert model_problems(arguments(served, None)) == []
    (problem,) = model_problems(arguments(served, drafting(kind, folder)))
    assert "of what writes drafts" in problem and "leave speculative_config out" in problem


def test_files_of_a_hub_id_that_are_not_here(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights a drafter is only looked for. The start downloads them."""
    served, folder = models["draft_model"]
    small = Path(shutil.copytree(folder, tmp_path / "small"))
    (small / "model.safetensors").unlink()
    monkeypatch.setattr(check_drafts, "resolve_without_weights", lambda model, revision: small)
    given = {"method": "draft_model", "model": "org/name"}
    for can_download, problems in ((True, 0), (False, 1)):
        monkeypatch.setattr(check_drafts, "can_download", lambda model, revision, can=can_download: can)
        found = model_problems(arguments(served, given))
        assert len(found) == problems
        assert all("the hub cannot be reached" in problem for problem in found)
