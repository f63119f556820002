"""What a GGUF file says about the layers after its model: the pooling of an embedding model, and the classes of a reranker.

llama.cpp's converter writes both for the models of sentence-transformers, decoders among them (Qwen3-Embedding).
"""

from inflight.config.families.family import Family
from inflight.config.gguf_file import GgufFile, GgufStrings
from inflight.config.pooler import CLS, FOR_SEQUENCES, LAST, MEAN, base_and_end

# Keys without the family's name
POOLING_TYPE = "pooling_type"
LABELS = "classifier.output_labels"
_NONE = 0
_TYPES = {1: MEAN, 2: CLS, 3: LAST}
# The layers for classes: one of the hidden size, and the last one
_DENSE, _LAST = "cls", "cls.output"
# Fields with which a model scores with the logits of two tokens, in the template of Qwen3-Reranker
_QWEN3_RERANKER: dict[str, object] = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}


def pooling_fields(file: GgufFile, family: Family, pooling_type: object) -> dict[str, object]:
    """The fields of config.json of a model that makes vectors or scores; empty if the file says nothing about it.

    Args:
        pooling_type: the value of the family's key `POOLING_TYPE`; None if the file has none.

    Raises:
        UnsupportedModelError: the layers for classes are not those of the family, or not all of them are in the file.
    """
    base, _ = base_and_end(family.architecture)
    if any(name.startswith("cls.") for name in file.tensors):
        fields = _QWEN3_RERANKER if _is_qwen3_reranker(file, family) else _classes(file, family)
        return {"architectures": [f"{base}{FOR_SEQUENCES}"], **fields}
    if pooling_type in (None, _NONE):
        return {}
    if pooling_type not in _TYPES:
        known = ", ".join(f"{number} ({name})" for number, name in _TYPES.items())
        raise file.refusal(
            f"{family.gguf_name}.{POOLING_TYPE}={pooling_type!r} is not supported without layers for classes; supported are "
            f"{_NONE} and {known}"
        )
    assert isinstance(pooling_type, int)
    return {"architectures": [f"{base}Model"], "pooling_type": _TYPES[pooling_type]}


def _is_qwen3_reranker(file: GgufFile, family: Family) -> bool:
    """The converter copies the rows of "yes" and "no" of the head, and calls the classes so."""
    return family.gguf_name == "qwen3" and _labels(file, family) == ["yes", "no"]


def _labels(file: GgufFile, family: Family) -> list[str]:
    stored = file.metadata.get(f"{family.gguf_name}.{LABELS}")
    return file.read_strings(stored) if isinstance(stored, GgufStrings) else []


def _classes(file: GgufFile, family: Family) -> dict[str, object]:
    missing = [f"{name}.weight" for name in (_DENSE, _LAST) if f"{name}.weight" not in file.tensors]
    if _DENSE not in family.gguf_tensors:
        raise file.refusal(
            f"its layers for classes (cls.*) are not supported for {family.gguf_name}, because the file does not say which "
            "hidden states they read; give the model's folder"
        )
    if missing:
        raise file.refusal(
            f"it has layers for classes (cls.*), but not {missing[0]}: the converter leaves the pooler of BERT out, without "
            "which the scores would be wrong; give the model's folder"
        )
    count = file.tensors[f"{_LAST}.weight"].shape[0]
    labels = _labels(file, family)
    if len(labels) != count:
        return {"num_labels": count}
    return {"id2label": {str(index): label for index, label in enumerate(labels)}}
