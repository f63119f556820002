"""`with_stored_dtype`: config.json with the dtype of the stored weights, if it names none, or "auto", as in transformers."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from inflight.config.safetensors_file import find_files, read_header
from inflight.errors import CheckpointError

_NAMES = ("dtype", "torch_dtype")
_AUTO = "auto"
# name in safetensors -> name in config.json
_STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def with_stored_dtype(config: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Reads the headers of the weights only if it has to. If there are no weights, or their headers cannot be read, no dtype is
    added: the loader explains what is wrong with them."""
    named = {name: value for name, value in config.items() if name not in _NAMES or value not in (None, _AUTO)}
    text = config.get("text_config")
    of_text = {name: text.get(name) for name in _NAMES} if isinstance(text, Mapping) else {}
    if any(name in named for name in _NAMES) or any(value not in (None, _AUTO) for value in of_text.values()):
        return named
    stored = _stored_dtype(folder)
    return named if stored is None else {**named, "dtype": stored}


def _stored_dtype(folder: Path) -> str | None:
    """The dtype of most weights that are floats."""
    num_weights: Counter[str] = Counter()
    try:
        for file in find_files(folder)[0]:
            for tensor in read_header(file).values():
                num_weights[_STORED.get(tensor.dtype, "")] += math.prod(tensor.shape)
    except CheckpointError:
        return None
    del num_weights[""]
    return max(num_weights, key=num_weights.__getitem__, default=None)
