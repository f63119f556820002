"""A draft model: the tokens are those of a run without one, and its keys are kept where the served model's are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM
from inflight.errors import ConfigError
from inflight.spec_decode import draft_choice
from inflight.worker import step_drafts
from tests.support.drafts import ARGUMENTS, NUM_DRAFTS, Tokens, generate, verify_all_drafts, without_drafts
from tests.support.model_zoo import FAMILY_CONFIGS, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`qwen3_5` and `lfm2` have recurrent layers."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_model(FAMILY_CONFIGS[name][0], root / name, seed=seed)
        for seed, name in enumerate(("qwen3", "llama", "qwen3_5", "lfm2"))
    }


def speculative(draft: Path, **more: Any) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS, **more}


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, dict[float, Tokens]]:
    return {name: without_drafts(folder, count=2) for name, folder in folders.items()}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "pipeline_stagger": 2},
        {"async_scheduling": False, "enable_chunked_prefill": True, "max_num_batched_tokens": 17, "max_num_seqs": 4},
        {"kv_cache_memory_bytes": 1 << 18, "block_size": 16},
    ],
    ids=["plain", "tp2", "pp2", "chunks", "preempted"],
)
def test_a_model_accepts_what_it_guesses_itself(
    folders: dict[str, Path], plain: dict[str, dict[float, Tokens]], more: dict[str, Any]
) -> None:
    """Each draft is accepted if the draft model has the keys of all tokens, whoever has computed them: the same request before,
    a request with the same beginning, a step before a preemption."""
    folder = folders["qwen3"]
    with verify_all_drafts():
        llm = LLM(str(folder), **{**ARGUMENTS, **more}, speculative_config=speculative(folder))
    with llm:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):  # the last time the prompts are cached
            assert generate(llm, temperature, count=2) == plain["qwen3"][temperature]
        assert stats.num_draft_tokens > 400
        assert stats.num_accepted_tokens >= 0.98 * stats.num_draft_tokens
        assert stats.num_hit_tokens > 100
        assert "preempted" not in more or stats.num_preemptions > 0


@pytest.mark.parametrize("served", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 33, "max_num_seqs": 3}], ids=["roomy", "chunks"])
def test_recurrent_layers_go_back_behind_refused_drafts(
    folders: dict[str, Path], plain: dict[str, dict[float, Tokens]], served: str, more: dict[str, Any]
) -> None:
    draft = speculative(folders["llama"])
    with verify_all_drafts():
        llm = LLM(str(folders[served]), **{**ARGUMENTS, **more}, speculative_config=draft)
    with llm:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):
            assert generate(llm, temperature, count=2) == plain[served][temperature]
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_tokens_without_drafts_are_computed_later(
    folders: dict[str, Path], plain: dict[str, dict[float, Tokens]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests get drafts in some steps only. The draft model then computes what it has left out, before it goes on."""
    chance = random.Random(0)
    monkeypatch.setattr(
        draft_choice, "best_num_drafts", lambda _, most, *costs: [chance.choice([0, 0, 0, each]) for each in most]
    )
    folder = folders["qwen3"]
    with LLM(str(folder), **ARGUMENTS, speculative_config=speculative(folder)) as llm:
        stats = llm.llm_engine.core.scheduler.stats
        for temperature in (0.0, 1.0, 0.0):
            assert generate(llm, temperature, count=2) == plain["qwen3"][temperature]
        assert 100 < stats.num_draft_tokens < 600
        assert stats.num_accepted_tokens >= 0.98 * stats.num_draft_tokens


def test_a_draft_model_that_does_not_pay_proposes_nothing(folders: dict[str, Path]) -> None:
    """It is as large as the served model, so a pass takes as long as a step."""
    folder = folders["qwen3"]
    with LLM(str(folder), **ARGUMENTS, speculative_config=speculative(folder)) as llm:
        generate(llm, 0.0)
        assert llm.llm_engine.core.scheduler.stats.num_draft_tokens == 0


@pytest.mark.parametrize("more", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_times_that_are_measured_at_the_start_change_no_token(
    folders: dict[str, Path],
    plain: dict[str, dict[float, Tokens]],
    more: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As of a large model. All ranks compute the measured steps, and one of them tells what it has found."""
    monkeypatch.setattr(step_drafts, "_FEWEST_WEIGHTS", 0)
    with caplog.at_level("INFO", "inflight.worker.step_drafts"):
        llm = LLM(str(folders["qwen3"]), **ARGUMENTS, **more, speculative_config=speculative(folders["llama"]))
    with llm:
        assert len([record for record in caplog.records if "a step of 1 token takes" in record.message]) == 1
        assert generate(llm, 0.0, count=2) == plain["qwen3"][0.0]


def test_drafts_end_where_the_draft_model_ends(folders: dict[str, Path], tmp_path: Path) -> None:
    config = FAMILY_CONFIGS["llama"][0].to_dict()
    short = write_model(
        type(FAMILY_CONFIGS["llama"][0])(**{**config, "max_position_embeddings": 64}), tmp_path / "short", seed=1
    )
    folder = folders["qwen3"]
    with LLM(str(folder), **ARGUMENTS) as llm:
        expected = generate(llm, 0.0)
    with verify_all_drafts():
        llm = LLM(str(folder), **ARGUMENTS, speculative_config=speculative(short))
    with llm:
        assert generate(llm, 0.0) == expected


def test_quantized_draft_model(folders: dict[str, Path], plain: dict[str, dict[float, Tokens]]) -> None:
    folder = folders["qwen3"]
    with verify_all_drafts():
        llm = LLM(str(folder), **ARGUMENTS, speculative_config=speculative(folder, quantization="int8"))
    with llm:
        stats = llm.llm_engine.core.scheduler.stats
        assert generate(llm, 1.0, count=2) == plain["qwen3"][1.0]
        assert 0.5 * stats.num_draft_tokens < stats.num_accepted_tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": None}, "needs a `model`"),
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"method": "ngram"}, "is for method='draft_model'"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"quantization": "int3"}, "int3"),
    ],
)
def test_what_is_refused(folders: dict[str, Path], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        LLM(str(folders["qwen3"]), **ARGUMENTS, speculative_config={**speculative(folders["llama"]), **change})
    assert words in str(error.value)


def test_models_that_cannot_guess(folders: dict[str, Path], tmp_path: Path) -> None:
    small = write_model(FAMILY_CONFIGS["llama"][0], tmp_path / "small", seed=0)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 64}))
    for draft, words in ((small, "another vocabulary"), (folders["lfm2"], "recurrent layers")):
        with pytest.raises(ConfigError) as error:
            LLM(str(folders["qwen3"]), **ARGUMENTS, speculative_config=speculative(draft))
        assert words in str(error.value)
