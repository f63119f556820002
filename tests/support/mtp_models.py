"""Small models with a layer behind the last one that predicts drafts (MTP), and transformers' own such layer as the truth."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.support.model_zoo import draw_weights, reference_model

# part of transformers' layer -> its name in the checkpoint: of Qwen3.5 and Qwen3-Next, and of DeepSeek-V3 and GLM
_NAMED = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "post_norm": "mtp.norm",
}
_NUMBERED = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}


def write_mtp_model(config: PreTrainedConfig, folder: Path, seed: int, *, follows: bool = False) -> Path:
    """Writes a model with random weights and an MTP layer.

    Args:
        follows: only the last layer adds something to the residual stream, and the MTP layer has the same weights, and reads
            embeddings only. So it computes what the model computes, but for the first token, which it does not see: nearly all
            drafts are right, if the keys of all tokens are there.
    """
    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) is not None:
            setattr(longer, name, [*getattr(config, name)[: config.num_hidden_layers], kind])
    model = AutoModelForCausalLM.from_config(longer)
    draw_weights(model, seed)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tensors = load_file(Path(saved) / "model.safetensors")
    size, last = config.hidden_size, f"model.layers.{config.num_hidden_layers}."
    generator = torch.Generator().manual_seed(seed)
    is_named = config.model_type.startswith("qwen3")
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith(last)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in mtp}
    if is_named:
        mtp = {f"mtp.layers.0.{name.removeprefix(last)}": tensor for name, tensor in mtp.items()}
    for part in ("enorm", "hnorm", "eh_proj", "post_norm"):
        shape = (size, 2 * size) if part == "eh_proj" else (size,)
        values = torch.randn(shape, generator=generator) * 0.15
        name = _NAMED[part] if is_named else last + _NUMBERED[part]
        mtp[f"{name}.weight"] = values if part == "eh_proj" else 1 + values
    if follows:
        _follow(tensors, mtp, config.num_hidden_layers)
    folder.mkdir(parents=True)
    save_file(tensors | mtp, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {**config.to_dict(), "architectures": model.config.architectures}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def _follow(tensors: dict[str, torch.Tensor], mtp: dict[str, torch.Tensor], num_layers: int) -> None:
    last = f"model.layers.{num_layers - 1}."
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor.mul_(name.startswith(last))
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(dim=1, keepdim=True).sqrt()
    size = embedding.shape[1]
    for name, tensor in mtp.items():
        of_last = last + name.removeprefix("mtp.layers.0.").removeprefix(f"model.layers.{num_layers}.")
        if of_last in tensors:
            tensor.copy_(tensors[of_last])
        elif name.endswith(("fc.weight", "eh_proj.weight")):
            tensor.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
        elif name.endswith(("mtp.norm.weight", "shared_head.norm.weight")):
            tensor.copy_(tensors["model.norm.weight"])
        elif name.endswith(("pre_fc_norm_embedding.weight", "enorm.weight")):
            tensor.fill_(0.0 if name.startswith("mtp.") else 1.0)  # Qwen's norms add 1 to their weights


class MtpTruth:
    """Transformers' model and MTP layer with the weights of `folder`, in float64."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = reference_model(folder, dtype=torch.float64)
        config: Any = self.model.config
        tensors = load_file(folder / "model.safetensors")
        longer = copy.deepcopy(config)
        longer.num_hidden_layers += 1
        last, is_named = f"model.layers.{config.num_hidden_layers}.", config.model_type.startswith("qwen3")
        names = {
            "layer_types": ("full_attention", "mtp_layer_types"),
            "mlp_layer_types": ("sparse", "mtp_mlp_layer_types"),
        }
        for name, (kind, of_mtp) in names.items():
            if getattr(config, name, None) is not None:
                setattr(longer, name, [*getattr(config, name)[: config.num_hidden_layers], kind])
                setattr(config, of_mtp, [kind])
        config.num_mtp_layers = 1
        moved = {
            (last + name.removeprefix("mtp.layers.0.") if name.startswith("mtp.layers.0.") else name): tensor
            for name, tensor in tensors.items()
        }
        with tempfile.TemporaryDirectory() as saved:
            save_file(moved, Path(saved) / "model.safetensors", metadata={"format": "pt"})
            fields = {**longer.to_dict(), "architectures": config.architectures}
            (Path(saved) / "config.json").write_text(json.dumps(fields))
            block = reference_model(Path(saved), dtype=torch.float64).get_decoder().layers[-1]
        self.mtp = MtpModel(self.model, 1).double().eval()
        layer: Any = self.mtp.layers[0]
        layer.mtp_block = block
        block.layer_idx = 0
        for part in ("enorm", "hnorm", "eh_proj", "post_norm"):
            name = _NAMED[part] if is_named else last + _NUMBERED[part]
            getattr(layer, part).weight.data.copy_(tensors[f"{name}.weight"])

    @torch.no_grad()
    def logits(self, tokens: list[int], drafts: list[int]) -> torch.Tensor:
        """tokens: those that are known, drafts: those that follow. Returns the logits of each draft and of one more,
        [len(drafts) + 1, vocab_size]."""
        known = torch.tensor([tokens])
        hidden = self.model(known, output_hidden_states=True).hidden_states[-1][:, :-1]
        found, inputs = [], known[:, 1:]
        for draft in (*drafts, None):
            positions = torch.arange(1, inputs.shape[1] + 1)[None]
            passed = self.mtp.forward_layer(0, hidden, positions, None, input_ids=inputs)
            found.append(self.mtp._project_to_logits(passed[:, -1])[0])
            if draft is not None:
                inputs = torch.cat([inputs, torch.tensor([[draft]])], dim=1)
                hidden = torch.cat([hidden, passed[:, -1:]], dim=1)
        return torch.stack(found).float()
