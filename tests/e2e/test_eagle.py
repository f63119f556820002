"""EAGLE and EAGLE-3: a layer in a folder of its own reads hidden states of the model and writes drafts.

Truth: the published architecture in plain torch (`EagleTruth`).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight import LLM, SamplingParams
from inflight.errors import CheckpointError
from inflight.spec_decode import draft_choice
from tests.support.close_logits import FLOAT32_TOLERANCE, relative_difference
from tests.support.drafts import (
    ARGUMENTS,
    NUM_DRAFTS,
    PROMPTS,
    Proposal,
    Tokens,
    generate,
    generate_with_a_killed_rank,
    recorded,
    verify_all_drafts,
    without_drafts,
)
from tests.support.eagle_models import EagleTruth, make_last_layer_count, served_config, write_head
from tests.support.model_zoo import FAMILY_CONFIGS, write_model

KINDS = ("eagle", "eagle3")
AFTER = "eagle_aux_hidden_state_layer_ids"


def speculative(head: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"method": kind, "model": str(head), "num_speculative_tokens": NUM_DRAFTS, **more}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Kind -> a model and a head whose drafts are often right."""
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        served = write_model(served_config(), root / "served", seed=3)
        make_last_layer_count(served, embedding=1.0 if kind == "eagle" else 0.01)
        found[kind] = served, write_head(served, root / "head", kind, seed=1, follows=True, head_size=190)
    return found


@pytest.fixture(scope="module")
def plain(pairs: dict[str, tuple[Path, Path]]) -> dict[str, dict[float, Tokens]]:
    return {kind: without_drafts(served, count=2) for kind, (served, _) in pairs.items()}


