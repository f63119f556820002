"""MTP: a layer of the checkpoint reads hidden states of the model and writes drafts. Truth: this layer in transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from inflight.spec_decode import draft_choice
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.drafts import (
    ARGUMENTS,
    NUM_DRAFTS,
    PROMPTS,
    Tokens,
    generate,
    generate_with_a_killed_rank,
    recorded,
    verify_all_drafts,
    without_drafts,
)
from tests.support.gguf_experts import TYPES, write_mixture
from tests.support.gguf_writer import write_file
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.mtp_models import MtpTruth, write_mtp_model

FEW_BYTES = {"qwen3_5": 720_000, "deepseek_v3": 3 << 17}  # too few blocks for all prompts at once
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
# family, number of its configuration
FAMILIES = [
    *(("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_5_moe", 0), ("qwen3_next", 2)),
    *(("deepseek_v3", 0), ("glm4_moe", 0), ("glm4_moe_lite", 0)),
]
FOLLOWING = ("qwen3_5", "deepseek_v3")  # one has recurrent layers, one finds cached prefixes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_mtp_model(FAMILY_CONFIGS[name][0], root / name, seed=3, follows=True) for name in FOLLOWING}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, dict[float, Tokens]]:
    return {name: without_drafts(folder, count=2) for name, folder in folders.items()}


@pytest.mark.parametrize(("family", "number"), FAMILIES)
def test_drafts_have_the_logits_of_transformers(family: str, number: int, tmp_path: Path) -> None:
    """Also behind a prompt in pieces, in later steps, and behind a cached prefix."""
    folder = write_mtp_model(FAMILY_CONFIGS[family][number], tmp_path / "model", seed=number)
    truth = MtpTruth(folder)
    with verify_all_drafts():
        chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 17, "max_num_seqs": 4}
        llm = LLM(str(folder), **{**ARGUMENTS, **chunks}, speculative_config=MTP)
    with llm, recorded() as found:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for _ in range(2):
            llm.generate([PROMPTS[2]], params, use_tqdm=False)
    assert len(found) > 8
    for proposal in found[:: max(1, len(found) // 6)]:
        expected = truth.logits(proposal.tokens, proposal.drafts[:-1])
        assert relative_difference(proposal.logits, expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe", "deepseek2, sigmoids", "glm4moe"])
def test_drafts_of_a_gguf_file(case: str, tmp_path: Path) -> None:
    """Numbers of recurrent layers, and norms, are rounded on their way into the file and back."""
    if case == "glm4moe":
        plain, file = write_mixture(tmp_path, case, {}, has_mtp=True)
    else:
        plain, file = write_file(tmp_path, case, GGMLQuantizationType.F32, has_mtp=True)
    truth = MtpTruth(plain)
    with verify_all_drafts():
        llm = LLM(str(file), **ARGUMENTS, speculative_config=MTP)
    with llm, recorded() as found:
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert len(found) > 8
    for proposal in found[:: len(found) // 6]:
        expected = truth.logits(proposal.tokens, proposal.drafts[:-1])
        assert relative_difference(proposal.logits, expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("case", ["deepseek2, sigmoids", "glm4moe"])
def test_tokens_of_a_gguf_file_and_of_its_folder(case: str, is_quantized: bool, tmp_path: Path) -> None:
    """With drafts and without. Quantized weights are multiplied as integers, so then the folder's tokens may be others."""
    if case == "glm4moe":
        plain, file = write_mixture(tmp_path, case, TYPES if is_quantized else {}, has_mtp=True)
    else:
        kind = GGMLQuantizationType.Q8_0 if is_quantized else GGMLQuantizationType.F32
        plain, file = write_file(tmp_path, case, kind, has_mtp=True)
    found = dict[tuple[Path, bool], Tokens]()
    for folder in (file,) if is_quantized else (file, plain):
        for has_drafts in (False, True):
            with verify_all_drafts():
                llm = LLM(str(folder), **ARGUMENTS, speculative_config=MTP if has_drafts else None)
            with llm:
                found[folder, has_drafts] = generate(llm, 0.0)
                assert (llm.llm_engine.core.scheduler.stats.num_draft_tokens > 0) == has_drafts
    assert all(tokens == found[file, False] for tokens in found.values())


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_stagger": 2},
        {"async_scheduling": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 33, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": 0},  # FEW_BYTES
    ],
    ids=["plain", "tp2", "pp2", "chunks", "preempted"],
)
def test_tokens_are_the_same_and_drafts_are_right(
    folders: dict[str, Path], plain: dict[str, dict[float, Tokens]], name: str, more: dict[str, Any]
) -> None:
    """Nearly all drafts are right if the layer has the keys of all tokens, whichever step has computed them."""
    if "kv_cache_memory_bytes" in more:
        more = {"kv_cache_memory_bytes": FEW_BYTES[name]}
    with verify_all_drafts():
        llm = LLM(str(folders[name]), **{**ARGUMENTS, **more}, speculative_config=MTP)
    with llm:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):  # the last time the prompts are cached
            assert generate(llm, temperature, count=2) == plain[name][temperature]
        assert stats.num_draft_tokens > 400
        assert stats.num_accepted_tokens >= 0.75 * stats.num_draft_tokens
        assert name != "deepseek_v3" or stats.num_hit_tokens > 100
        assert "kv_cache_memory_bytes" not in more or stats.num_preemptions > 0


