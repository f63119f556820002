"""`as_folder`: what a processor of transformers reads from a model's folder, made of a GGUF file and its mmproj file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from inflight.config.gguf_file import read_part
from inflight.config.gguf_mmproj import mmproj_fields, projector_of
from inflight.config.gguf_projectors import vision_integer
from inflight.multimodal.messages import Start
from inflight.tokenizer.source import read_tokenizer


@contextmanager
def as_folder(start: Start) -> Iterator[Start]:
    """Yields `start` for a folder, which exists only in the `with` block if the model is a GGUF file.

    Raises:
        ConfigError: one of the files cannot be read, or is not supported.
    """
    if start.mmproj is None:
        yield start
        return
    mmproj = read_part(start.mmproj)
    projector = projector_of(mmproj)
    fields = mmproj_fields(mmproj)
    processor = projector.processor(fields)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": projector.tokenizer,
        "pad_token": projector.image_token,  # some processors ask for one, and never pad the one text that they get
    }
    files = {
        "config.json": {
            "model_type": projector.model_type,
            "vision_config": {"patch_size": vision_integer(fields, "patch_size")},
        },
        "preprocessor_config.json": processor,
        "processor_config.json": processor,
        "tokenizer_config.json": tokenizer,
    }
    with TemporaryDirectory(prefix="inflight-") as name:
        folder = Path(name)
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
        own = None if start.tokenizer == start.folder else str(start.tokenizer)
        (folder / "tokenizer.json").write_text(read_tokenizer(start.folder, own).to_json())
        yield replace(start, folder=folder, tokenizer=folder, mmproj=None)
