"""Train the model that reads drawings: `python -m scripts.demo.vision.train`.

Writes a model folder to ~/.cache/inflight/drawings (`--output`). If the folder exists, nothing is done. A checkpoint is written
beside it now and then; after an interruption the same command goes on from the last one. The number of a step determines its
drawings, so the same number of steps gives the same weights on the same processor with as many threads.

In the first TOWER_SHARE of the steps the tower learns what is where in drawings, without the decoder (tower_head.py). In the
others both learn to answer in conversations; only the tokens of answers count in the loss, and, so that the tower forgets
nothing, its own loss of the first part. Every step draws new drawings.

Matrices are trained with Muon (https://kellerjordan.github.io/posts/muon/), the rest with AdamW; float32 weights, arithmetic in
bfloat16. In each of the two parts the learning rate rises for NUM_WARMUP_STEPS steps, and falls linearly to zero in the last
DECAY of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.vision.drawings import Drawing, paint
from scripts.demo.vision.folder import (
    DEVIATION,
    END_ID,
    IMAGE_SIZE,
    MEAN,
    PAD_ID,
    PLACES_A_SIDE,
    START_ID,
    default_folder,
    expanded,
    make_config,
    make_tokenizer,
    write_files,
)
from scripts.demo.vision.questions import Conversation, draw_conversation, draw_drawing
from scripts.demo.vision.tower_head import TowerHead, labels_of

NUM_STEPS = 1600
TOWER_SHARE = 0.75  # of the steps
DRAWINGS_PER_STEP = 96
DRAWINGS_PER_GROUP = 24
IMAGE_LAST = 0.25  # of the conversations have the drawing behind the first question
PEAK_RATE = 8e-3
NUM_WARMUP_STEPS = 50
DECAY = 0.5
STEPS_PER_REPORT = 50
IGNORED = -100
MAX_PARAMETERS = 4_000_000


class Document(NamedTuple):
    """
    Attributes:
        targets: for each id the next one where it belongs to an answer, else IGNORED.
        pixels: float32 [3, IMAGE_SIZE, IMAGE_SIZE].
        labels: see `labels_of`.
    """

    ids: list[int]
    targets: list[int]
    pixels: Tensor
    labels: list[list[int]]


def encode(conversation: Conversation, tokenizer: Tokenizer, *, image_last: bool = False) -> Document:
    ids: list[int] = tokenizer.encode(expanded(conversation, image_last=image_last)).ids
    assistant = tokenizer.encode("assistant\n").ids
    opening = [START_ID, *assistant]
    targets, in_answer = [], False
    for position, token in enumerate(ids[:-1]):
        if token == END_ID:
            in_answer = False
        elif ids[max(0, position + 1 - len(opening)) : position + 1] == opening:
            in_answer = True
        targets.append(ids[position + 1] if in_answer else IGNORED)
    drawing = conversation.drawing
    return Document(ids[:-1], targets, pixels_of(drawing), labels_of(drawing, PLACES_A_SIDE))


def pixels_of(drawing: Drawing) -> Tensor:
    """What the processor makes of the drawing."""
    image = paint(drawing).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.LANCZOS)
    pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / DEVIATION
    return torch.from_numpy(pixels).permute(2, 0, 1)


class Group(NamedTuple):
    """Documents of similar lengths: ids [batch, length] and targets [batch, length], padded at the end, pixels
    [batch, 1, 3, height, width] and labels [batch, num_places, 4]."""

    ids: Tensor
    targets: Tensor
    pixels: Tensor
    labels: Tensor


def groups(documents: Sequence[Document]) -> Iterator[Group]:
    ordered = sorted(documents, key=lambda document: len(document.ids))
    for start in range(0, len(ordered), DRAWINGS_PER_GROUP):
        batch = ordered[start : start + DRAWINGS_PER_GROUP]
        length = len(batch[-1].ids)
        ids = [document.ids + [PAD_ID] * (length - len(document.ids)) for document in batch]
        targets = [document.targets + [IGNORED] * (length - len(document.targets)) for document in batch]
        yield Group(
            ids=torch.tensor(ids),
            targets=torch.tensor(targets),
            pixels=torch.stack([document.pixels for document in batch])[:, None],
            labels=torch.tensor([document.labels for document in batch]),
        )


def make_model(config: Any) -> Any:  # Any: of transformers
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    assert num_parameters(model) <= MAX_PARAMETERS
    return model


def num_parameters(model: Any) -> int:  # Any: of transformers
    return sum(parameter.numel() for parameter in model.parameters())


class Trainer:
    """Owns the model, the head of its tower and their optimizers."""

    def __init__(self, model: Any, tokenizer: Tokenizer, num_steps: int) -> None:  # Any: of transformers
        self.model, self.tokenizer, self.num_steps = model, tokenizer, num_steps
        self.num_tower_steps = round(TOWER_SHARE * num_steps)
        self.head = TowerHead(model.config.text_config.hidden_size)
        self.step_index = 0
        named = list(model.named_parameters())
        matrices = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
        others = [weight for name, weight in named if weight.dim() != 2 or "embed" in name] + list(
            self.head.parameters()
        )
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=PEAK_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, num_drawings: int = DRAWINGS_PER_STEP) -> float:
        """One update; returns the mean loss of a place's labels, or of a target token."""
        rng = Random(f"train {self.step_index}")
        learn = self._learn_labels if self.step_index < self.num_tower_steps else self._learn_answers
        loss = learn(rng, num_drawings)
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.head.parameters()], 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = self._rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step_index += 1
        return loss

    def _learn_labels(self, rng: Random, num_drawings: int) -> float:
        drawings = [draw_drawing(rng, held_out=False) for _ in range(num_drawings)]
        pixels = torch.stack([pixels_of(drawing) for drawing in drawings])
        labels = torch.tensor([labels_of(drawing, PLACES_A_SIDE) for drawing in drawings])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embeddings = torch.stack(self.model.get_image_features(pixels[:, None]).pooler_output)
        loss = self.head.loss(embeddings, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def _learn_answers(self, rng: Random, num_drawings: int) -> float:
        documents = [
            encode(draw_conversation(rng, held_out=False), self.tokenizer, image_last=rng.random() < IMAGE_LAST)
            for _ in range(num_drawings)
        ]
        num_targets = sum(target != IGNORED for document in documents for target in document.targets)
        total = 0.0
        for group in groups(documents):
            of_answers, of_labels = self._losses(group)
            (of_answers / num_targets + of_labels * len(group.ids) / num_drawings).backward()  # type: ignore[no-untyped-call]
            total += of_answers.item()
        return total / num_targets

    def _losses(self, group: Group) -> tuple[Tensor, Tensor]:
        """The summed cross entropy of the targets, and the loss of the tower's head. Only the positions that have a target
        reach the vocabulary."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # Padding is behind the text, so the causal mask is all that is needed.
            out = self.model.model(input_ids=group.ids, pixel_values=group.pixels, use_cache=False)
            keep = group.targets != IGNORED
            logits = self.model.lm_head(out.last_hidden_state[keep])
        of_answers = F.cross_entropy(logits.float(), group.targets[keep], reduction="sum")
        return of_answers, self.head.loss(out.image_hidden_states.unflatten(0, (len(group.ids), -1)), group.labels)

    def _rate(self) -> float:
        index, num_steps = self.step_index, self.num_tower_steps
        if index >= self.num_tower_steps:
            index, num_steps = index - self.num_tower_steps, self.num_steps - self.num_tower_steps
        return min(1.0, (index + 1) / NUM_WARMUP_STEPS, (1 - index / num_steps) / DECAY) * PEAK_RATE

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step_index": self.step_index,
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_index = state["step_index"]


def train(
    trainer: Trainer, checkpoint: Path, report: Callable[[str], None], num_drawings: int = DRAWINGS_PER_STEP
) -> None:
    """Trains up to the trainer's number of steps."""
    started, first, mean_loss = time.monotonic(), trainer.step_index, 0.0
    while trainer.step_index < trainer.num_steps:
        loss = trainer.step(num_drawings)
        mean_loss = loss if mean_loss == 0 else 0.95 * mean_loss + 0.05 * loss
        if trainer.step_index % STEPS_PER_REPORT == 0:
            trainer.save(checkpoint)
            passed = time.monotonic() - started
            left = passed / (trainer.step_index - first) * (trainer.num_steps - trainer.step_index)
            report(
                f"step {trainer.step_index} of {trainer.num_steps}: loss {mean_loss:.4f}, "
                f"{passed / 60:.1f} min passed, {left / 60:.1f} min left"
            )


def export(trainer: Trainer, folder: Path) -> None:
    """Writes a Hugging Face folder with the weights in bfloat16. It appears whole or not at all."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    trainer.model.bfloat16().save_pretrained(unfinished)
    write_files(unfinished, trainer.tokenizer)
    os.replace(unfinished, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the model that reads drawings, and write its folder.")
    parser.add_argument("--output", type=Path, default=default_folder(), help="the model folder to write [%(default)s]")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="updates of the weights [%(default)s]")
    parser.add_argument("--threads", type=int, default=1, help="of torch [%(default)s]")
    options = parser.parse_args()
    if options.output.exists():
        print(f"{options.output} exists already; remove it, or give another --output, to train the model again")
        return
    torch.set_num_threads(options.threads)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(make_model(make_config()), make_tokenizer(), options.steps)
    print(f"{num_parameters(trainer.model):,} parameters", flush=True)
    checkpoint = options.output.with_name(f"{options.output.name}.checkpoint")
    if checkpoint.exists():
        trainer.load(checkpoint)
    train(trainer, checkpoint, lambda line: print(line, flush=True))
    export(trainer, options.output)
    checkpoint.unlink(missing_ok=True)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
