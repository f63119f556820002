"""The least that a step must do on any machine: bytes that a decode step reads, operations of a prompt's prefill."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.speed.roofline import Needs
from inflight.config.engine import EngineConfig

# Scales and offsets of 4 bits in groups of 64 are included; a scale a row, or a head and token, does not count.
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "float8_e4m3fn": 8, "int8": 8, "int4": 4.5}


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Of one model in one set of formats."""

    needs: Needs
    layer_bits: float  # of a weight
    head_bits: float
    kv_bits: float

    @classmethod
    def of(cls, config: EngineConfig) -> Floor:
        model, quantization = config.model, config.model.quantization
        return cls(
            needs=Needs.of(model.architecture),
            layer_bits=_BITS[quantization.layers or model.dtype],
            head_bits=_BITS[quantization.head or model.dtype],
            kv_bits=_BITS[config.cache.dtype],
        )

    def decode_bytes(self, batch: int, context: float) -> float:
        """Read by one step: every weight once (of experts, those that `batch` tokens choose), and the keys and values of
        `batch` sequences of `context` tokens."""
        weights = (self.needs.weights_read(batch) * self.layer_bits + self.needs.head_weights * self.head_bits) / 8
        return weights + batch * context * self.needs.kv_bytes_per_token * self.kv_bits / 16  # it counts 16 bits

    def prefill_operations(self, num_tokens: int) -> float:
        """Of one prompt, whose last token alone goes through the head; a product and a sum are two."""
        linear = 2 * (self.needs.layer_weights * num_tokens + self.needs.head_weights)
        return linear + self.needs.operations_per_pair * num_tokens**2 / 2
