"""Qwen3 in its smallest form, for training only. Parameters are named as in the checkpoint; `train.export` checks it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.demo.tokenizer import END_ID, MAX_LENGTH, PAD_ID

HIDDEN, INTERMEDIATE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, THETA = 256, 704, 6, 4, 2, 64, 10000.0
EPS = 1e-6


def config(vocab_size: int) -> dict[str, object]:
    """The config.json of the embedded model."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS)


def _linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = _linear(HIDDEN, NUM_HEADS * HEAD_DIM)
        self.k_proj = _linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM)
        self.v_proj = _linear(HIDDEN, NUM_KV_HEADS * HEAD_DIM)
        self.o_proj = _linear(NUM_HEADS * HEAD_DIM, HIDDEN)
        self.q_norm = RMSNorm(HEAD_DIM)
        self.k_norm = RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (NUM_HEADS, HEAD_DIM))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (NUM_KV_HEADS, HEAD_DIM))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (NUM_KV_HEADS, HEAD_DIM)).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)  # [batch, num_heads, length, head_dim]
        # Written out for torch.compile to fuse: at this size twice as fast on a CPU as F.scaled_dot_product_attention.
        k, v = k.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1), v.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1)
        position = torch.arange(x.shape[1])
        scores = (q @ k.transpose(-1, -2)) * HEAD_DIM**-0.5
        scores = scores.masked_fill(position[:, None] < position, float("-inf"))
        out = scores.float().softmax(-1).to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = _linear(HIDDEN, INTERMEDIATE)
        self.up_proj = _linear(HIDDEN, INTERMEDIATE)
        self.down_proj = _linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = MLP()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.post_attention_layernorm = RMSNorm(HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = RMSNorm(HIDDEN)
        angles = torch.outer(torch.arange(MAX_LENGTH), THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.register_buffer("cos", angles.cos(), persistent=False)  # [max_length, head_dim / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, length] -> normed hidden states [batch, length, hidden]; causal, sequences are right-padded."""
        x = self.embed_tokens(ids)
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length].to(x.dtype), self.get_buffer("sin")[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)  # type: ignore[no-any-return]


class Qwen3(nn.Module):
    """Tied embeddings: the logits are `model(ids) @ model.embed_tokens.weight.T`."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = Decoder(vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * NUM_LAYERS) ** 0.5 if residual else 0.02)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy over targets >= 0, both [batch, length]; only those positions reach the vocabulary."""
        hidden, keep = self.model(ids), targets >= 0
        logits = hidden[keep] @ self.model.embed_tokens.weight.T  # [num_targets, vocab_size]
        return F.cross_entropy(logits.float(), targets[keep], reduction="sum")
