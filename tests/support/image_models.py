"""Folders of models with images: a tokenizer with a token for each byte, and the configuration of a released processor."""

from __future__ import annotations

import importlib
import inspect
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


class ImageFamily(NamedTuple):
    """
    Attributes:
        placeholder: what stands for an image in a prompt.
        image_token: the token that stands for an input of the vision tower, once for each of its embeddings.
        processor: the class of transformers, as module and name.
    """

    placeholder: str
    image_token: str
    special_tokens: Sequence[str]
    processor: tuple[str, str]
    image_processor: Mapping[str, Any]
    config: Mapping[str, Any]
    processor_config: Mapping[str, Any] = {}
    tokenizer_config: Mapping[str, Any] = {}


_HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_TILE_TOKENS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS_TOKENS = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_TILE_TOKENS]
_GEMMA_NAMES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_GEMMA4_NAMES = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}

FAMILIES = {
    "qwen2_5_vl": ImageFamily(
        placeholder="<|image_pad|>",
        image_token="<|image_pad|>",
        special_tokens=_QWEN_TOKENS,
        processor=("transformers.models.qwen2_5_vl.processing_qwen2_5_vl", "Qwen2_5_VLProcessor"),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            "min_pixels": 3136,
            "max_pixels": 200704,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        config={"model_type": "qwen2_5_vl"},
    ),
    "qwen3_vl": ImageFamily(
        placeholder="<|image_pad|>",
        image_token="<|image_pad|>",
        special_tokens=_QWEN_TOKENS,
        processor=("transformers.models.qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_HALVES,
        },
        config={"model_type": "qwen3_vl"},
    ),
    "smolvlm": ImageFamily(
        placeholder="<image>",
        image_token="<image>",
        special_tokens=_IDEFICS_TOKENS,
        processor=("transformers.models.smolvlm.processing_smolvlm", "SmolVLMProcessor"),
        image_processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 512},
            "size": {"longest_edge": 1024},
            **_HALVES,
        },
        config={"model_type": "smolvlm", "vision_config": {"patch_size": 16}},
        processor_config={"image_seq_len": 64, "processor_class": "SmolVLMProcessor"},
    ),
    "idefics3": ImageFamily(
        placeholder="<image>",
        image_token="<image>",
        special_tokens=_IDEFICS_TOKENS,
        processor=("transformers.models.idefics3.processing_idefics3", "Idefics3Processor"),
        image_processor={
            "image_processor_type": "Idefics3ImageProcessor",
            "processor_class": "Idefics3Processor",
            "do_image_splitting": True,
            "max_image_size": {"longest_edge": 364},
            "size": {"longest_edge": 728},
            **_HALVES,
        },
        config={"model_type": "idefics3", "vision_config": {"patch_size": 14}},
        processor_config={"image_seq_len": 169, "processor_class": "Idefics3Processor"},
    ),
    "gemma3": ImageFamily(
        placeholder="<start_of_image>",
        image_token="<image_soft_token>",
        special_tokens=list(_GEMMA_NAMES.values()),
        processor=("transformers.models.gemma3.processing_gemma3", "Gemma3Processor"),
        image_processor={
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": 256,
            "size": {"height": 896, "width": 896},
            **_HALVES,
        },
        config={"model_type": "gemma3", "vision_config": {"patch_size": 14}},
        processor_config={"image_seq_length": 256, "processor_class": "Gemma3Processor"},
        tokenizer_config={"extra_special_tokens": _GEMMA_NAMES},
    ),
    "gemma4": ImageFamily(
        placeholder="<|image|>",
        image_token="<|image|>",
        special_tokens=[*_GEMMA4_NAMES.values(), "<pad>"],
        processor=("transformers.models.gemma4.processing_gemma4", "Gemma4Processor"),
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "processor_class": "Gemma4Processor",
            "patch_size": 16,
            "max_soft_tokens": 280,
            "pooling_kernel_size": 3,
        },
        config={"model_type": "gemma4", "vision_config": {"patch_size": 16}},
        processor_config={"image_seq_length": 280, "processor_class": "Gemma4Processor"},
        tokenizer_config={"extra_special_tokens": _GEMMA4_NAMES, "pad_token": "<pad>"},
    ),
}


def write_image_model(folder: Path, name: str) -> ImageFamily:
    """Write what a front end reads of a model of this family. There are no weights."""
    return write_image_family(folder, FAMILIES[name])


def write_image_family(folder: Path, family: ImageFamily) -> ImageFamily:
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(family.special_tokens).save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **family.tokenizer_config},
        "preprocessor_config": family.image_processor,
        "config": family.config,
        "processor_config": family.processor_config,
    }
    for file, content in files.items():
        if content:
            (folder / f"{file}.json").write_text(json.dumps(content))
    return family


def byte_tokenizer(special_tokens: Sequence[str]) -> Tokenizer:
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def processor_of_transformers(folder: Path, family: ImageFamily) -> Any:  # Any: of transformers
    """The family's processor with everything but its part for videos, which needs torchvision."""
    from transformers import AutoImageProcessor, AutoTokenizer

    module = importlib.import_module(family.processor[0])
    if hasattr(module, "num2words") and module.num2words is None:
        module.num2words = str  # type: ignore[attr-defined]  # for texts about videos only
    base = getattr(module, family.processor[1])

    class WithoutVideos(base):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> None:
            return

    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    accepted = inspect.signature(base.__init__).parameters.keys() - base.get_attributes()
    more = {name: value for name, value in family.processor_config.items() if name in accepted}
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    return WithoutVideos(**{name: parts.get(name) for name in base.get_attributes()}, **more)


def drawing(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image in RGB that is no noise, so that a resized one differs with the method of resizing."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [np.sin(rows / (7 + seed + each)) * np.cos(columns / (5 + each)) for each in range(3)]
    return Image.fromarray(((np.stack(channels, axis=-1) + 1) * 127.5).astype(np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The content of a file. `options`: as Pillow's `save` takes them."""
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def as_bytes(content: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content, dtype=np.uint8)
