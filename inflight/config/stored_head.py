"""`resolve_head`: whether a model's head shares the weights of the embedding, as config.json says, or has weights of its own.

A file may contradict its config.json: `tie_word_embeddings` is true, or is missing in a family whose default is true, and the
file has another head. Then the file counts, as in transformers 5. It is found out before anything is built, because the size
of the weights depends on it.
"""

import logging
from dataclasses import replace
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS, ModelArchitecture
from inflight.config.gguf_file import GgufFile
from inflight.config.gguf_parts import read_gguf
from inflight.config.safetensors_file import StoredBytes, find_files, have_same_bytes, model_name, read_header
from inflight.errors import CheckpointError

logger = logging.getLogger(__name__)

HEAD = "lm_head."
EMBEDDING = "model.embed_tokens."


def resolve_head(architecture: ModelArchitecture, folder: Path) -> ModelArchitecture:
    """Reads the headers of the weights in `folder`, which may also be a GGUF file. If a head is stored beside the embedding, it
    is compared byte by byte: an equal one is left unread, another one is used. If only the head is stored, the embedding reads
    its weights.

    If the files cannot be read, the result is `architecture`: the loader explains what is wrong with them. If transformers'
    code computes the model, `WeightPlan` decides, because it knows the names of head and embedding.
    """
    if not architecture.tie_word_embeddings or architecture.implementation == TRANSFORMERS:
        return architecture
    try:
        stored = _stored_tensors(architecture, folder)
        heads = [name for name in stored if name.startswith(HEAD)]
        if not heads:
            return architecture
        if not any(name.startswith(EMBEDDING) for name in stored):
            return replace(architecture, renames=(*architecture.renames, (HEAD, EMBEDDING)))
        head = f"{HEAD}weight"
        embedding = f"{EMBEDDING}weight"
        if heads == [head] and embedding in stored and have_same_bytes(stored[head], stored[embedding]):
            return replace(architecture, unread=(*architecture.unread, head))
    except CheckpointError:
        return architecture
    warn_of_another_head(folder)
    return replace(architecture, tie_word_embeddings=False)


def warn_of_another_head(source: Path) -> None:
    logger.warning(
        "%s: the configuration says that the head shares the weights of the embedding, but the weights have another "
        "head: it is used. With tie_word_embeddings=false in config.json, this line does not appear",
        source,
    )


def _stored_tensors(architecture: ModelArchitecture, folder: Path) -> dict[str, StoredBytes]:
    if folder.is_file():
        return _of_gguf(read_gguf(folder))
    files, _ = find_files(folder)
    return {
        model_name(name, architecture.renames): tensor for file in files for name, tensor in read_header(file).items()
    }


def _of_gguf(file: GgufFile) -> dict[str, StoredBytes]:
    names = {"output.weight": f"{HEAD}weight", "token_embd.weight": f"{EMBEDDING}weight"}
    return {
        names[name]: StoredBytes(
            tensor.path, tensor.type.name, tensor.shape, tensor.start, tensor.start + tensor.num_bytes
        )
        for name, tensor in file.tensors.items()
        if name in names
    }
