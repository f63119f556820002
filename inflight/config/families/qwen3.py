"""Qwen3 (arXiv:2505.09388): Llama's layers with a norm on every query and key head. Its windows are those of Qwen2."""

from dataclasses import replace

from inflight.config.architecture import HEAD, LayerSpec, ModelArchitecture
from inflight.config.families.family import Family, make_architecture, read_attention, read_mlp, with_windows
from inflight.config.families.qwen2 import read_windows
from inflight.config.json_fields import JsonFields


def _parse(fields: JsonFields) -> ModelArchitecture:
    attention = replace(read_attention(fields, head_dim=128, reads_bias=True), qk_norm=HEAD)
    layer = LayerSpec(attention=attention, mlp=read_mlp(fields))
    return make_architecture(fields, with_windows(fields, layer, read_windows(fields)))


FAMILY = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", parse=_parse, gguf_name="qwen3")
