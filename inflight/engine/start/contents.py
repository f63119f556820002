"""`contents_of`: a digest of the model, for the names by which engines share KV blocks."""

import hashlib
import logging
import time
from importlib import metadata
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import ModelConfig
from inflight.config.gguf_parts import read_gguf
from inflight.config.safetensors_file import digests, find_files
from inflight.version import __version__

logger = logging.getLogger(__name__)


def contents_of(model: ModelConfig, draft_model: ModelConfig | None = None) -> bytes:
    """Returns 32 bytes: a digest of Inflight's version, the model's settings, and the contents of its weights, and of those of
    its draft model. For a model on the code of transformers also of its version, and of the model's Python files. Reads all
    weights: one core needs some seconds for a GB. Each rank adds what else determines its blocks (worker/kv_transfers.py).
    """
    start = time.perf_counter()
    known = digests(weight_files(model))
    if draft_model is not None and draft_model.folder != model.folder:
        known |= {f"draft {name}": value for name, value in digests(weight_files(draft_model)).items()}
    if model.architecture.implementation == TRANSFORMERS:
        known |= digests(sorted(model.folder.glob("*.py"))) | {"transformers": metadata.version("transformers")}
    logger.info("the digest of the weights, for names of KV blocks in tiers, took %.2f s", time.perf_counter() - start)
    return hashlib.sha256(repr((__version__, model.fingerprint, sorted(known.items()))).encode()).digest()


def weight_files(model: ModelConfig) -> list[Path]:
    """The files with the model's weights. There are none with `load_format="dummy"`."""
    if model.load_format == "dummy":
        return []
    if model.folder.is_dir():
        return find_files(model.folder)[0]
    return [*read_gguf(model.folder).paths, *([] if model.mmproj is None else [model.mmproj])]
