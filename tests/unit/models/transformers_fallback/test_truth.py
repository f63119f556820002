"""`Truth`: what is opened around a layer is closed, also if the layer fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from inflight.models.transformers_fallback.truth import Truth


class Failing(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        raise ValueError("bad luck")


def test_a_layer_that_fails_leaves_no_function_mode_open() -> None:
    """It would note the choices of all later code in this thread."""
    truth: Any = object.__new__(Truth)
    truth._layers, truth._units, truth._dtype = nn.ModuleList([Failing()]), [("", None)], torch.float32
    truth._fill = lambda unit: None
    with pytest.raises(ValueError, match="bad luck"), truth._with_layers([], None):
        truth._layers[0](torch.zeros(1, 3, 8))
    assert _get_current_function_mode_stack() == []
    assert not truth._layers[0]._forward_hooks and not truth._layers[0]._forward_pre_hooks
