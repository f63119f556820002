"""Where each percent of a step goes: decode steps of several batch sizes, and one prefill step.

    python -m benchmarks.step_profile [--model qwen3-0.6b] [--models FOLDER] [--quantization int8] [--batch 1 8 32]
                                      [--prefill 1024] [--one-call]

The calls of the compute thread are timed from outside: layers as modules, the small steps as methods of `LayerOps`; a time is
without the timed calls inside it. What is left of the forward is "Python between calls", and what is left of the time from one
forward's start to the next is "waiting". Matrices and attention stand beside the least time that the roofline allows them.

Layers run one by one here, for within the one call that the engine makes of them nothing can be timed from outside; with
--one-call they run as the engine runs them, and are one line. Kernels are the same in both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.shared.models import add_model_arguments, model_folder
from benchmarks.shared.observed_engine import ObservedEngine
from benchmarks.shared.report import emit, print_table
from benchmarks.speed.roofline import KV_BYTES, WEIGHT_BITS, Machine, Needs, measure_machine
from inflight.config.architecture import GatedMlpSpec, ModelArchitecture
from inflight.config.engine_args import EngineArgs
from inflight.config.experts import MoeSpec
from inflight.config.parse_architecture import parse_architecture
from inflight.entrypoints.cli.workloads import Workload
from inflight.hub import read_config
from inflight.kernels.layer_ops import LayerOps
from inflight.layers.attention import Attention
from inflight.layers.linear import Linear
from inflight.layers.moe import FusedMoE
from inflight.layers.rotary import RotaryEmbedding
from inflight.layers.vocab import LogitsHead, VocabParallelEmbedding
from inflight.models.decoder import DecoderForCausalLM
from inflight.sampling_params import SamplingParams

FORWARD, SAMPLE, WAITING = "Python between calls", "sampling", "waiting"
PROMPT_TOKENS, WARM_UP_STEPS, NUM_STEPS, NUM_PREFILLS = 32, 8, 24, 3


@dataclass
class StepTimes:
    """Nanoseconds and calls of one step, by kind; `start` and `stop` are of its forward and its last call."""

    num_tokens: int
    num_rows: int
    start: int
    stop: int = 0
    nanoseconds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class StepClock:
    """Times nested calls of one thread, each without those inside it."""

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.steps: list[StepTimes] = []
        self._now = now
        self._inner = [0]  # for each open call, and for the ground: nanoseconds in timed calls inside it

    def timed(
        self, kind: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:  # Any: whatever it takes and returns
        """`function`, its time added to the current step. Outside of steps it is called as it is."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.steps:
                return function(*args, **kwargs)
            step, start = self.steps[-1], self._now()
            self._inner.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                stop = self._now()
                step.nanoseconds[kind] += stop - start - self._inner.pop()
                step.calls[kind] += 1
                step.stop = stop
                self._inner[-1] += stop - start

        return call

    def begin_step(self, num_tokens: int, num_rows: int) -> None:
        self.steps.append(StepTimes(num_tokens, num_rows, self._now()))


class TimedLayerOps:
    """Stands in for a `LayerOps`: every method of it, timed under its own name."""

    def __init__(self, ops: LayerOps, clock: StepClock) -> None:
        self._ops, self._clock = ops, clock

    def __getattr__(self, name: str) -> Any:  # Any: a method, or what the implementation has beside them
        found = getattr(self._ops, name)
        return self._clock.timed(name.replace("_", " "), found) if callable(found) else found


