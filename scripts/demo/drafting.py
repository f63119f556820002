"""Train what writes drafts for the embedded model: an EAGLE-3 head, or an MTP layer.

    python -m scripts.demo.drafting --kind eagle3 [--minutes 12]      # writes ~/.cache/inflight/drafting/eagle3
    python -m scripts.demo.drafting --kind mtp [--minutes 12]         # the embedded model with such a layer
    python -m scripts.demo.drafting --kind eagle3 --measure           # tokens a step on held-out prompts

Both read hidden states of the embedded model, which stays as it is, and learn its probabilities of the next tokens on its own
tasks. NUM_STEPS drafts are written in a row in training, as later in serving: the first from the model's states, each later one
from the state that the draft before has left ("training-time test", EAGLE-3, arXiv:2503.01840, section 3.2). So a position
attends to the model's states up to its own, and to those of the drafts in between.

AdamW on float32 weights, one document after the other; the learning rate rises for NUM_WARMUP_STEPS, and falls linearly to zero
in the last DECAY of the time. The weights are written in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from inflight.hub import EMBEDDED_MODEL
from scripts.demo import network
from scripts.demo.evaluate import held_out_samples
from scripts.demo.tasks import KINDS
from scripts.demo.train import DECAY, IGNORED, NUM_WARMUP_STEPS, Document, draw_for_training, encode, groups

EAGLE3, MTP = "eagle3", "mtp"
CAPTURED = (1, 3, 5)  # the layers whose inputs an EAGLE-3 head reads
NUM_STEPS = 4
STEP_WEIGHT = 0.8  # of the loss of each later draft
PEAK_RATE = 1.5e-3
TOKENS_PER_STEP = 2048
NUM_DRAFTS = 4
MIN_LENGTH = NUM_STEPS + 4


class Teacher:
    """The embedded model in float32, without gradients."""

    def __init__(self) -> None:
        weights = {name: each.float() for name, each in load_file(EMBEDDED_MODEL / "model.safetensors").items()}
        self.vocab_size = len(weights["model.embed_tokens.weight"])
        self.network = network.Qwen3(self.vocab_size)
        self.network.load_state_dict(weights)
        self.network.requires_grad_(False)

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden]; also the head."""
        return self.network.model.embed_tokens.weight

    def states(self, ids: Tensor) -> list[Tensor]:
        """ids [batch, length] -> the input of each layer, and the result behind the final norm, all [batch, length, hidden]."""
        decoder = self.network.model
        x = decoder.embed_tokens(ids)
        length = ids.shape[1]
        cos, sin = decoder.get_buffer("cos")[:length], decoder.get_buffer("sin")[:length]
        found = []
        for layer in decoder.layers:
            found.append(x)
            x = layer(x, cos, sin)
        return [*found, decoder.norm(x)]


