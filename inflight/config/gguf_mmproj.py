"""Models in two GGUF files: one for text, and an mmproj file with the part that reads images.

`find_mmproj` finds the second file, and `with_mmproj` adds what it says to the config.json of the first.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from inflight.config.engine import EngineConfig
from inflight.config.gguf_file import GgufFile, GgufStrings, read_part
from inflight.config.gguf_parts import read_gguf
from inflight.config.gguf_projectors import PROJECTORS, SHAPES, Projector, deepstack_layers, vision_integer
from inflight.config.json_fields import JsonFields
from inflight.errors import ConfigError, UnsupportedModelError
from inflight.hub import GGUF_SUFFIX, MMPROJ, resolve_gguf_file

logger = logging.getLogger(__name__)

_MOST_VALUES = 10_000  # of an array of the metadata that is read; others are not sizes of a tower


def find_mmproj(
    source: Path, given: str | None, revision: str | None = None, *, language_model_only: bool = False
) -> Path | None:
    """Returns the mmproj file of a model; None if it has none, or images are not wanted.

    Args:
        source: the model's folder or GGUF file.
        given: the file that the user names, also as "org/name:FILE.gguf". None: if there is exactly one file mmproj*.gguf
            beside the GGUF file, and it fits, it is taken. One line of the log says so, or why it is left out.

    Raises:
        ConfigError: the named file does not exist, or the model is no GGUF file.
    """
    if given is not None and not source.is_file():
        raise ConfigError(
            f"mmproj={given!r} belongs to a model in a GGUF file, but {source} is a folder, whose own weights have the part "
            "that reads images; leave mmproj out"
        )
    if language_model_only or not source.is_file():
        return None
    if given is not None:
        return resolve_gguf_file(given, revision)
    beside = sorted(source.parent.glob(f"{MMPROJ}*{GGUF_SUFFIX}"))
    if len(beside) > 1:
        names = ", ".join(path.name for path in beside)
        logger.info("%s: several files for images are beside it (%s); --mmproj chooses one", source, names)
    if len(beside) != 1:
        return None
    try:
        with_mmproj({}, read_gguf(source), read_part(beside[0]))
    except ConfigError as error:
        logger.warning("images are not read: %s", error)
        return None
    logger.info("images are read with %s, which is beside the model; --language-model-only leaves it out", beside[0])
    return beside[0]


def with_mmproj(config: Mapping[str, object], text: GgufFile, mmproj: GgufFile) -> dict[str, object]:
    """The config.json of the whole model.

    Args:
        config: that of the part for text.
        text: the GGUF file of this part.

    Raises:
        UnsupportedModelError: the kind of tower, or a value of the file, is not supported, or the two files are not of one
            model. Then the message names both.
    """
    projector = projector_of(mmproj)
    fields = mmproj_fields(mmproj)
    family = text.metadata.get("general.architecture")
    architecture = projector.architectures.get(str(family))
    if architecture is None:
        expected = ", ".join(projector.architectures)
        raise _mismatch(text, mmproj, f"it is made for {expected}, and the model is {family!r}")
    sizes = vision_integer(fields, "projection_dim"), text.metadata.get(f"{family}.embedding_length")
    if sizes[0] != sizes[1]:
        raise _mismatch(text, mmproj, f"its embeddings have {sizes[0]} numbers, and those of the model {sizes[1]}")
    counts = len(deepstack_layers(fields)), text.metadata.get(f"{family}.n_deepstack_layers", 0)
    if counts[0] != counts[1]:
        raise _mismatch(
            text, mmproj, f"it has features for {counts[0]} layers of the model, which takes them in {counts[1]}"
        )
    named = {"architectures": [architecture], "image_token_id": _image_token_id(projector, text, mmproj)}
    return {**config, **projector.config(fields), **named}


def with_mmproj_file(config: EngineConfig, mmproj: Path | None) -> EngineConfig:
    """The same configuration, if the model's vision tower is in the file `mmproj`. Names of KV blocks that engines share
    contain the digest of this file, as of the others (engine/start/contents.py)."""
    return replace(config, model=replace(config.model, mmproj=mmproj))


def projector_of(mmproj: GgufFile) -> Projector:
    """
    Raises:
        UnsupportedModelError: the file has no part that reads images, or its kind is not supported.
    """
    kind = mmproj.metadata.get("general.type", "mmproj"), mmproj.metadata.get("general.architecture")
    if kind != ("mmproj", "clip"):
        raise mmproj.refusal(
            f"this is no mmproj file: its general.type is {kind[0]!r}, its general.architecture {kind[1]!r}, and not 'clip'"
        )
    if mmproj.metadata.get("clip.has_vision_encoder") is not True:
        raise mmproj.refusal("this file has no part that reads images (clip.has_vision_encoder is not true)")
    name = mmproj.metadata.get("clip.projector_type") or mmproj.metadata.get("clip.vision.projector_type")
    if name not in PROJECTORS:
        raise mmproj.refusal(f"clip.projector_type={name!r} is not supported; supported are {', '.join(PROJECTORS)}")
    return PROJECTORS[str(name)]


def mmproj_fields(mmproj: GgufFile) -> JsonFields:
    """The metadata of a file, whose errors name the file and the key, and the shapes of its tensors.

    Raises:
        UnsupportedModelError: the tower is used in a way that changes its result and is not supported.
    """
    layers = mmproj.metadata.get("clip.vision.feature_layer")
    if layers is not None:
        raise mmproj.refusal(f"clip.vision.feature_layer={layers} is not supported; it could change the result")
    values = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in mmproj.metadata.items()
        if not isinstance(value, GgufStrings) and not (isinstance(value, np.ndarray) and len(value) > _MOST_VALUES)
    }
    shapes = {name: each.shape for name, each in mmproj.tensors.items()}
    return JsonFields({**values, SHAPES: shapes}, str(mmproj.path))


def _image_token_id(projector: Projector, text: GgufFile, mmproj: GgufFile) -> int:
    stored = text.metadata.get("tokenizer.ggml.tokens")
    tokens = text.read_strings(stored) if isinstance(stored, GgufStrings) else []
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    needed = (projector.image_token, *projector.other_tokens)
    if missing := [token for token in needed if token not in ids]:
        raise _mismatch(text, mmproj, f"the vocabulary of the model lacks {', '.join(missing)}")
    return ids[projector.image_token]


def _mismatch(text: GgufFile, mmproj: GgufFile, why: str) -> UnsupportedModelError:
    return mmproj.refusal(
        f"this mmproj file does not belong to {text.path}: {why}; give the one of this model, or leave images out with "
        "language_model_only=True (--language-model-only)"
    )
