"""`pack_arrays`: several named arrays in one array of float32, as the pixels of an image.

    | length of the header | header, a number for each byte | the numbers of the first array | of the second | ...

The header is JSON: [[name, dtype, shape], ...]. Integers below 2^24 and truth values stay exact as float32, so what the
processors of transformers return beside pixels (sizes, masks, token ids) fits, too.
"""

import json
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from inflight.interface.request import Float32Array

MOST_INTEGER = 2**24

AnyArray = npt.NDArray[np.generic]


def pack_arrays(arrays: Mapping[str, AnyArray]) -> Float32Array:
    """Returns float32 [n]. Floats become float32.

    Raises:
        ValueError: an integer is too large to stay exact.
    """
    described, numbers = list[tuple[str, str, tuple[int, ...]]](), list[Float32Array]()
    for name, array in arrays.items():
        kind = array.dtype.kind
        if kind in "iu" and array.size and np.abs(array.astype(np.int64)).max() > MOST_INTEGER:
            raise ValueError(f"{name} has integers beyond {MOST_INTEGER}")
        dtype = "float32" if kind == "f" else "bool" if kind == "b" else "int64"
        described.append((name, dtype, array.shape))
        numbers.append(array.astype(np.float32).reshape(-1))
    header = np.frombuffer(json.dumps(described).encode(), dtype=np.uint8).astype(np.float32)
    return np.concatenate([np.array([len(header)], dtype=np.float32), header, *numbers])


def unpack_arrays(packed: Float32Array) -> dict[str, AnyArray]:
    """Returns the arrays with the dtypes float32, int64 and bool. Those of floats are views."""
    first = 1 + int(packed[0])
    described = json.loads(packed[1:first].astype(np.uint8).tobytes())
    found: dict[str, AnyArray] = {}
    for name, dtype, shape in described:
        count = math.prod(shape)
        numbers = packed[first : first + count].reshape(shape)
        found[name] = numbers if dtype == "float32" else numbers.astype(dtype)
        first += count
    return found
