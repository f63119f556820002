"""What each format costs in accuracy: of every kind of linear layer, of the logits, and of the embedded model's answers.

    python -m benchmarks.accuracy [--formats bf16 int8 int4 ...] [--parts layers logits tasks] [--models FOLDER] [--count 200]
                                  [--trained FOLDER]

The truth is transformers' forward of the checkpoint's own weights in float64 (its norms compute in float32). A layer is given
the inputs that it has in that forward, rounded to bfloat16, and its outputs are compared with the float64 product of the same
inputs. Logits are those of every position of a prompt, computed in chunks, so that later chunks read earlier ones from the KV
cache. Models: the embedded one, which is trained, on its own conversations; and a shape with random weights on random tokens.

With `--trained FOLDER` only the logits of this model are measured, on the same conversations: a model with the embedded model's
tokenizer, as `scripts.demo.mixture` trains one with experts.

Exit code 1: the embedded model loses more than 1 point of right answers with int8, or 3 with int4.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.quality.formats import FORMATS
from benchmarks.quality.task_accuracy import print_task_accuracy
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER, SHAPES, model_folder
from benchmarks.shared.observed_engine import ObservedEngine
from benchmarks.shared.report import emit, print_table
from inflight.config.architecture import SILU
from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.workloads import Workload
from inflight.hub import EMBEDDED_MODEL
from inflight.kernels.gate import multiply_gate
from inflight.models.causal_lm import CausalLM
from inflight.sampling_params import SamplingParams
from scripts.demo.evaluate import held_out_samples
from scripts.demo.tasks import KINDS

PARTS = ("layers", "logits", "tasks")
# our layer -> the projections of the checkpoint whose outputs it computes side by side
PROJECTIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "o_proj": ("o_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "lm_head": ("lm_head",),
}
GATED = "gate_up_proj"  # its result is silu(gate) * up
MAX_COUNT = 200  # some kinds have not many more distinct held-out prompts
CONVERSATIONS = 4  # of each kind
RANDOM_PROMPTS = Workload("random tokens", 2, 96, 1)
CHUNK_TOKENS = 32
LAYER_ROWS = 96  # inputs of a layer that are tried


@dataclass(frozen=True)
class LogitsError:
    """Over all positions: RMS of the difference over RMS of the truth; how often the most probable token is the same; and the
    mean Kullback-Leibler divergence from the truth, in nats."""

    relative: float
    agreement: float
    divergence: float

    @classmethod
    def of(cls, truth: Tensor, logits: Tensor) -> LogitsError:
        """Both [num_positions, vocab_size]."""
        log_p, log_q = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
        return cls(
            relative=relative_error(truth, logits),
            agreement=float((truth.argmax(-1) == logits.argmax(-1)).double().mean()),
            divergence=float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        )


def relative_error(truth: Tensor, found: Tensor) -> float:
    """RMS of the difference over RMS of the truth."""
    return float((found.double() - truth).norm() / truth.norm())


def by_name(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules of that name, in layer order."""
    return [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]


class Truth:
    """The float64 forward of a folder's prompts: the logits, and what each linear layer was given."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        from transformers import AutoModelForCausalLM

        # torch's product over many experts at once has no float64
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        self.inputs: dict[nn.Module, Tensor] = {}  # [up to LAYER_ROWS, in_features]
        with torch.inference_mode(), self._keeping_inputs():
            self.logits = torch.cat([self.model(torch.tensor([prompt])).logits[0] for prompt in prompts])

    @contextmanager
    def _keeping_inputs(self) -> Iterator[None]:
        def keep(module: nn.Module, arguments: tuple[Any, ...]) -> None:  # Any: the hook's form
            rows = arguments[0].flatten(0, -2)
            known = self.inputs.get(module, rows[:0])
            self.inputs[module] = torch.cat([known, rows])[:LAYER_ROWS]

        hooks = [
            module.register_forward_pre_hook(keep) for module in self.model.modules() if isinstance(module, nn.Linear)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def outputs(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each of our layers of that name: inputs in bfloat16, and their exact products."""
        for layers in zip(*(by_name(self.model, projection) for projection in PROJECTIONS[name]), strict=True):
            x = self.inputs[layers[0]].bfloat16()
            with torch.inference_mode():
                expected = torch.cat([layer(x.double()) for layer in layers], dim=-1)
                yield x, multiply_gate(expected, SILU) if name == GATED else expected