def check(found: list[Proposal], truth: EagleTruth, num_checked: int = 6) -> None:
    assert len(found) > 8
    for proposal in found[:: max(1, len(found) // num_checked)]:
        expected = truth.logits(proposal.tokens, proposal.drafts[: len(proposal.logits) - 1])
        assert relative_difference(proposal.logits, expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(
    ("kind", "more", "layers"),
    [
        ("eagle", {}, None),
        ("eagle", {"own_embedding": True}, None),
        ("eagle3", {}, None),
        ("eagle3", {"head_size": 100, "own_embedding": True}, None),
        ("eagle3", {"names": "layers.0", "fields": {"norm_before_residual": True, AFTER: [0, 6]}}, [0, 6]),
        ("eagle3", {"head_size": 60, "fields": {"eagle_config": {AFTER: [5, 0, 1]}}}, [1, 2, 6]),
    ],
    ids=["eagle", "own-embedding", "eagle3", "reduced", "chosen-layers", "counted-from-outputs"],
)
def test_drafts_have_the_logits_of_the_published_architecture(
    kind: str, more: dict[str, Any], layers: list[int] | None, tmp_path: Path
) -> None:
    """Also behind a prompt in pieces, in later steps, and behind a cached prefix."""
    served = write_model(served_config(), tmp_path / "served", seed=5)
    head = write_head(
        served, tmp_path / "head", kind, seed=2, num_captured=3 if layers is None else len(layers), **more
    )
    with verify_all_drafts():
        chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 17, "max_num_seqs": 4}
        llm = LLM(str(served), **{**ARGUMENTS, **chunks}, speculative_config=speculative(head, kind))
    with llm, recorded() as found:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for _ in range(2):
            llm.generate([PROMPTS[2]], params, use_tqdm=False)
    check(found, EagleTruth(served, head, layers))


def test_files_of_speculators(tmp_path: Path) -> None:
    """The fields of the layer are in `transformer_layer_config`, and the layer has another name."""
    served = write_model(served_config(), tmp_path / "served", seed=5)
    head = write_head(served, tmp_path / "head", "eagle3", seed=2, names="layers.0", head_size=70, own_embedding=True)
    config = json.loads((head / "config.json").read_text())
    outer = {"draft_vocab_size": config.pop("draft_vocab_size"), "norm_before_residual": True}
    config["architectures"] = ["LlamaForCausalLM"]
    written = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **outer}
    (head / "config.json").write_text(json.dumps({**written, "transformer_layer_config": config}))
    with verify_all_drafts():
        llm = LLM(str(served), **ARGUMENTS, speculative_config=speculative(head, "eagle3"))
    with llm, recorded() as found:
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    check(found, EagleTruth(served, head))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_stagger": 2},
        {"async_scheduling": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 33, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": 3 << 18},
    ],
    ids=["plain", "tp2", "pp2", "chunks", "preempted"],
)
def test_tokens_are_the_same_and_drafts_have_all_keys(
    pairs: dict[str, tuple[Path, Path]], plain: dict[str, dict[float, Tokens]], kind: str, more: dict[str, Any]
) -> None:
    served, head = pairs[kind]
    with verify_all_drafts():
        llm = LLM(str(served), **{**ARGUMENTS, **more}, speculative_config=speculative(head, kind))
    with llm, recorded() as found:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):  # the last time the prompts are cached
            assert generate(llm, temperature, count=2) == plain[kind][temperature]
        assert stats.num_draft_tokens > 400
        assert stats.num_accepted_tokens >= 0.2 * stats.num_draft_tokens
        assert stats.num_hit_tokens > 100
        assert "kv_cache_memory_bytes" not in more or stats.num_preemptions > 0
    check(found, EagleTruth(served, head), num_checked=20)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_some_steps_only(
    pairs: dict[str, tuple[Path, Path]],
    plain: dict[str, dict[float, Tokens]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(0)
    monkeypatch.setattr(
        draft_choice, "best_num_drafts", lambda _, most, *costs: [chance.choice([0, 0, 0, each]) for each in most]
    )
    served, head = pairs[kind]
    with LLM(str(served), **ARGUMENTS, speculative_config=speculative(head, kind)) as llm, recorded() as found:
        for temperature in (0.0, 1.0, 0.0):
            assert generate(llm, temperature, count=2) == plain[kind][temperature]
    check(found, EagleTruth(served, head), num_checked=20)


def test_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    served = write_model(FAMILY_CONFIGS["qwen3_5"][0], tmp_path / "served", seed=0)
    layers = [0, 1]
    head = write_head(served, tmp_path / "head", "eagle3", seed=2, head_size=90, num_captured=2, fields={AFTER: layers})
    plain = without_drafts(served)
    with verify_all_drafts():
        llm = LLM(str(served), **ARGUMENTS, speculative_config=speculative(head, "eagle3"))
    with llm, recorded() as found:
        for temperature in (0.0, 1.0, 0.0):
            assert generate(llm, temperature) == plain[temperature]
    check(found, EagleTruth(served, head, layers))


def test_quantized_head_whose_method_its_files_tell(
    pairs: dict[str, tuple[Path, Path]], plain: dict[str, dict[float, Tokens]]
) -> None:
    served, head = pairs["eagle"]
    with verify_all_drafts():
        llm = LLM(str(served), **ARGUMENTS, speculative_config={"model": str(head), "quantization": "int8"})
    with llm:
        assert generate(llm, 0.0, count=2) == plain["eagle"][0.0]
        stats = llm.llm_engine.core.scheduler.stats
        assert stats.num_accepted_tokens >= 0.5 * stats.num_draft_tokens


def test_a_killed_rank(pairs: dict[str, tuple[Path, Path]], plain: dict[str, dict[float, Tokens]]) -> None:
    """A new rank loads the head, and the tokens are the same."""
    served, head = pairs["eagle3"]
    found = generate_with_a_killed_rank(served, speculative(head, "eagle3"), PROMPTS[2])
    assert found == plain["eagle3"][0.0][4]


def test_weights_of_another_layer(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    served, head = pairs["eagle3"]
    tensors = load_file(head / "model.safetensors")
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    for name, tensor, words in (
        ("midlayer.self_attn.q_norm.weight", torch.ones(16), "does not account for"),
        ("d2t", torch.full((190,), 200), "each once"),
    ):
        save_file({**tensors, name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            LLM(str(served), **ARGUMENTS, speculative_config=speculative(tmp_path, "eagle3"))