class Drafter(nn.Module):
    """What both kinds share: a layer that is computed for several drafts in a row."""

    def __init__(self, teacher: Teacher, num_inputs: int) -> None:
        super().__init__()
        self.layer = network.Layer()
        last = teacher.network.model.layers[-1]
        self.layer.load_state_dict(last.state_dict())
        attention = self.layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name).weight.data
            wider = nn.Linear(num_inputs * network.HIDDEN, len(old), bias=False)
            wider.weight.data.copy_(F.pad(old, (0, wider.in_features - old.shape[1])))
            setattr(attention, name, wider)
        self.norm = network.RMSNorm(network.HIDDEN)
        self.norm.load_state_dict(teacher.network.model.norm.state_dict())
        self.norms_heads = num_inputs == 1  # as the served model; a Llama does not
        self.cos, self.sin = (teacher.network.model.get_buffer(name) for name in ("cos", "sin"))

    def first(self, states: list[Tensor]) -> Tensor:
        """The hidden states that the first draft reads, [batch, length, hidden]."""
        raise NotImplementedError

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the attention, and what its output is added to."""
        raise NotImplementedError

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's result -> what the next draft reads, and what the logits are made of."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def drafts(self, embedded: Tensor, states: list[Tensor]) -> list[Tensor]:
        """embedded [batch, length, hidden]: the tokens. Returns for each draft the hidden states of its logits, [batch,
        length - NUM_STEPS, hidden]. Draft j at index p is that of token p + j + 2."""
        count = embedded.shape[1] - NUM_STEPS
        hidden = self.first(states)[:, :count]
        known: list[tuple[Tensor, Tensor]] = []  # keys and values of each draft
        found = []
        for step in range(NUM_STEPS):
            read, residual = self.join(embedded[:, step + 1 : step + 1 + count], hidden)
            x = residual + self._attend(read, known, step)
            x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
            hidden, of_logits = self.leave(x)
            found.append(of_logits)
        return found

    def _attend(self, read: Tensor, known: list[tuple[Tensor, Tensor]], step: int) -> Tensor:
        attention = self.layer.self_attn
        count = read.shape[1]
        heads = (network.NUM_HEADS, network.NUM_KV_HEADS, network.NUM_KV_HEADS)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (
            projection(read).unflatten(-1, (num, network.HEAD_DIM))
            for projection, num in zip(projections, heads, strict=True)
        )
        if self.norms_heads:
            query, key = attention.q_norm(query), attention.k_norm(key)
        cos, sin = self.cos[step : step + count], self.sin[step : step + count]
        query, key = (network._rotate(each.transpose(1, 2), cos, sin) for each in (query, key))
        repeated = network.NUM_HEADS // network.NUM_KV_HEADS
        known.append((key.repeat_interleave(repeated, 1), value.transpose(1, 2).repeat_interleave(repeated, 1)))
        positions = torch.arange(count)
        scores = query @ known[0][0].transpose(-1, -2)
        scores = scores.masked_fill(positions[:, None] < positions, float("-inf"))
        of_drafts = [(query * keys).sum(-1, keepdim=True) for keys, _ in known[1:]]
        weights = (torch.cat([scores, *of_drafts], dim=-1) * network.HEAD_DIM**-0.5).softmax(-1)
        out = weights[..., :count] @ known[0][1]
        for index, (_, values) in enumerate(known[1:]):
            out = out + weights[..., count + index, None] * values
        result: Tensor = attention.o_proj(out.transpose(1, 2).flatten(2))
        return result


class Eagle3Head(Drafter):
    def __init__(self, teacher: Teacher) -> None:
        super().__init__(teacher, num_inputs=2)
        self.hidden_norm = network.RMSNorm(network.HIDDEN)
        self.fc = nn.Linear(len(CAPTURED) * network.HIDDEN, network.HIDDEN, bias=False)
        self.fc.weight.data.mul_(0.1)
        self.fc.weight.data[:, -network.HIDDEN :] += torch.eye(network.HIDDEN)
        self.lm_head = nn.Linear(network.HIDDEN, teacher.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(teacher.embedding)

    def first(self, states: list[Tensor]) -> Tensor:
        found: Tensor = self.fc(torch.cat([states[layer] for layer in CAPTURED], dim=-1))
        return found

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.layer.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1), hidden

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.lm_head(hidden)
        return found

    def tensors(self) -> dict[str, Tensor]:
        named = {f"midlayer.{name}": each for name, each in self.layer.state_dict().items()}
        found = {name: each for name, each in named.items() if "q_norm" not in name and "k_norm" not in name}
        own = {name: each for name, each in self.state_dict().items() if not name.startswith("layer.")}
        renamed = {name.replace("hidden_norm", "midlayer.hidden_norm"): each for name, each in own.items()}
        return found | renamed


class MtpLayer(Drafter):
    def __init__(self, teacher: Teacher) -> None:
        super().__init__(teacher, num_inputs=1)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (network.RMSNorm(network.HIDDEN) for _ in range(2))
        self.fc = nn.Linear(2 * network.HIDDEN, network.HIDDEN, bias=False)
        half = torch.eye(network.HIDDEN) / 2
        self.fc.weight.data.mul_(0.1).add_(torch.cat([half, half], dim=1))
        self.embedding = teacher.embedding

    def first(self, states: list[Tensor]) -> Tensor:
        return states[-1]

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x: Tensor = self.fc(torch.cat(both, dim=-1))
        return self.layer.input_layernorm(x), x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed: Tensor = self.norm(x)
        return normed, normed

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.T

    def tensors(self) -> dict[str, Tensor]:
        names = self.state_dict().items()
        return {f"mtp.{name.replace('layer.', 'layers.0.')}": each for name, each in names if name != "embedding"}


DRAFTERS: dict[str, type[Eagle3Head | MtpLayer]] = {EAGLE3: Eagle3Head, MTP: MtpLayer}


class DraftingTrainer:
    """Owns the drafter and its optimizer. `step` makes one update with documents that its index determines."""

    def __init__(self, kind: str, tokenizer: Tokenizer) -> None:
        torch.manual_seed(0)
        self.teacher = Teacher()
        self.drafter = DRAFTERS[kind](self.teacher)
        self.tokenizer = tokenizer
        self.step_index = 0
        learned = [each for each in self.drafter.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=PEAK_RATE, betas=(0.9, 0.95))

    def step(self, progress: float, num_tokens: int = TOKENS_PER_STEP) -> tuple[float, list[float]]:
        """`progress`: which share of the time is over. Returns the mean loss of a draft, and how often draft 1, 2, ... is what
        the embedded model finds most probable."""
        rng, documents = Random(self.step_index), list[Document]()
        while sum(len(document.ids) for document in documents) < num_tokens:
            document = encode(draw_for_training(rng), self.tokenizer)
            if len(document.ids) >= MIN_LENGTH:
                documents.append(document)
        total, num_drafts, right = 0.0, 0, [0] * NUM_STEPS
        for ids, targets in groups(documents):
            loss, count, agreeing = self._loss(ids, targets)
            (loss / num_tokens).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            num_drafts += count
            right = [one + other for one, other in zip(right, agreeing, strict=True)]
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        rate = max(0.0, min(1.0, (self.step_index + 1) / NUM_WARMUP_STEPS, (1 - progress) / DECAY)) * PEAK_RATE
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_index += 1
        return total / max(1, num_drafts), [each * NUM_STEPS / max(1, num_drafts) for each in right]

    def _loss(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, int, list[int]]:
        """ids, targets [batch, length]. Returns the sum of the losses, the number of drafts, and how many are right."""
        with torch.no_grad():
            states = self.teacher.states(ids)
            embedded = F.embedding(ids, self.teacher.embedding)
        total = torch.zeros(())
        count, right = 0, []
        for step, hidden in enumerate(self.drafter.drafts(embedded, states)):
            places = slice(step + 1, step + 1 + hidden.shape[1])
            keep = targets[:, places] != IGNORED
            with torch.no_grad():
                wanted = (states[-1][:, places][keep] @ self.teacher.embedding.T).log_softmax(-1)
            found = self.drafter.logits(hidden[keep]).log_softmax(-1)
            total = total - STEP_WEIGHT**step * (wanted.exp() * found).sum()
            right.append(int((found.argmax(-1) == wanted.argmax(-1)).sum()))
            count += len(found)
        return total, count, right


def train(trainer: DraftingTrainer, seconds: float, report: Callable[[str], None]) -> None:
    """Trains for so many seconds of the process's CPU time."""
    start, mean = time.process_time(), 0.0
    while (spent := time.process_time() - start) < seconds:
        loss, right = trainer.step(spent / seconds)
        mean = loss if mean == 0 else 0.95 * mean + 0.05 * loss
        if trainer.step_index % 10 == 0:
            shares = " ".join(f"{share:.0%}" for share in right)
            report(f"step {trainer.step_index} cpu {spent:.0f} s loss {mean:.4f} right {shares}")


