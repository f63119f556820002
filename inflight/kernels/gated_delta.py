"""The gated delta rule (arXiv:2412.06464) in plain torch, and what belongs to it in the layers of Qwen3-Next and Qwen3.5.

A value head has a state, a matrix S [key_dim, value_dim]. Each token has a decay d in (0, 1] and a rate b in (0, 1):

    S = d S + k (b (v - k^T d S))^T        out = q^T S

Queries, keys and values come out of a short convolution over the tokens, per channel, and SiLU. Queries and keys are scaled to
the length 1, queries also by 1 / sqrt(key_dim). d = exp(-rate * softplus(step + step_bias)). The output of each head is normed
and multiplied by SiLU(gate).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64  # tokens
_SMALLEST_SQUARES = 1e-6  # added to the squares of a query or key


@dataclass(frozen=True, kw_only=True)
class GatedDeltaShape:
    """The heads of one rank. `kernel_size`: the tokens that the convolution covers."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def row_parts(self) -> tuple[int, int, int, int]:
        """The sizes of the parts of a row: channels, gates, one beta and one step for each value head."""
        num_heads = self.num_value_heads
        return self.num_channels, num_heads * self.value_dim, num_heads, num_heads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the matrices of all value heads (float32), and of the last inputs of the convolution."""
        state = self.num_value_heads, self.key_dim, self.value_dim
        return state, (self.kernel_size - 1, self.num_channels)


@dataclass(frozen=True, kw_only=True)
class GatedDeltaWeights:
    """All float32. `conv` is [kernel_size, num_channels]; `rates` and `step_bias` [num_value_heads]; `norm` [value_dim]."""

    conv: Tensor
    rates: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float


def gated_delta(
    rows: Tensor, state: Tensor, inputs: Tensor, shape: GatedDeltaShape, weights: GatedDeltaWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the next tokens of one sequence.

    Args:
        rows: [num_tokens, sum(shape.row_parts)].
        state, inputs: what was kept of the tokens before, with the shapes `shape.state_shapes`; zeros if there are none.

    Returns:
        [num_tokens, num_value_heads, value_dim] in the dtype of `rows`, then the new `state` and `inputs`.
    """
    channels, gates, betas, steps = torch.split(rows, [*shape.row_parts], dim=-1)
    seen = torch.cat([inputs.to(rows.dtype), channels])
    windows = seen.float().unfold(0, shape.kernel_size, 1)  # [num_tokens, num_channels, kernel_size]
    mixed = F.silu((windows * weights.conv.T).sum(-1))
    num_keys = shape.num_key_heads * shape.key_dim
    queries, keys, values = torch.split(mixed, [num_keys, num_keys, mixed.shape[1] - 2 * num_keys], dim=-1)
    per_key = shape.num_value_heads // shape.num_key_heads
    queries, keys = (
        _to_length_1(x.reshape(len(rows), -1, shape.key_dim)).repeat_interleave(per_key, dim=1) for x in (queries, keys)
    )
    log_decays = -weights.rates * F.softplus(steps.float() + weights.step_bias)
    out, state = delta_rule(
        queries * shape.key_dim**-0.5,
        keys,
        values.reshape(len(rows), -1, shape.value_dim),
        log_decays,
        betas.float().sigmoid(),
        state,
    )
    scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps)
    gated = out * scale * weights.norm * F.silu(gates.float()).reshape(out.shape)
    return gated.to(rows.dtype), state, seen[-(shape.kernel_size - 1) :]


def _to_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _SMALLEST_SQUARES)


def delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, betas: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, in float32. It computes many tokens at once: within a chunk, what a token writes depends on what the
    tokens before it wrote, which is a triangular system of equations.

    Args:
        queries, keys: [num_tokens, num_heads, key_dim]. values: [num_tokens, num_heads, value_dim].
        log_decays, betas: [num_tokens, num_heads].
        state: [num_heads, key_dim, value_dim].

    Returns:
        [num_tokens, num_heads, value_dim], and the new state.
    """
    results = []
    for start in range(0, len(queries), _CHUNK):
        q, k, v, g, beta = (
            x[start : start + _CHUNK].transpose(0, 1) for x in (queries, keys, values, log_decays, betas)
        )
        total = g.cumsum(1)  # [num_heads, tokens]
        between = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # the decay from token j to token i
        system = beta[:, :, None] * (k @ k.mT) * between
        wanted = beta[:, :, None] * (v - total.exp()[:, :, None] * (k @ state))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        of_state = total.exp()[:, :, None] * (q @ state)
        of_chunk = ((q @ k.mT) * between) @ written
        results.append((of_state + of_chunk).transpose(0, 1))
        rest = (total[:, -1:] - total).exp()[:, :, None]  # the decay from each token to the end of the chunk
        decay = total[:, -1].exp()[:, None, None]
        state = decay * state + (rest * k).mT @ written
    return torch.cat(results), state