def observe(engine: ObservedEngine, clock: StepClock, *, one_call: bool) -> None:
    """From now on the clock times the engine's calls. `vars`: an instance's own attribute goes before its class's method."""
    model = engine.worker.model
    if isinstance(model, DecoderForCausalLM):
        vars(model)["taped"] = clock.timed("all layers", model.taped) if one_call else lambda compute, *_: compute()
    for path, module in engine.worker.model.named_modules():
        name = path.rpartition(".")[2]
        kind = None
        if isinstance(module, FusedMoE):
            vars(module)["choose"] = clock.timed("choice of experts", module.choose)
            vars(module)["compute"] = clock.timed("experts", module.compute)
        if isinstance(module, Linear):
            kind = name.removesuffix("_proj")
        elif isinstance(module, LogitsHead):
            kind = "head"
        elif isinstance(module, Attention):
            kind = "attention"
        elif isinstance(module, VocabParallelEmbedding | RotaryEmbedding):
            kind = "embedding, rotary tables"
        if kind is not None:
            vars(module)["forward"] = clock.timed(kind, module.forward)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, LayerOps):
                vars(module)[attribute] = TimedLayerOps(value, clock)
    runner = engine.worker.runner
    forward = clock.timed(FORWARD, runner.execute_model)

    def execute_model(model_input: Any, *args: Any) -> Any:  # Any: as the runner's
        clock.begin_step(model_input.plan.num_tokens, len(model_input.plan.slots))
        return forward(model_input, *args)

    vars(runner)["execute_model"] = execute_model
    vars(runner)["sample"] = clock.timed(SAMPLE, runner.sample)


@dataclass(frozen=True)
class Share:
    """One kind of a step's calls: mean seconds a step, and how many."""

    kind: str
    seconds: float
    calls: float


def shares_of(steps: list[StepTimes], is_steady: bool) -> list[Share]:
    """Longest first. Steady steps follow each other: the time up to the next one's start is theirs, and the last one's is not
    known; of others it ends with their last call."""
    counted = steps[:-1] if is_steady else steps
    stops = [step.start for step in steps[1:]] if is_steady else [step.stop for step in steps]
    kinds = {kind for step in counted for kind in step.nanoseconds}
    found = [
        Share(
            kind,
            sum(step.nanoseconds[kind] for step in counted) / 1e9 / len(counted),
            sum(step.calls[kind] for step in counted) / len(counted),
        )
        for kind in kinds
    ]
    wall = sum(stop - step.start for step, stop in zip(counted, stops, strict=True)) / 1e9 / len(counted)
    found.append(Share(WAITING, wall - sum(share.seconds for share in found), 0))
    return sorted(found, key=lambda share: -share.seconds)


def least_seconds(
    architecture: ModelArchitecture, machine: Machine, weight_format: str, *, tokens: int, rows: int, prompt: int
) -> dict[str, float]:
    """By kind, for a step of decodes with `prompt` tokens of context each, or (one row) of a prompt's `tokens`."""
    mlp = architecture.layers[0].mlp
    assert isinstance(mlp, GatedMlpSpec | MoeSpec), mlp
    hidden, inner, layers = architecture.hidden_size, mlp.size, architecture.num_layers
    attention = architecture.attentions[0]
    query, key_value = (count * attention.head_dim for count in (attention.num_heads, attention.num_kv_heads))
    weights = {
        "qkv": (layers * hidden * (query + 2 * key_value), tokens),
        "o": (layers * query * hidden, tokens),
        "head": (hidden * architecture.vocab_size, rows),
    }
    peak, bits = machine.peak(weight_format), WEIGHT_BITS[weight_format]
    if isinstance(mlp, GatedMlpSpec):
        weights |= {"gate_up": (layers * 2 * hidden * inner, tokens), "down": (layers * inner * hidden, tokens)}
    found = {
        kind: max(count * bits / 8 / machine.bandwidth, 2 * count * multiplied / peak)
        for kind, (count, multiplied) in weights.items()
    }
    if isinstance(mlp, MoeSpec):
        read = layers * hidden * mlp.num_features_read(tokens) * bits / 8
        found["experts"] = max(read / machine.bandwidth, 2 * layers * hidden * mlp.num_features * tokens / peak)
    pairs = rows * prompt if tokens == rows else tokens**2 / 2
    cached = 2 * layers * key_value * KV_BYTES * rows * prompt
    operations = Needs.of(architecture).operations_per_pair * pairs
    found["attention"] = max(cached / machine.bandwidth, operations / machine.peak("bf16"))
    return found


