"""Arrays in one array, and out of it again."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.interface.packed_arrays import MOST_INTEGER, pack_arrays, unpack_arrays


def test_arrays_come_back_as_they_were() -> None:
    given = {
        "pixel_values": np.random.default_rng(0).random((2, 3, 4)),
        "image_sizes": np.array([[336, 1009]], dtype=np.int32),
        "mask": np.array([[True, False]]),
        "none": np.empty((0, 7), dtype=np.float32),
        "number": np.array(MOST_INTEGER),
    }
    packed = pack_arrays(given)
    assert packed.dtype == np.float32 and packed.ndim == 1
    found = unpack_arrays(packed)
    assert list(found) == list(given)
    for name, array in given.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array.astype(np.float32) if array.dtype.kind == "f" else array)
    assert found["mask"].dtype == bool and found["image_sizes"].dtype == np.int64


def test_an_integer_that_would_not_stay_exact_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes"):
        pack_arrays({"sizes": np.array([MOST_INTEGER + 1])})
