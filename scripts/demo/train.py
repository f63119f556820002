"""Train the embedded model: `python -m scripts.demo.train --minutes 75`.

1. Writes checkpoint.pt and tokenizer.json to --work, and resumes from them; the schedule counts CPU time of training, so
   a process that was stopped, or killed and started again, still anneals to the end.
2. At the end writes the model folder to --output and compares its logits with those of transformers.

Each step takes documents of mixed kinds, sorts them by length and runs them in a few padded groups of alike lengths.
Matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW; float32 master weights,
a bfloat16 copy for the arithmetic. The learning rate is constant, then falls linearly to zero in the last 40 % of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from inflight.hub import EMBEDDED_MODEL
from scripts.demo import corpus, network
from scripts.demo.tasks import MULTI_TURN, TURN_KINDS, Sample, draw, is_correct
from scripts.demo.tokenizer import END_ID, PAD_ID, START_ID, render, save_tokenizer, train_tokenizer

VOCAB_SIZE = 1536
IGNORED = -100
MIXTURE = {  # documents of each kind; a story has ten times the tokens of a sum
    "arithmetic": 30,
    "extraction": 22,
    "lists": 14,
    "facts": 9,
    "stories": 1.2,
    "tools": 9,
    "chat": 5,
    MULTI_TURN: 4,
}
TOKENS_PER_STEP = 4096
TOKENS_PER_GROUP = 1024
MIN_FILL = 0.75  # of the longest document of a group
PEAK_RATE = 3e-3
NUM_WARMUP_STEPS = 50
DECAY = 0.4  # fraction of the time


@dataclass(frozen=True)
class Document:
    ids: list[int]
    targets: list[int]  # the next token where it belongs to an assistant turn, else IGNORED


def draw_for_training(rng: Random) -> Sample:
    """A training sample of the mixture, now and then below a system prompt."""
    sample = draw(rng.choices(tuple(MIXTURE), tuple(MIXTURE.values()))[0], rng, held_out=False)
    if rng.random() < 0.15:
        system = {"role": "system", "content": rng.choice(corpus.SYSTEM_PROMPTS)}
        return replace(sample, messages=(system, *sample.messages))
    return sample


def encode(sample: Sample, tokenizer: Tokenizer) -> Document:
    ids: list[int] = tokenizer.encode(render([*sample.messages, sample.answer], sample.tools)).ids
    assistant = tokenizer.token_to_id("assistant")
    targets, in_answer = [], False
    for position, token in enumerate(ids[:-1]):
        # `<|im_start|>assistant\n` is given by the template; what follows it, <|im_end|> included, is the answer
        if token == END_ID:
            in_answer = False
        elif position >= 2 and ids[position - 2] == START_ID and ids[position - 1] == assistant:
            in_answer = True
        targets.append(ids[position + 1] if in_answer else IGNORED)
    return Document(ids[:-1], targets)


def groups(documents: list[Document]) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, targets), both [batch, length], right-padded, of at most TOKENS_PER_GROUP tokens and little padding."""
    ordered = sorted(documents, key=lambda document: len(document.ids), reverse=True)
    while ordered:
        length = len(ordered[0].ids)
        alike = [document for document in ordered if len(document.ids) >= MIN_FILL * length]
        batch = alike[: max(1, TOKENS_PER_GROUP // length)]
        ordered = ordered[len(batch) :]
        ids = [document.ids + [PAD_ID] * (length - len(document.ids)) for document in batch]
        targets = [document.targets + [IGNORED] * (length - len(document.targets)) for document in batch]
        yield torch.tensor(ids), torch.tensor(targets)


class Trainer:
    """Owns the master weights, their bfloat16 copy, the optimizers and the CPU seconds spent."""

    def __init__(self, tokenizer: Tokenizer, budget: float) -> None:
        torch.manual_seed(0)
        self.tokenizer = tokenizer
        self.budget = budget  # CPU seconds
        self.spent = 0.0
        self.step_index = 0
        self.master = network.Qwen3(tokenizer.get_vocab_size())
        self.model = network.Qwen3(tokenizer.get_vocab_size()).bfloat16()
        parameters = dict(self.master.named_parameters())
        matrices = [p for name, p in parameters.items() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in parameters.items() if p.dim() == 1 or "embed" in name]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        )
        self.model.model.compile(dynamic=True)
        self._copy_weights()

    def _copy_weights(self) -> None:
        with torch.no_grad():
            for copy, weight in zip(self.model.parameters(), self.master.parameters(), strict=True):
                copy.copy_(weight)

    def _rate(self) -> float:
        progress = self.spent / self.budget
        return max(0.0, min(1.0, (self.step_index + 1) / NUM_WARMUP_STEPS, (1 - progress) / DECAY)) * PEAK_RATE

    def step(self) -> float:
        """One update; returns the mean loss of a target token."""
        started = time.process_time()
        rng = Random(self.step_index)
        documents: list[Document] = []
        while sum(len(document.ids) for document in documents) < TOKENS_PER_STEP:
            documents.append(encode(draw_for_training(rng), self.tokenizer))
        num_targets = sum(target != IGNORED for document in documents for target in document.targets)
        total = 0.0
        for ids, targets in groups(documents):
            loss = self.model.loss(ids, targets)
            (loss / num_targets).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        for copy, weight in zip(self.model.parameters(), self.master.parameters(), strict=True):
            assert copy.grad is not None
            weight.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self._rate()
            optimizer.step()
        self._copy_weights()
        self.step_index += 1
        self.spent += time.process_time() - started
        return total / num_targets

    def save(self, path: Path) -> None:
        tensors = {f"master.{name}": tensor for name, tensor in self.master.state_dict().items()}
        for index, optimizer in enumerate(self.optimizers):
            for parameter, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    tensors[f"optimizer.{index}.{parameter}.{name}"] = torch.as_tensor(value)
        progress = {"spent": repr(self.spent), "step_index": str(self.step_index)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path.with_suffix(".tmp"), progress)
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            progress = file.metadata()
        prefix = "master."
        self.master.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        for index, optimizer in enumerate(self.optimizers):
            saved = optimizer.state_dict()
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{index}."):
                    _, _, parameter, key = name.split(".")
                    saved["state"].setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict(saved)
        self.spent, self.step_index = float(progress["spent"]), int(progress["step_index"])
        self._copy_weights()

    def accuracy(self, kind: str, count: int) -> float:
        """Greedy accuracy of the bfloat16 weights on `count` held-out samples, without a cache."""
        rng = Random(f"probe {kind}")
        samples = [draw(kind, rng, held_out=True) for _ in range(count)]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return sum(is_correct(sample, self._answer(sample)) for sample in samples) / count

    def _answer(self, sample: Sample) -> str:
        text = render(sample.messages, sample.tools, add_generation_prompt=True)
        ids: list[int] = self.tokenizer.encode(text).ids
        start = len(ids)
        while ids[-1] != END_ID and len(ids) < start + 64:
            hidden = self.model.model(torch.tensor([ids]))[0, -1]
            ids.append(int((hidden @ self.model.model.embed_tokens.weight.T).argmax()))
        answer: str = self.tokenizer.decode(ids[start:])
        return answer


def export(trainer: Trainer, folder: Path) -> None:
    """Write the Hugging Face folder, and check that transformers computes the logits that training computed."""
    from transformers import AutoModelForCausalLM  # optional dependency

    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(network.config(VOCAB_SIZE), indent=2) + "\n")
    generation = {"eos_token_id": [END_ID, PAD_ID], "pad_token_id": PAD_ID, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(trainer.tokenizer, folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([encode(draw_for_training(Random(0)), trainer.tokenizer).ids])
    ours = network.Qwen3(VOCAB_SIZE)
    ours.load_state_dict(weights)
    with torch.no_grad():
        logits = ours.model(ids) @ ours.model.embed_tokens.weight.T
        torch.testing.assert_close(reference(ids).logits, logits, rtol=1e-3, atol=1e-3)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an earlier start, or a new one trained on generated text."""
    if not path.exists():
        rng = Random("tokenizer")
        samples = [draw_for_training(rng) for _ in range(20_000)]
        messages = [message for sample in samples for message in (*sample.messages, sample.answer)]
        texts = [text for message in messages for text in render([message]).split("<|")]
        path.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(texts, VOCAB_SIZE).save(str(path))
    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model and write its folder.")
    parser.add_argument("--output", type=Path, default=EMBEDDED_MODEL, help="the model folder to write")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints and the process id")
    parser.add_argument("--minutes", type=float, default=85, help="CPU minutes of training, over all starts together")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = load_tokenizer(options.work / "tokenizer.json")
    (options.work / "train.pid").write_text(f"{os.getpid()}\n")
    trainer = Trainer(tokenizer, options.minutes * 60 * options.threads)
    checkpoint = options.work / "checkpoint.safetensors"
    if checkpoint.exists():
        trainer.load(checkpoint)
    mean_loss = 0.0
    while trainer.spent < trainer.budget:
        loss = trainer.step()
        mean_loss = loss if mean_loss == 0 else 0.98 * mean_loss + 0.02 * loss
        if trainer.step_index % 25 == 0:
            print(f"step {trainer.step_index} cpu {trainer.spent:.0f} s loss {mean_loss:.4f}", flush=True)
        if trainer.step_index % 250 == 0:
            trainer.save(checkpoint)
            scores = [f"{kind} {trainer.accuracy(kind, 20):.0%}" for kind in (*TURN_KINDS, "tools")]
            print("held-out:", ", ".join(scores), flush=True)
    trainer.save(checkpoint)
    export(trainer, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