def profile_decode(engine: ObservedEngine, clock: StepClock, batch: int) -> list[StepTimes]:
    """Steps in a row in which every request decodes."""
    clock.steps.clear()
    num_tokens = WARM_UP_STEPS + NUM_STEPS + 4
    prompts = Workload("", batch, PROMPT_TOKENS, num_tokens).prompts()
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    steps = [step for step in clock.steps if step.num_tokens == step.num_rows == batch]
    return steps[WARM_UP_STEPS : WARM_UP_STEPS + NUM_STEPS]


def profile_prefill(engine: ObservedEngine, clock: StepClock, num_tokens: int) -> list[StepTimes]:
    """One step each, of prompts that come alone; the first is a warm-up."""
    clock.steps.clear()
    for prompt in Workload("", 1 + NUM_PREFILLS, num_tokens, 1).prompts():
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return [step for step in clock.steps if step.num_tokens == num_tokens][1:]


def print_profile(title: str, shares: list[Share], least: dict[str, float]) -> None:
    wall = sum(share.seconds for share in shares)
    rows = []
    for share in shares:
        limit = least.get(share.kind)
        of_limit = "" if limit is None else f"{limit / share.seconds:.0%}"
        cells = [f"{share.seconds * 1e3:.3f}", f"{share.seconds / wall:.1%}", f"{share.calls:.0f}"]
        rows.append([share.kind, *cells, "" if limit is None else f"{limit * 1e3:.3f}", of_limit])
        emit(
            benchmark="step_profile", step=title, kind=share.kind, milliseconds=round(share.seconds * 1e3, 4),
            share=round(share.seconds / wall, 4), calls=round(share.calls),
        )  # fmt: skip
    total = sum(least.values())
    rows.append(["all", f"{wall * 1e3:.3f}", "100.0%", "", f"{total * 1e3:.3f}", f"{total / wall:.0%}"])
    print_table([title, "ms", "share", "calls", "least ms", "of the roofline"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--quantization", choices=[name for name in WEIGHT_BITS if name != "bf16"], help="[bf16]")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="of decode steps [1 8 32]")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024], help="tokens of prefill steps [1024]")
    parser.add_argument("--one-call", action="store_true", help="layers as the engine runs them")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON: further arguments of the engine")
    args = parser.parse_args()
    folder = model_folder(args.model, args.models)
    architecture, machine = parse_architecture(read_config(folder)), measure_machine()
    quantization = {} if args.quantization is None else {"quantization": args.quantization}
    engine_args = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
        "max_num_seqs": max([64, *args.batch]),
        "max_num_batched_tokens": max([2048, *args.prefill]),
        "max_step_time": "none",  # a prompt of --prefill tokens is one step, however long it takes
        "kv_cache_memory_bytes": 2 << 30,
        **quantization,
        **args.engine_args,
    }
    limits = partial(least_seconds, architecture, machine, args.quantization or "bf16")
    clock = StepClock()
    with ObservedEngine(EngineArgs.from_kwargs(engine_args)) as engine:
        observe(engine, clock, one_call=args.one_call)
        for batch in args.batch:
            shares = shares_of(profile_decode(engine, clock, batch), is_steady=True)
            context = PROMPT_TOKENS + WARM_UP_STEPS + NUM_STEPS // 2
            print_profile(f"decode, batch {batch}", shares, limits(tokens=batch, rows=batch, prompt=context))
        for num_tokens in args.prefill:
            shares = shares_of(profile_prefill(engine, clock, num_tokens), is_steady=False)
            print_profile(f"prefill, {num_tokens} tokens", shares, limits(tokens=num_tokens, rows=1, prompt=0))


if __name__ == "__main__":
    main()
