"""Classes of sequences and of tokens by decoders: each of our families for which transformers has such a class, against
transformers on the same random weights."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.auto import modeling_auto

from inflight.config.families import FAMILIES
from inflight.config.parse_architecture import family_of
from tests.e2e.test_pooling import engine
from tests.support.model_zoo import FAMILY_CONFIGS, VOCAB_SIZE, draw_weights

KINDS: dict[str, tuple[Any, Any]] = {  # Any: transformers' own classes and tables
    "sequences": (AutoModelForSequenceClassification, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    "tokens": (AutoModelForTokenClassification, modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
}
CASES = [
    (family, kind)
    for family, configs in FAMILY_CONFIGS.items()
    for kind, (_, names) in KINDS.items()
    if configs[0].model_type in names
]
# one of each way to name and to compute it: the others in the full run
OFTEN = {("gemma3", "sequences"), ("qwen3_5", "sequences"), ("mixtral", "tokens"), ("deepseek_v2", "sequences")}


def test_our_own_code_computes_all_of_them() -> None:
    for family, kind in CASES:
        name = KINDS[kind][1][FAMILY_CONFIGS[family][0].model_type]
        assert family_of(name) in FAMILIES, name


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full) for case in CASES]
)
def test_classes_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    config = copy.deepcopy(FAMILY_CONFIGS[family][0])
    config.num_labels = 3
    random_model = KINDS[kind][0].from_config(config)
    draw_weights(random_model, 7)
    random_model.save_pretrained(tmp_path)
    model = KINDS[kind][0].from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    draw = random.Random(5)
    prompts = [[draw.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 40, 100)]
    with engine(tmp_path, max_model_len=128, kv_cache_memory_bytes=1 << 23, max_num_batched_tokens=64) as llm:
        found = llm.encode(prompts, use_tqdm=False)
    for output, prompt in zip(found, prompts, strict=True):
        with torch.no_grad():
            theirs = model(torch.tensor([prompt])).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.data, theirs.numpy(), atol=2e-5)
