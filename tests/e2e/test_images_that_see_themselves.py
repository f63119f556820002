"""Gemma 3 and 4, as users call them: the tokens of an image see each other, and log-probabilities are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from inflight import LLM, SamplingParams
from inflight.errors import ConfigError
from tests.support.image_models import (
    FAMILIES,
    ImageFamily,
    byte_tokenizer,
    drawing,
    processor_of_transformers,
    write_image_family,
)
from tests.support.vision_models import VISION_CONFIGS, reference_model, write_vision_model

# images of 9 tokens, and of at most 70
PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor": {"size": {"height": 36, "width": 36}}, "processor_config": {"image_seq_length": 9}},
    "gemma4": {"image_processor": {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}},
}
# The second has bounds of its linear layers, tokens without directions, and vectors for each layer.
MODELS = [("gemma3", 0, "pan_and_scan"), ("gemma4", 0, ""), ("gemma4", 1, ""), ("gemma4", 2, "")]
MAX_TOKENS = 5


def family_of(name: str, pooling: int) -> ImageFamily:
    family = FAMILIES[name]
    own = PROCESSORS[name]
    image_processor = {**family.image_processor, **own["image_processor"]}
    if name == "gemma4":
        image_processor["pooling_kernel_size"] = pooling
    processor_config = {**family.processor_config, **own.get("processor_config", {})}
    return family._replace(image_processor=image_processor, processor_config=processor_config, config={})


@pytest.mark.parametrize(("name", "index", "option"), MODELS)
def test_log_probabilities_are_those_of_transformers(name: str, index: int, option: str, tmp_path: Path) -> None:
    config: PreTrainedConfig = type(VISION_CONFIGS[name][index])(**VISION_CONFIGS[name][index].to_dict())
    family = family_of(name, getattr(config.vision_config, "pooling_kernel_size", 0))
    tokenizer = byte_tokenizer(family.special_tokens)
    config.text_config.vocab_size = 320
    if name == "gemma4":
        config.text_config.vocab_size_per_layer_input = 320
        config.video_token_id, config.audio_token_id = 318, 319
    config.image_token_id = tokenizer.token_to_id(family.image_token)
    folder = write_vision_model(config, tmp_path / "m", seed=3)
    write_image_family(folder, family)
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8} if option else {}
    text = f"{family.placeholder} and {family.placeholder}?"
    images = [drawing(90, 40), drawing(20, 30, seed=3)]
    given = processor_of_transformers(folder, family)(
        images=images, text=text, return_tensors="pt", images_kwargs=options
    )
    prompt = given["input_ids"][0].tolist()
    with LLM(str(folder), dtype="float32", max_model_len=256, max_num_seqs=4, mm_processor_kwargs=options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        [output] = llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, params, use_tqdm=False)
        assert output.prompt_token_ids == prompt
        answer = list(output.outputs[0].token_ids)
        again = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        [cached] = llm.generate({"prompt": text, "multi_modal_data": {"image": images}}, again, use_tqdm=False)
        assert list(cached.outputs[0].token_ids) == answer
    whole = prompt + answer
    types = next(key for key in given if key.endswith("token_type_ids"))
    more = torch.zeros(1, len(answer), dtype=given[types].dtype)
    given = {**given, types: torch.cat([given[types], more], dim=1), "input_ids": torch.tensor([whole])}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    with torch.inference_mode():
        logits = reference_model(folder)(**given).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(len(whole) - 1), torch.tensor(whole[1:])]
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = [each[token].logprob for each, token in zip(positions, whole[1:], strict=True)]
    assert torch.allclose(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_a_step_that_has_no_room_for_an_image_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = write_vision_model(VISION_CONFIGS["gemma3"][0], tmp_path / "m", seed=0)
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=11 .* image of 9 tokens"):
        LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=11, max_num_seqs=4)
