"""Small EAGLE heads with random weights, and the published architecture in plain torch as the truth.

EAGLE (arXiv:2401.15077): x = fc([e, h]), and a layer without a norm before its attention; no norm behind it.
EAGLE-3 (arXiv:2503.01840): h = fc(hidden states before three layers), and a layer whose attention reads [norm(e), norm(h)] and
adds to h; its sum is the next h, and its norm makes the logits of the tokens that the head knows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.support.model_zoo import reference_model

LAYERS = [2, 3, 4]  # EAGLE-3's own choice for a model of 7 layers
Tensors = dict[str, torch.Tensor]


def write_head(
    served: Path,
    folder: Path,
    kind: str,
    seed: int,
    *,
    follows: bool = False,
    head_size: int | None = None,
    num_captured: int = 3,
    own_embedding: bool = False,
    names: str = "midlayer",
    fields: dict[str, object] | None = None,
) -> Path:
    """Writes a head for the model in `served`.

    Args:
        kind: "eagle" or "eagle3".
        follows: the layer has the weights of the served model's last layer, and reads embeddings only. If only that layer adds
            something there (`make_last_layer_count`), the first draft is nearly always what the served model draws. With
            EAGLE, all drafts are, if they are greedy.
        head_size: how many of the served model's tokens an EAGLE-3 head knows; None: all of them.
        names: the name of the layer, "midlayer" or "layers.0".
    """
    config = json.loads((served / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    size, vocab_size = config["hidden_size"], config["vocab_size"]
    own: dict[str, Any] = {
        "hidden_size": size,
        "vocab_size": vocab_size,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    theirs = load_file(served / "model.safetensors")
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    if follows:
        copied = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
        own |= {name: config[name] for name in copied}
        own |= {"rope_theta": config["rope_parameters"]["rope_theta"]}
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.15

    num_inputs = 2 if kind == "eagle3" else 1
    query, key = (own[name] * own["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    inner = own["intermediate_size"]
    layer = {
        "self_attn.q_proj": draw(query, num_inputs * size),
        "self_attn.k_proj": draw(key, num_inputs * size),
        "self_attn.v_proj": draw(key, num_inputs * size),
        "self_attn.o_proj": draw(size, query),
        "mlp.gate_proj": draw(inner, size),
        "mlp.up_proj": draw(inner, size),
        "mlp.down_proj": draw(size, inner),
        "post_attention_layernorm": 1 + draw(size),
    }
    tensors: Tensors = {"fc.weight": draw(size, num_captured * size if kind == "eagle3" else 2 * size)}
    if kind == "eagle3":
        layer |= {"input_layernorm": 1 + draw(size), "hidden_norm": 1 + draw(size)}
        known = torch.randperm(vocab_size, generator=generator)[: head_size or vocab_size].sort().values
        tensors |= {"norm.weight": 1 + draw(size), "lm_head.weight": draw(len(known), size)}
        own |= {"draft_vocab_size": len(known)}
        if head_size is not None:
            tensors |= {"d2t": known - torch.arange(len(known)), "t2d": torch.isin(torch.arange(vocab_size), known)}
        if follows:
            tensors |= {"norm.weight": theirs["model.norm.weight"], "lm_head.weight": theirs["lm_head.weight"][known]}
    if follows:
        for name in layer:
            of_last = theirs.get(f"{last}{name}.weight")
            if of_last is not None:
                layer[name] = of_last if of_last.dim() == 1 or "proj" not in name else _wider(of_last, layer[name])
        if kind == "eagle":
            norm = theirs[f"{last}input_layernorm.weight"]
            for name in ("q_proj", "k_proj", "v_proj"):
                layer[f"self_attn.{name}"] = layer[f"self_attn.{name}"] * norm
            tensors["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
        else:
            tensors["fc.weight"] *= 0.01
    if own_embedding:
        tensors["embed_tokens.weight"] = theirs["model.embed_tokens.weight"]
    prefix = "layers.0" if kind == "eagle" else names
    tensors |= {f"{prefix}.{name}.weight": tensor for name, tensor in layer.items()}
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    architecture = "EagleLlamaForCausalLM" if kind == "eagle" else "LlamaForCausalLMEagle3"
    written = {"architectures": [architecture], "model_type": "llama", **own, **(fields or {})}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def _wider(weight: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """`weight`, with columns of zeros behind it."""
    return F.pad(weight, (0, drawn.shape[1] - weight.shape[1]))


def make_last_layer_count(served: Path, *, embedding: float) -> None:
    """Only the last layer adds something to the residual stream. `embedding`: the size of the numbers in the embedding."""
    file = served / "model.safetensors"
    tensors = load_file(file)
    last = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(2.0 if name.startswith(f"model.layers.{last - 1}.") else 0.0)
    table = tensors["model.embed_tokens.weight"]
    table *= embedding / table.pow(2).mean(dim=1, keepdim=True).sqrt()
    if embedding == 1.0:  # EAGLE has no norm behind its layer
        tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, file, metadata={"format": "pt"})


class EagleTruth:
    """The served model by transformers, and the head of `folder` in float64."""

    def __init__(self, served: Path, folder: Path, layers: list[int] | None = None) -> None:
        self.model: Any = reference_model(served, dtype=torch.float64)
        config = json.loads((folder / "config.json").read_text())
        config = {**config, **config.get("transformer_layer_config", {})}
        self.is_eagle3 = "draft_vocab_size" in config
        self.layers = layers or LAYERS
        self.replaces = config.get("norm_before_residual", False)
        names = {
            name.replace("midlayer.", "layers.0."): each
            for name, each in load_file(folder / "model.safetensors").items()
        }
        self.weights = {name: each.double() if each.is_floating_point() else each for name, each in names.items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps, self.theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
        embedding = self.weights.get("embed_tokens.weight")
        self.embedding = self.model.get_input_embeddings().weight if embedding is None else embedding

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: list[int]) -> torch.Tensor:
        """As `MtpTruth.logits`."""
        known = torch.tensor([tokens])
        states = self.model(known, output_hidden_states=True).hidden_states
        if self.is_eagle3:
            seen = torch.cat([states[layer][0] for layer in self.layers], dim=-1)
            hidden = F.linear(seen, self.weights["fc.weight"])[:-1]
        else:
            hidden = states[-1][0, :-1]
        found, inputs = [], known[0, 1:]
        for draft in (*drafts, None):
            passed = self._layer(self.embedding[inputs], hidden)[-1:]
            found.append(self._logits(passed[0]))
            if draft is not None:
                inputs = torch.cat([inputs, torch.tensor([draft])])
                hidden = torch.cat([hidden, passed])
        return torch.stack(found).float()

    def _layer(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_eagle3:
            normed = self._norm("layers.0.hidden_norm", hidden)
            residual = normed if self.replaces else hidden
            read = torch.cat([self._norm("layers.0.input_layernorm", embedded), normed], dim=1)
        else:
            read = residual = F.linear(
                torch.cat([embedded, hidden], dim=1), self.weights["fc.weight"], self.weights.get("fc.bias")
            )
        residual = residual + self._attend(read)
        inner = self._norm("layers.0.post_attention_layernorm", residual)
        gate, up = (F.linear(inner, self.weights[f"layers.0.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        added = F.linear(F.silu(gate) * up, self.weights["layers.0.mlp.down_proj.weight"])
        return residual + added

    def _attend(self, read: torch.Tensor) -> torch.Tensor:
        parts = (F.linear(read, self.weights[f"layers.0.self_attn.{name}_proj.weight"]) for name in "qkv")
        query, key, value = (part.view(len(read), -1, self.head_dim).transpose(0, 1) for part in parts)
        half = self.head_dim // 2
        angles = torch.arange(len(read), dtype=torch.float64)[:, None] * self.theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )

        def rotate(x: torch.Tensor) -> torch.Tensor:
            one, other = x[..., :half], x[..., half:]
            return torch.cat(
                [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], dim=-1
            )

        repeated = self.heads // self.kv_heads
        key, value = rotate(key).repeat_interleave(repeated, 0), value.repeat_interleave(repeated, 0)
        attended = F.scaled_dot_product_attention(rotate(query), key, value, is_causal=True)
        return F.linear(
            attended.transpose(0, 1).reshape(len(read), -1), self.weights["layers.0.self_attn.o_proj.weight"]
        )

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = x / (x.pow(2).mean(dim=-1, keepdim=True) + self.eps).sqrt()
        return normed * self.weights[f"{name}.weight"]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_eagle3:
            logits: torch.Tensor = self.model.lm_head(hidden)
            return logits
        own = F.linear(self._norm("norm", hidden), self.weights["lm_head.weight"])
        if "d2t" not in self.weights:
            return own
        wide = torch.full((len(self.weights["t2d"]),), -torch.inf, dtype=own.dtype)
        wide[torch.arange(len(own)) + self.weights["d2t"]] = own
        return wide


def served_config(**fields: object) -> LlamaConfig:
    """Of a model with 7 layers."""
    from tests.support.model_zoo import FAMILY_CONFIGS

    return LlamaConfig(**{**FAMILY_CONFIGS["llama"][0].to_dict(), "num_hidden_layers": 7, **fields})