def export(trainer: DraftingTrainer, kind: str, folder: Path) -> None:
    """Writes a folder that the engine reads: of an EAGLE-3 head alone, or of the embedded model with its MTP layer."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in trainer.drafter.tensors().items()}
    config: dict[str, Any] = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    if kind == MTP:
        shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True)
        tensors |= load_file(EMBEDDED_MODEL / "model.safetensors")
    else:
        changed = {"num_hidden_layers": 1, "tie_word_embeddings": False, "draft_vocab_size": config["vocab_size"]}
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **changed}
        config["eagle_aux_hidden_state_layer_ids"] = list(CAPTURED)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tokens_a_step(kind: str, folder: Path, temperature: float, count: int) -> float:
    """How many tokens a step gives to one stream, on `count` held-out prompts of each kind."""
    from inflight import LLM, SamplingParams  # not needed for training

    given: dict[str, Any] = {"method": kind, "num_speculative_tokens": NUM_DRAFTS}
    if kind == EAGLE3:
        given["model"] = str(folder)
    num_tokens = num_steps = 0
    with LLM(str(EMBEDDED_MODEL if kind == EAGLE3 else folder), speculative_config=given, seed=0) as llm:
        scheduler = llm.llm_engine.core.scheduler
        for name in KINDS:
            for seed, sample in enumerate(held_out_samples(name, count)):
                params = SamplingParams(temperature=temperature, max_tokens=512, seed=seed)
                prompt = llm.llm_engine.render_chat(list(sample.messages), tools=list(sample.tools) or None)
                before = scheduler.stats.num_accepted_tokens
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                answered = len(output.outputs[0].token_ids)
                num_tokens += answered
                num_steps += answered - (scheduler.stats.num_accepted_tokens - before)
    return num_tokens / num_steps


def default_folder(kind: str) -> Path:
    """~/.cache/inflight/drafting/KIND, or in the folder that XDG_CACHE_HOME names."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "inflight" / "drafting" / kind


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a head that writes drafts for the embedded model.")
    parser.add_argument("--kind", choices=DRAFTERS, required=True)
    parser.add_argument("--output", type=Path, help="the folder to write [~/.cache/inflight/drafting/KIND]")
    parser.add_argument("--minutes", type=float, default=12, help="CPU minutes of training [%(default)s]")
    parser.add_argument("--measure", action="store_true", help="only measure what was trained before")
    parser.add_argument("--count", type=int, default=10, help="held-out prompts of each kind [%(default)s]")
    options = parser.parse_args()
    folder = options.output or default_folder(options.kind)
    if not options.measure:
        torch.set_num_threads(1)
        tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
        trainer = DraftingTrainer(options.kind, tokenizer)
        train(trainer, options.minutes * 60, lambda line: print(line, flush=True))
        export(trainer, options.kind, folder)
        print(f"wrote {folder}")
    for temperature in (0.0, 1.0):
        found = tokens_a_step(options.kind, folder, temperature, options.count)
        print(f"{options.kind}, temperature {temperature:g}: {found:.2f} tokens a step", flush=True)


if __name__ == "__main__":
    main()
