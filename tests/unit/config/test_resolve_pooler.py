"""What config.json says about classes."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.json_fields import JsonFields
from inflight.config.resolve_pooler import MAX_LABELS, labels_of
from inflight.errors import UnsupportedModelError


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"0": "no", "1": "yes", "2": "perhaps"}}, ("no", "yes", "perhaps")),
    ],
)
def test_labels(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert labels_of(JsonFields(config)) == expected


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_labels": MAX_LABELS + 1}, f"more than {MAX_LABELS}"),
        ({"num_labels": 10**18}, f"more than {MAX_LABELS}"),
        ({"id2label": {"0": None, "1": "a"}}, "id2label has None"),
    ],
)
def test_labels_that_no_model_has(config: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        labels_of(JsonFields(config))