@pytest.mark.parametrize("is_tight", [False, True], ids=["plain", "preempted"])
def test_drafts_in_some_steps_only(
    folders: dict[str, Path], plain: dict[str, dict[float, Tokens]], is_tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are right as often as with drafts in all steps: the layer has the keys of steps without drafts, too."""
    chance = random.Random(0)
    monkeypatch.setattr(
        draft_choice, "best_num_drafts", lambda _, most, *costs: [chance.choice([0, 0, 0, each]) for each in most]
    )
    arguments = {**ARGUMENTS, "kv_cache_memory_bytes": FEW_BYTES["deepseek_v3"] if is_tight else 1 << 22}
    with LLM(str(folders["deepseek_v3"]), **arguments, speculative_config=MTP) as llm:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):
            assert generate(llm, temperature, count=2) == plain["deepseek_v3"][temperature]
        assert 100 < stats.num_draft_tokens < 600
        assert stats.num_accepted_tokens >= 0.75 * stats.num_draft_tokens
        assert not is_tight or stats.num_preemptions > 0


def test_drafts_come_back_when_they_would_be_right(folders: dict[str, Path]) -> None:
    """Requests without drafts are probed, and what is learned of them counts for the next requests."""
    with LLM(str(folders["deepseek_v3"]), **ARGUMENTS, speculative_config=MTP) as llm:
        drafter = llm.llm_engine.executor._ranks[0].loop._worker.runner._draft_model  # type: ignore[attr-defined]
        acceptance = drafter._acceptance
        of_all = acceptance._of_all[0]
        of_all.right = 0.0
        stats = llm.llm_engine.core.scheduler.stats
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        llm.generate(PROMPTS, params, use_tqdm=False)
        assert of_all.right > 2
        assert stats.num_draft_tokens < 400


def test_a_killed_rank(folders: dict[str, Path], plain: dict[str, dict[float, Tokens]]) -> None:
    """The rank that draws is killed while drafts are verified. A new one loads the layer, and the tokens are the same."""
    found = generate_with_a_killed_rank(folders["qwen3_5"], MTP, PROMPTS[2])
    assert found == plain["qwen3_5"][0.0][4]


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def refusal(folder: Path, **change: Any) -> str:
        with pytest.raises(ConfigError) as error:
            LLM(str(folder), **ARGUMENTS, speculative_config={**MTP, **change})
        return str(error.value)

    assert "LlamaForCausalLM is a family without" in refusal(write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "a", 0))
    without = write_model(FAMILY_CONFIGS["qwen3_5"][0], tmp_path / "b", 0)
    assert "have nothing of it: mtp.layers.0" in refusal(without)
    save_file({"mtp.fc.weight": torch.ones(2, 2)}, without / "other.safetensors")
    tensors = load_file(folders["qwen3_5"] / "model.safetensors")
    del tensors["mtp.norm.weight"]
    save_file(tensors, without / "model.safetensors", metadata={"format": "pt"})
    assert "mtp.fc of it: mtp.norm are missing" in refusal(without)
    assert "is for method='draft_model'" in refusal(folders["qwen3_5"], model="a")
    assert "nobody_mtp" in refusal(folders["qwen3_5"], method="nobody_mtp")
