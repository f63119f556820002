"""Models with images in two GGUF files answer as transformers does with the folder of the same model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from tests.support.image_models import drawing, processor_of_transformers
from tests.support.mmproj_files import Files, write_mmproj_model
from tests.support.vision_models import reference_model

MAX_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "seed": 0}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
PLACEHOLDERS = {
    "smolvlm": "<image>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_experts": "<|image|>",
    "qwen2_5_vl": QWEN,
    "qwen3_vl_moe": QWEN,
    "qwen3_5": QWEN,
}


def prompt_of(family: str) -> str:
    return f"A: {PLACEHOLDERS[family]} and {PLACEHOLDERS[family]}: what?"


def images() -> list[Any]:
    return [drawing(40, 30), drawing(20, 50, seed=3)]


def reference(family: str, files: Files) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of its answer, by transformers."""
    processor = processor_of_transformers(files.folder, files.images)
    given = processor(images=images(), text=prompt_of(family), return_tensors="pt")
    if "image_grid_thw" in given:
        image_token_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        given["mm_token_type_ids"] = given["input_ids"].eq(image_token_id).int()
    with torch.inference_mode():
        found = reference_model(files.folder).generate(
            **given, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    prompt = given["input_ids"][0].tolist()
    return prompt, found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_the_answer_is_that_of_transformers(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    files = write_mmproj_model(tmp_path, family)
    expected = reference(family, files)
    more: dict[str, Any] = {}
    if family == "smolvlm":
        more = {"mmproj": str(files.mmproj.rename(tmp_path / "images.gguf")), "tensor_parallel_size": 2}
    if family.startswith("gemma4"):
        more = {"max_model_len": 1024}  # its processor makes images larger
    prompt = {"prompt": prompt_of(family), "multi_modal_data": {"image": images()}}
    with LLM(str(files.text), **{**ARGS, **more}) as llm:
        (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    assert (output.prompt_token_ids, output.outputs[0].token_ids) == expected
    is_told = any(str(files.mmproj) in line for line in caplog.messages)
    assert is_told == ("mmproj" not in more), "one line says which file was found beside the model"
