"""Vectors and scores of decoders, against transformers on the same random weights: alone, in batches, beside chats."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from inflight import LLM, ConfigError, InvalidRequestError, PoolingParams, SamplingParams
from inflight.config.pooler import CLS, LAST, MAX, MEAN
from tests.support.model_zoo import draw_weights
from tests.support.refusals import refused

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LENGTHS = (1, 2, 15, 16, 17, 40, 130)
LABELS = {0: "good", 1: "bad", 2: "neither"}


def prompts(seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(length)] for length in LENGTHS]


def save(kind: Any, config: Any, folder: Path) -> PreTrainedModel:  # Any: transformers' own classes
    model: PreTrainedModel = kind.from_config(config)
    draw_weights(model, 7)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def qwen3(**fields: Any) -> Qwen3Config:
    return Qwen3Config(**{**SIZES, "head_dim": 16, **fields})


def engine(folder: Path, **arguments: Any) -> LLM:
    fixed: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    return LLM(str(folder), **{**fixed, "max_num_seqs": 8, "distributed_executor_backend": "uni", **arguments})


@torch.no_grad()
def hidden_states(model: PreTrainedModel, prompt: list[int]) -> np.ndarray[Any, Any]:
    return model(torch.tensor([prompt])).last_hidden_state[0].numpy()  # type: ignore[no-any-return]


def normalized(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return vector / np.linalg.norm(vector)  # type: ignore[no-any-return]


def embeddings(llm: LLM, **arguments: Any) -> list[np.ndarray[Any, Any]]:
    found = llm.embed(prompts(), use_tqdm=False, **arguments)
    return [np.array(each.outputs.embedding) for each in found]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("base")
    return folder, save(AutoModel, qwen3(), folder)


@pytest.fixture(scope="module")
def truth(base: tuple[Path, PreTrainedModel]) -> dict[str, list[np.ndarray[Any, Any]]]:
    states = [hidden_states(base[1], prompt) for prompt in prompts()]
    return {
        CLS: [each[0] for each in states],
        LAST: [each[-1] for each in states],
        MEAN: [each.mean(axis=0) for each in states],
        MAX: [each.max(axis=0) for each in states],
        "ALL": states,
    }


SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "one by one": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "little room": {
        "max_num_batched_tokens": 16,
        "kv_cache_memory_bytes": 12 * 16 * 3 * 2 * 2 * 16 * 4,
        "max_model_len": 160,
    },
    "no overlap": {"async_scheduling": False},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_vectors_are_those_of_transformers(
    base: tuple[Path, PreTrainedModel], truth: dict[str, list[np.ndarray[Any, Any]]], schedule: str
) -> None:
    """Each pooling type; the same prompts twice, so that the second time LAST finds them in the prefix cache."""
    for pooling_type in (CLS, LAST, MEAN, MAX):
        with engine(base[0], pooler_config={"pooling_type": pooling_type}, **SCHEDULES[schedule]) as llm:
            for _ in range(2):
                for ours, theirs in zip(embeddings(llm), truth[pooling_type], strict=True):
                    np.testing.assert_allclose(ours, normalized(theirs), atol=1e-5, err_msg=pooling_type)
            raw = llm.embed(prompts()[4], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
            np.testing.assert_allclose(raw[0].outputs.embedding, truth[pooling_type][4], atol=5e-5)
            of_tokens = llm.encode(
                prompts(), PoolingParams(use_activation=False), pooling_task="token_embed", use_tqdm=False
            )
            for output, theirs in zip(of_tokens, truth["ALL"], strict=True):
                np.testing.assert_allclose(output.outputs.data, theirs, atol=5e-5)
            stats = llm.llm_engine.core.scheduler.stats
            # the other types compute all tokens, and those of a prompt are computed in queue order
            assert (stats.num_hit_tokens > 0) == (pooling_type == LAST and schedule != "no prefix cache")


def test_a_vector_is_the_same_alone_and_in_any_company(tmp_path: Path) -> None:
    """Bit for bit, as `batch_invariant` promises; beside chats, and in chunks."""
    save(AutoModelForCausalLM, qwen3(), tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    of_tokens = PoolingParams(task="token_embed")
    for pooling_type in (CLS, LAST, MEAN, MAX):
        config = {"pooling_type": pooling_type}
        with engine(tmp_path, pooler_config=config, batch_invariant=True) as llm:
            together = embeddings(llm)
            each_token = [
                each.outputs.data for each in llm.encode(prompts(), pooling_task="token_embed", use_tqdm=False)
            ]
            alone = [np.array(llm.embed([prompt], use_tqdm=False)[0].outputs.embedding) for prompt in prompts()]
            texts = [tuple(each.outputs[0].token_ids) for each in llm.generate(prompts(), greedy, use_tqdm=False)]
        with engine(tmp_path, pooler_config=config, batch_invariant=True, max_num_batched_tokens=16) as llm:
            for index, prompt in enumerate(prompts()):
                llm.llm_engine.add_request(f"chat{index}", prompt, greedy)
                llm.llm_engine.add_request(f"vector{index}", prompt, PoolingParams())
                llm.llm_engine.add_request(f"tokens{index}", prompt, of_tokens)
            found = {}
            while llm.llm_engine.has_unfinished_requests():
                found |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
        mixed = [found[f"vector{index}"].parts["pooling"][0] for index in range(len(LENGTHS))]
        assert [tuple(found[f"chat{index}"].outputs[0].token_ids) for index in range(len(LENGTHS))] == texts
        for index, rows in enumerate(each_token):
            assert np.array_equal(rows, found[f"tokens{index}"].parts["pooling"])
        for one, two, three in zip(together, alone, mixed, strict=True):
            assert np.array_equal(one, two) and np.array_equal(one, three), pooling_type


@pytest.mark.parametrize("pooling_type", [CLS, LAST, MEAN, MAX])
def test_a_request_that_is_preempted_makes_its_vector_again(tmp_path: Path, pooling_type: str) -> None:
    """Chats that grow take its blocks while its prompt is computed in chunks."""
    save(AutoModelForCausalLM, qwen3(), tmp_path)
    prompt, chat = prompts()[6], prompts()[5]
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    config = {"pooling_type": pooling_type}
    with engine(tmp_path, pooler_config=config) as llm:
        vector = llm.embed([prompt], use_tqdm=False)[0].outputs.embedding
        [rows] = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)
        [text] = llm.generate([chat], greedy, use_tqdm=False)
    room = {"kv_cache_memory_bytes": 26 * 16 * 3 * 2 * 2 * 16 * 4, "max_model_len": 160, "max_num_batched_tokens": 16}
    victims: list[str] = []
    with engine(tmp_path, pooler_config=config, enable_prefix_caching=False, **room) as llm:
        scheduler: Any = llm.llm_engine.core.scheduler  # Any: a method is replaced
        requeue = scheduler._requeue

        def noted(victim: Any) -> None:  # Any: a request of the scheduler
            victims.append(victim.request_id)
            requeue(victim)

        scheduler._requeue = noted
        for index in range(4):
            llm.llm_engine.add_request(f"chat{index}", chat, greedy)
        llm.llm_engine.add_request("vector", prompt, PoolingParams())
        llm.llm_engine.add_request("tokens", prompt, PoolingParams(task="token_embed"))
        found = {}
        while llm.llm_engine.has_unfinished_requests():
            found |= {output.request_id: output for output in llm.llm_engine.step() if output.finished}
    assert any("vector" in victim for victim in victims) or any("tokens" in victim for victim in victims)
    np.testing.assert_allclose(found["vector"].parts["pooling"][0], vector, atol=1e-5)
    np.testing.assert_allclose(found["tokens"].parts["pooling"], rows.outputs.data, atol=1e-5)
    assert [found[f"chat{index}"].outputs[0].token_ids for index in range(4)] == [text.outputs[0].token_ids] * 4


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
def test_classes_are_those_of_transformers(tmp_path: Path, problem: str | None) -> None:
    config = LlamaConfig(**SIZES, id2label=LABELS, problem_type=problem)
    model = save(AutoModelForSequenceClassification, config, tmp_path)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    activate = {None: lambda x: x.softmax(-1), "regression": lambda x: x, "multi_label_classification": torch.sigmoid}
    for arguments in ({}, {"max_num_batched_tokens": 16}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with engine(tmp_path, **arguments) as llm:
            for output, theirs in zip(llm.classify(prompts(), use_tqdm=False), logits, strict=True):
                np.testing.assert_allclose(
                    output.outputs.probs, activate[problem](theirs).numpy(), rtol=1e-4, atol=1e-5
                )
                assert output.outputs.labels == tuple(LABELS.values())
            raw = llm.classify(prompts(), pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
            np.testing.assert_allclose([each.outputs.probs for each in raw], torch.stack(logits).numpy(), atol=5e-5)
            with pytest.raises(InvalidRequestError, match="it does classify"):
                llm.embed([[3, 4]], use_tqdm=False)
            with pytest.raises(InvalidRequestError, match="generates no text"):
                llm.generate([[3, 4]], use_tqdm=False)


def test_classes_of_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = save(AutoModelForTokenClassification, qwen3(id2label=LABELS), tmp_path)
    with engine(tmp_path, max_num_batched_tokens=16) as llm:
        for output, prompt in zip(llm.encode(prompts(), use_tqdm=False), prompts(), strict=True):
            with torch.no_grad():
                theirs = model(torch.tensor([prompt])).logits[0].softmax(-1)
            np.testing.assert_allclose(output.outputs.data, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["Reward", "ProcessReward"])
def test_reward_models(base: tuple[Path, PreTrainedModel], tmp_path: Path, kind: str) -> None:
    """Two layers behind the decoder, as in the code that the folders of Qwen2.5's reward models bring."""
    model = base[1]
    generator = torch.Generator().manual_seed(4)
    num_labels = 1 if kind == "Reward" else 2
    layers = {
        "score.0.weight": torch.randn(64, 64, generator=generator),
        "score.0.bias": torch.randn(64, generator=generator),
        "score.2.weight": torch.randn(num_labels, 64, generator=generator),
        "score.2.bias": torch.randn(num_labels, generator=generator),
    }
    decoder = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file({**decoder, **layers}, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": [f"Qwen3For{kind}Model"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def scores(prompt: list[int]) -> torch.Tensor:
        hidden = torch.from_numpy(hidden_states(model, prompt))
        inner = torch.relu(hidden @ layers["score.0.weight"].T + layers["score.0.bias"])
        return inner @ layers["score.2.weight"].T + layers["score.2.bias"]

    for arguments in ({}, {"max_num_batched_tokens": 16}, {"tensor_parallel_size": 2}):
        with engine(tmp_path, **arguments) as llm:
            for output, prompt in zip(llm.encode(prompts(), use_tqdm=False), prompts(), strict=True):
                found = scores(prompt)
                expected = found[-1] if kind == "Reward" else found.softmax(-1)
                np.testing.assert_allclose(output.outputs.data, expected.numpy(), rtol=1e-4, atol=5e-5)
    if kind == "Reward":
        return
    tag = prompts()[6][-1]
    for arguments in ({}, {"max_num_batched_tokens": 16}, {"tensor_parallel_size": 2}):
        with engine(tmp_path, pooler_config={"pooling_type": "STEP", "step_tag_id": tag}, **arguments) as llm:
            for output, prompt in zip(llm.encode(prompts(), use_tqdm=False), prompts(), strict=True):
                expected = scores(prompt).softmax(-1)[torch.tensor(prompt) == tag]
                np.testing.assert_allclose(output.outputs.data, expected.numpy(), rtol=1e-4, atol=5e-5)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, dict[str, torch.Tensor]]:
    """A folder of sentence-transformers with MEAN, a dense layer, and normalized vectors."""
    folder = tmp_path_factory.mktemp("sentences")
    model = save(AutoModel, qwen3(is_matryoshka=True), folder)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in ("1_Pooling", "2_Dense"):
        (folder / path).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    )
    dense = {
        "in_features": 64,
        "out_features": 32,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    generator = torch.Generator().manual_seed(3)
    weights = {
        "linear.weight": torch.randn(32, 64, generator=generator),
        "linear.bias": torch.randn(32, generator=generator),
    }
    save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder, model, weights


def test_a_folder_of_sentence_transformers(sentences: tuple[Path, PreTrainedModel, dict[str, torch.Tensor]]) -> None:
    folder, model, weights = sentences
    with engine(folder, max_num_batched_tokens=16) as llm:
        found = embeddings(llm)
        cut = embeddings(llm, pooling_params=PoolingParams(dimensions=8))
        with pytest.raises(InvalidRequestError, match="more than the 32 numbers"):
            llm.embed(prompts(), pooling_params=PoolingParams(dimensions=33), use_tqdm=False)
    for ours, short, prompt in zip(found, cut, prompts(), strict=True):
        pooled = torch.from_numpy(hidden_states(model, prompt).mean(axis=0))
        dense = torch.tanh(weights["linear.weight"] @ pooled + weights["linear.bias"]).numpy()
        np.testing.assert_allclose(ours, normalized(dense), atol=1e-5)
        np.testing.assert_allclose(short, normalized(dense[:8]), atol=1e-5)


def test_scores_are_cosines(base: tuple[Path, PreTrainedModel], truth: dict[str, list[np.ndarray[Any, Any]]]) -> None:
    with engine(base[0]) as llm:
        [output] = llm.score([prompts()[3]], [prompts()[5]], use_tqdm=False)  # type: ignore[list-item]
    one, other = normalized(truth[LAST][3]), normalized(truth[LAST][5])
    assert output.outputs.score == pytest.approx(float(one @ other), abs=2e-6)


def test_what_a_model_cannot_do_is_refused(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    folder, _ = base
    with pytest.raises(ConfigError, match=r"runner='generate': .*Qwen3Model"):
        engine(folder, runner="generate")
    with pytest.raises(ConfigError, match=r"convert='classify'"):
        engine(folder, convert="classify")
    for steps, text in (
        ({"pooling_type": "STEP", "step_tag_id": 3}, "pooling_type='STEP' needs a model that classifies"),
        ({"step_tag_id": 3}, "step_tag_id needs pooling_type='STEP'"),
        ({"pooling_type": "STEP", "step_tag_id": True}, "step_tag_id=True is not the id of a token"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine(folder, pooler_config=steps)
    with engine(folder) as llm:
        for params, text in (
            (PoolingParams(dimensions=16), "does not say that this model's vectors may be cut"),
            (PoolingParams(task="classify"), "the call is for 'embed'"),
        ):
            with pytest.raises(InvalidRequestError, match=text):
                llm.embed([[3, 4]], pooling_params=params, use_tqdm=False)
        with refused("task"):
            llm.classify([[3, 4]], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="maximum context length is 512"):
            llm.embed([[3] * 513], use_tqdm=False)
        [whole] = llm.embed([[3] * 512], use_tqdm=False)
        [cut] = llm.embed([[3] * 600], pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
        assert cut.outputs.embedding == whole.outputs.embedding and len(cut.prompt_token_ids) == 512