def layer_errors(engine: ObservedEngine, truth: Truth) -> dict[str, list[float]]:
    """Kind of layer -> the relative error of each layer."""
    errors: dict[str, list[float]] = defaultdict(list)
    for name in PROJECTIONS:
        for layer, (x, expected) in zip(by_name(engine.worker.model, name), truth.outputs(name), strict=True):
            found = engine.worker.on_compute_thread(lambda layer=layer, x=x: layer(x))  # type: ignore[misc]
            errors[name].append(relative_error(expected, found))
    return errors


def logits_of(engine: ObservedEngine, prompts: Sequence[Sequence[int]]) -> Tensor:
    """float32 [tokens of all prompts, vocab_size]. Asking for a prompt's log-probabilities makes the engine compute them."""
    kept: list[Tensor] = []
    compute = engine.worker.model.compute_logits

    def compute_logits(hidden: Tensor) -> Tensor:
        kept.append(compute(hidden).clone())
        return kept[-1].clone()

    model: CausalLM = engine.worker.model
    vars(model)["compute_logits"] = compute_logits  # an instance's own attribute goes before its class's method
    for prompt in prompts:
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    del vars(model)["compute_logits"]
    return torch.cat(kept)


def conversations() -> list[list[int]]:
    """Token ids of held-out samples with their answers, as the embedded model was trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    found = []
    for kind in KINDS:
        for sample in held_out_samples(kind, CONVERSATIONS):
            messages = [*sample.messages, sample.answer]
            found.append(
                list(tokenizer.apply_chat_template(messages, tools=list(sample.tools) or None, return_dict=False))
            )
    return found


def engine_args_for(folder: Path, prompts: list[list[int]], more: Mapping[str, Any]) -> EngineArgs:
    """An engine that computes each of the prompts in pieces of CHUNK_TOKENS. `more`: further arguments."""
    arguments = {
        "model": str(folder),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": max(map(len, prompts)) + 1,
        "max_num_seqs": CHUNK_TOKENS,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_cache_memory_bytes": 1 << 28,
        **more,
    }
    return EngineArgs.from_kwargs(arguments)


def measure(title: str, folder: Path, prompts: list[list[int]], formats: Sequence[str], parts: Sequence[str]) -> None:
    truth = Truth(folder, prompts)
    layers: list[list[str]] = []
    logits: list[list[str]] = []
    for name in formats:
        with ObservedEngine(engine_args_for(folder, prompts, FORMATS[name].engine_args)) as engine:
            if "layers" in parts:
                errors = layer_errors(engine, truth)
                means = {kind: sum(each) / len(each) for kind, each in errors.items()}
                emit(benchmark="accuracy", part="layers", model=title, format=name, **means)
                layers.append([name, *(f"{means[kind]:.5f} (<= {max(errors[kind]):.5f})" for kind in PROJECTIONS)])
            if "logits" in parts:
                error = LogitsError.of(truth.logits, logits_of(engine, prompts))
                emit(benchmark="accuracy", part="logits", model=title, format=name, **vars(error))
                cells = [f"{error.relative:.5f}", f"{error.agreement:.2%}", f"{error.divergence:.2e}"]
                logits.append([name, *cells, str(len(truth.logits))])
    if layers:
        print_table([f"{title}: relative RMS error, mean (worst) over layers", *PROJECTIONS], layers)
    if logits:
        print_table([f"{title}: logits", "relative RMS error", "same top-1", "KL, nats", "positions"], logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=[*FORMATS], default=[*FORMATS], help="[all]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="[all]")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen3-0.6b", help="of random weights [%(default)s]")
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS_FOLDER, help="where it is kept [%(default)s]")
    parser.add_argument("--count", type=int, default=MAX_COUNT, help="prompts of each kind of task [%(default)s]")
    parser.add_argument(
        "--trained", type=Path, metavar="FOLDER", help="another trained model, whose logits are measured"
    )
    args = parser.parse_args()
    if not 1 <= args.count <= MAX_COUNT:
        parser.error(f"--count must be from 1 to {MAX_COUNT}")
    is_met = True
    if args.trained is not None:
        measure(args.trained.name, args.trained, conversations(), args.formats, ["logits"])
        return
    if {"layers", "logits"} & set(args.parts):
        measure("embedded model", EMBEDDED_MODEL, conversations(), args.formats, args.parts)
        folder = model_folder(args.shape, args.models)
        measure(f"{args.shape}, random weights", folder, RANDOM_PROMPTS.prompts(), args.formats, args.parts)
    if "tasks" in args.parts:
        is_met = print_task_accuracy(args.formats, args.count)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
