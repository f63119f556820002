"""Each tensor of a drafter, damaged in each way: the start is refused, or the tokens are those without drafts. And requests
at the limits of drafts."""

from __future__ import annotations

import functools
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from tests.conftest import FULL
from tests.support.drafts import ARGUMENTS, PROMPTS, Tokens, verify_all_drafts
from tests.support.eagle_models import served_config, write_head
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.mtp_models import write_mtp_model

# make test-full damages all tensors
MOST_CASES = 1000 if FULL else 10


class Drafter(NamedTuple):
    method: str
    served: Path
    folder: Path
    names: list[str]  # of the tensors that are damaged

    def config(self, folder: Path, num_drafts: int = 3) -> dict[str, Any]:
        fields = {} if self.method == "mtp" else {"model": str(folder)}
        return {"method": self.method, "num_speculative_tokens": num_drafts, **fields}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafter]:
    root = tmp_path_factory.mktemp("models")
    served = write_model(served_config(), root / "served", seed=0)
    qwen = write_mtp_model(FAMILY_CONFIGS["qwen3_5"][0], root / "qwen", seed=0)
    deepseek = write_mtp_model(FAMILY_CONFIGS["deepseek_v3"][0], root / "deepseek", seed=0)
    folders = {
        "draft_model": (served, write_model(served_config(num_hidden_layers=1), root / "draft", seed=1), ""),
        "eagle": (served, write_head(served, root / "eagle", "eagle", seed=2), ""),
        "eagle3": (served, write_head(served, root / "eagle3", "eagle3", seed=3, head_size=60), ""),
        "mtp, named": (qwen, qwen, "mtp."),
        "mtp, numbered": (deepseek, deepseek, "model.layers.2."),
    }
    found = {}
    for kind, (model, folder, prefix) in folders.items():
        names = [name for name in load_file(folder / "model.safetensors") if name.startswith(prefix)]
        found[kind] = Drafter(kind.split(",")[0], model, folder, [name for name in names if name != "t2d"])
    return found


KINDS = ("draft_model", "eagle", "eagle3", "mtp, named", "mtp, numbered")


@functools.cache
def plain(served: Path) -> Tokens:
    with LLM(str(served), **ARGUMENTS) as llm:
        return generated(llm)


def generated(llm: LLM) -> Tokens:
    params = [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0.0, 1.0)]
    outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def changed(at: int, number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        copied.view(-1)[at] = number
        return copied

    return change


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda tensor: None,
    "a row less": lambda tensor: tensor[:-1].clone(),
    "no rows": lambda tensor: tensor[:0].clone(),
    "another rank": lambda tensor: tensor[None].clone() if tensor.dim() == 1 else tensor.reshape(-1),
    "another type": lambda tensor: tensor.int() if tensor.is_floating_point() else tensor.float(),
}
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "NaN": changed(0, float("nan")),
    "infinite": changed(0, float("inf")),
    "all NaN": lambda tensor: torch.full_like(tensor, float("nan")),
}
HUGE: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {"huge": lambda tensor: tensor * 1e30}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_tensors(drafters: dict[str, Drafter], kind: str, tmp_path: Path) -> None:
    drafter = drafters[kind]
    tensors = load_file(drafter.folder / "model.safetensors")
    cases = [
        (name, damage)
        for name, damage in itertools.product(drafter.names, [*SHAPES, *NUMBERS, *HUGE])
        if tensors[name].is_floating_point() or damage in SHAPES
    ]
    random.Random(0).shuffle(cases)
    copied = Path(shutil.copytree(drafter.folder, tmp_path / "copied"))
    for name, damage in cases[:MOST_CASES]:
        damaged = {**SHAPES, **NUMBERS, **HUGE}[damage](tensors[name])
        stored = {**tensors, name: damaged} if damaged is not None else {n: t for n, t in tensors.items() if n != name}
        save_file(stored, copied / "model.safetensors", metadata={"format": "pt"})
        served = copied if drafter.method == "mtp" else drafter.served
        refusal, found = "", None
        try:
            with verify_all_drafts(), LLM(str(served), **ARGUMENTS, speculative_config=drafter.config(copied)) as llm:
                found = generated(llm)
        except ConfigError as error:
            refusal = str(error)
        where = f"{kind}: {name}: {damage}: {refusal!r}"
        assert (found == plain(drafter.served)) == (not refusal), where
        assert refusal or damage in HUGE, where
        assert not refusal or str(copied) in refusal, where


def test_numbers_of_tokens_that_the_model_does_not_have(drafters: dict[str, Drafter], tmp_path: Path) -> None:
    drafter = drafters["eagle3"]
    tensors = load_file(drafter.folder / "model.safetensors")
    copied = Path(shutil.copytree(drafter.folder, tmp_path / "copied"))
    for place, number in ((0, -1), (59, 10**6), (3, int(tensors["d2t"][4]) + 1)):  # the last one is a token twice
        d2t = tensors["d2t"].clone()
        d2t[place] = number
        save_file({**tensors, "d2t": d2t}, copied / "model.safetensors")
        with pytest.raises(ConfigError, match="d2t gives tokens numbers from"):
            LLM(str(drafter.served), **ARGUMENTS, speculative_config=drafter.config(copied))


def test_numbers_that_only_a_text_makes(
    drafters: dict[str, Drafter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at the start sees zeros. Later it is told once that there are no drafts."""
    drafter = drafters["eagle3"]
    tensors = load_file(drafter.folder / "model.safetensors")
    copied = Path(shutil.copytree(drafter.folder, tmp_path / "copied"))
    tensors["midlayer.hidden_norm.weight"] *= 1e30
    save_file(tensors, copied / "model.safetensors")
    with verify_all_drafts(), LLM(str(drafter.served), **ARGUMENTS, speculative_config=drafter.config(copied)) as llm:
        with caplog.at_level("WARNING", "inflight.spec_decode.model_drafter"):
            assert generated(llm) == plain(drafter.served)
        assert llm.llm_engine.core.scheduler.stats.num_draft_tokens == 0
    assert caplog.text.count("NaN or infinite") == 1 and str(copied) in caplog.text


@pytest.mark.parametrize("num_drafts", [1, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_at_the_limits(drafters: dict[str, Drafter], kind: str, num_drafts: int) -> None:
    """More drafts than tokens are left, one token, the longest prompt, several answers, a stop token among drafts."""
    drafter = drafters[kind]
    more = {"max_model_len": 40, "max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 25}
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[2][:39], PROMPTS[2][:30], PROMPTS[3][:35], PROMPTS[0]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=2),
        SamplingParams(temperature=1.0, seed=1, max_tokens=2, n=3, logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, n=2, ignore_eos=True, stop_token_ids=list(range(0, 200, 9))),
        SamplingParams(temperature=0.0, ignore_eos=True, presence_penalty=1.5),
        SamplingParams(temperature=0.0, max_tokens=35, min_tokens=20, stop_token_ids=list(range(0, 200, 2))),
    ]
    found = []
    for speculative in (None, drafter.config(drafter.folder, num_drafts)):
        with verify_all_drafts():
            llm = LLM(str(drafter.served), **{**ARGUMENTS, **more}, speculative_config=speculative)
        with llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append(
                [
                    (list(each.token_ids), each.finish_reason, each.stop_reason, each.logprobs and len(each.logprobs))
                    for output in outputs
                    for each in output.outputs
                ]
            )
            assert (llm.llm_engine.core.scheduler.stats.num_draft_tokens > 0) == (speculative is not None)
    assert found[0] == found[1]
