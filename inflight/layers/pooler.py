"""`Pooler`: the layers behind the pooling of hidden states. `activate`: what a vector goes through at last."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from inflight.config.pooler import (
    IDENTITY,
    LOG1P_LOG1P_RELU,
    LOG1P_RELU,
    NORMALIZE,
    SIGMOID,
    SOFTMAX,
    DenseSpec,
    PoolerSpec,
)
from inflight.errors import CheckpointError
from inflight.layers.context import LayerContext
from inflight.layers.weights import Loadable, WeightSlot, WeightSlots

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    IDENTITY: lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class Dense(Loadable):
    """A linear layer in float32, and its activation. Every rank has all of it."""

    def __init__(self, spec: DenseSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        shape = (spec.out_features, spec.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=context.device), False)
        zeros = torch.zeros(spec.out_features if spec.bias else 0, dtype=torch.float32, device=context.device)
        self.bias = nn.Parameter(zeros, False)
        # the rows of a head of which this layer is made
        num_rows = 0 if spec.rows is None else spec.out_features + (spec.rows.minus is not None)
        rows = torch.empty((num_rows, spec.in_features), dtype=torch.float32, device=context.device)
        self.head_rows = nn.Parameter(rows, False)
        self.activation = _ACTIVATIONS[spec.activation]
        ones = torch.ones(spec.out_features if spec.norm else 0, dtype=torch.float32, device=context.device)
        self.norm = nn.Parameter(ones, False)
        self.norm_bias = nn.Parameter(torch.zeros_like(ones), False) if spec.norm_bias else None

    def weight_slots(self, prefix: str) -> WeightSlots:
        if self.spec.file:
            return
        name = self.spec.name
        if (rows := self.spec.rows) is not None:
            tokens = rows.tokens if rows.minus is None else (*rows.tokens, rows.minus)
            for row, token in enumerate(tokens):
                destination = self.head_rows.data[row : row + 1]
                shape = (rows.vocab_size, self.spec.in_features)
                yield f"{name}.weight", WeightSlot(shape=shape, destination=destination, start=token)
            return
        yield f"{name}.weight", WeightSlot(shape=tuple(self.weight.shape), destination=self.weight.data)
        if self.spec.bias:
            yield (
                self.spec.bias_name or f"{name}.bias",
                WeightSlot(shape=tuple(self.bias.shape), destination=self.bias.data),
            )
        if self.spec.norm:
            slot = WeightSlot(shape=tuple(self.norm.shape), destination=self.norm.data, is_scale=True)
            yield f"{self.spec.norm}.weight", slot
        if self.norm_bias is not None:
            slot = WeightSlot(shape=tuple(self.norm_bias.shape), destination=self.norm_bias.data)
            yield f"{self.spec.norm}.bias", slot

    def finish_loading(self) -> None:
        if (rows := self.spec.rows) is not None:
            scores = self.head_rows.data[: self.spec.out_features]
            self.weight.data.copy_(scores if rows.minus is None else scores - self.head_rows.data[-1])

    def read_file(self, folder: Path) -> None:
        """Read the weights from the file of their own.

        Raises:
            CheckpointError: the file is missing or damaged, or its tensors are not those that its config.json describes.
        """
        file = folder / self.spec.file
        wanted = {"weight": self.weight.data} | ({"bias": self.bias.data} if self.spec.bias else {})
        try:
            with safe_open(file, framework="pt") as opened:
                for name, destination in wanted.items():
                    tensor = opened.get_tensor(f"{self.spec.name}.{name}")
                    if tensor.shape != destination.shape:
                        raise CheckpointError(
                            f"{file}: {self.spec.name}.{name} has the shape {list(tensor.shape)}, but the config.json beside "
                            f"it asks for {list(destination.shape)}"
                        )
                    destination.copy_(tensor)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: it cannot be read as safetensors ({error}); download it again") from error

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(F.linear(x, self.weight, self.bias if self.spec.bias else None))
        if not self.spec.norm:
            return x
        return F.layer_norm(x, x.shape[-1:], self.norm, self.norm_bias, self.spec.norm_eps)


class Pooler(Loadable):
    """vectors float32 [n, hidden_size] -> float32 [n, size]."""

    def __init__(self, spec: PoolerSpec, context: LayerContext) -> None:
        super().__init__()
        self.spec = spec
        self.layers = nn.ModuleList(Dense(each, context) for each in spec.head)

    def weight_slots(self, prefix: str) -> WeightSlots:
        for layer in self.layers:
            assert isinstance(layer, Dense)
            yield from layer.weight_slots(prefix)

    def finish_loading(self) -> None:
        for layer in self.layers:
            assert isinstance(layer, Dense)
            layer.finish_loading()

    def read_files(self, folder: Path) -> None:
        """Read the weights of the layers that have files of their own, which are below the model's folder."""
        for layer in self.layers:
            assert isinstance(layer, Dense)
            if layer.spec.file:
                layer.read_file(folder)

    def forward(self, vectors: Tensor) -> Tensor:
        for layer in self.layers:
            vectors = layer(vectors)
        return vectors


def activate(vectors: Tensor, activation: str) -> Tensor:
    """vectors float32 [n, size]. A vector of zeros stays one if it is normalized."""
    if activation == NORMALIZE:
        return F.normalize(vectors, dim=-1)
    if activation == SOFTMAX:
        return vectors.softmax(dim=-1)
    if activation in (LOG1P_RELU, LOG1P_LOG1P_RELU):
        once = vectors.relu().log1p()
        return once if activation == LOG1P_RELU else once.log1p()
    return vectors.sigmoid() if activation == SIGMOID else vectors
