"""The least time that a workload can take on this machine: what memory and dot products allow, measured, and a model's needs.

    python -m benchmarks.roofline [--model qwen3-0.6b] [--models FOLDER] [--workloads all]

`roofline.c` is compiled with the system's compiler for this processor and run with one thread and with one per core. A step
takes at least the larger of its bytes over the read bandwidth and its operations over the peak of its format. KV in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.shared.gguf_shapes import EMBEDDING, EXPERTS, HEAD
from benchmarks.shared.models import add_model_arguments, is_gguf, model_folder
from benchmarks.shared.report import emit, print_table
from inflight.config.architecture import ModelArchitecture
from inflight.config.experts import MANY_TOKENS
from inflight.config.gguf_config import read_model_config
from inflight.config.parse_architecture import parse_architecture
from inflight.entrypoints.cli.workloads import Workload, select

SOURCE = Path(__file__).with_name("roofline.c")
# bits a weight takes, scales included where they count; int4: a scale and an offset of 16 bits for each group of 64
WEIGHT_BITS = {"bf16": 16.0, "int8": 8.0, "int4": 4.5}
STORED = "gguf"  # the format of a file that is quantized already
KV_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """By `num_threads` threads together: bytes read, and operations (a multiplication and an addition are two), per second.

    `bf16` and `int8` are None on a processor without such dot products.
    """

    num_threads: int
    read: float
    read_huge_pages: float
    fp32: float
    bf16: float | None
    int8: float | None

    @property
    def bandwidth(self) -> float:
        return max(self.read, self.read_huge_pages)

    def peak(self, weight_format: str) -> float:
        """The fastest arithmetic that may serve the format; weights of 4 bits are multiplied as 8."""
        known = [self.fp32, self.bf16, self.int8 if weight_format != "bf16" else None]
        return max(rate for rate in known if rate is not None)

    def best(self, other: Machine) -> Machine:
        """Of two measurements of one machine: what disturbed one of them is no limit."""
        assert self.num_threads == other.num_threads
        return Machine(
            num_threads=self.num_threads,
            read=max(self.read, other.read),
            read_huge_pages=max(self.read_huge_pages, other.read_huge_pages),
            fp32=max(self.fp32, other.fp32),
            bf16=None if self.bf16 is None or other.bf16 is None else max(self.bf16, other.bf16),
            int8=None if self.int8 is None or other.int8 is None else max(self.int8, other.int8),
        )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a model's steps need. Weights: of all layers, by which a token is multiplied, and of the head, which only rows that
    sample go through. `weights_read`: how many weights of the layers a step of so many tokens reads, of a mixture of experts
    only those of the experts that its tokens are expected to choose. `stored_bytes_read`: the same in bytes, with the head, as
    a GGUF file has them; None for other models."""

    layer_weights: int
    weights_read: Callable[[int], float]
    head_weights: int
    kv_bytes_per_token: int
    operations_per_pair: int  # of attention, for a query and a key that it sees, over all layers
    stored_bytes_read: Callable[[int], float] | None = None

    @classmethod
    def of(cls, architecture: ModelArchitecture) -> Needs:
        """Norms, biases and the row of the embedding that a token reads do not count; nor do sliding windows."""
        hidden, layers = architecture.hidden_size, architecture.layers
        query = sum(each.num_heads * each.head_dim for each in architecture.attentions)
        key_value = sum(each.num_kv_heads * each.head_dim for each in architecture.attentions)
        attention = 2 * query + 2 * key_value
        return cls(
            layer_weights=hidden * (attention + sum(layer.mlp.num_features for layer in layers)),
            weights_read=lru_cache(
                lambda tokens: hidden * (attention + sum(layer.mlp.num_features_read(tokens) for layer in layers))
            ),
            head_weights=hidden * architecture.vocab_size,
            kv_bytes_per_token=2 * key_value * KV_BYTES,
            operations_per_pair=4 * query,
        )

    def step_seconds(
        self, machine: Machine, weight_format: str, *, tokens: int, rows: int, cached: float, pairs: float
    ) -> float:
        """`rows` of the `tokens` sample; `cached` tokens of KV are read; `pairs` of a query and a key are multiplied."""
        if weight_format == STORED:
            assert self.stored_bytes_read is not None
            num_bytes = self.stored_bytes_read(tokens)
        else:
            num_bytes = (self.weights_read(tokens) + self.head_weights) * WEIGHT_BITS[weight_format] / 8
        num_bytes += cached * self.kv_bytes_per_token
        operations = 2 * (self.layer_weights * tokens + self.head_weights * rows) + self.operations_per_pair * pairs
        return max(num_bytes / machine.bandwidth, operations / machine.peak(weight_format))

    def workload_seconds(self, machine: Machine, weight_format: str, workload: Workload) -> float:
        """All prompts in one step, which draws the first token of each; then a step for every further token."""
        batch, prompt = workload.batch_size, workload.input_len
        seconds = self.step_seconds(
            machine, weight_format, tokens=batch * prompt, rows=batch, cached=0, pairs=batch * prompt**2 / 2
        )
        for length in range(prompt + 1, prompt + workload.output_len):
            context = batch * length
            seconds += self.step_seconds(
                machine, weight_format, tokens=batch, rows=batch, cached=context, pairs=context
            )
        return seconds


def tokens_per_second(needs: Needs, machine: Machine, weight_format: str, workload: Workload) -> float:
    return workload.num_counted_tokens / needs.workload_seconds(machine, weight_format, workload)


def read_needs(model: Path) -> Needs:
    """Of a folder or a GGUF file."""
    architecture = parse_architecture(read_model_config(model))
    needs = Needs.of(architecture)
    return replace(needs, stored_bytes_read=stored_bytes_read(model, architecture)) if is_gguf(model) else needs


def stored_bytes_read(file: Path, architecture: ModelArchitecture) -> Callable[[int], float]:
    """Number of tokens of a step -> the bytes of a GGUF file's weights that it reads: the head, the layers without experts, and
    the experts that the tokens are expected to choose. Norms and biases are not told apart from other weights."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    experts = sum(size for name, size in sizes.items() if name.endswith(EXPERTS))
    others = sum(sizes.values()) - experts - (sizes[EMBEDDING] if HEAD in sizes else 0)

    def num_features(num_tokens: int) -> float:
        return sum(layer.mlp.num_features_read(num_tokens) for layer in architecture.layers)

    return lru_cache(lambda num_tokens: others + experts * num_features(num_tokens) / num_features(MANY_TOKENS))


def measure_machine(num_threads: int | None = None) -> Machine:
    """A few seconds; None is one thread per core.

    Raises:
        SystemExit: there is no compiler, or it fails.
    """
    if num_threads is None:
        num_threads = len(os.sched_getaffinity(0))
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("the roofline is measured by a C program, and there is no compiler: install gcc, or set CC")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        flags = ["-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
        try:
            subprocess.run([compiler, *flags], check=True)
            found = subprocess.run([str(program), str(num_threads)], check=True, stdout=subprocess.PIPE, text=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"the roofline's program failed: {error}") from error
    rates: dict[str, Any] = {  # Any: float, or None where `Machine` allows it
        name: None if rate is None else rate * 1e9 for name, rate in json.loads(found.stdout).items()
    }
    return Machine(num_threads=num_threads, **rates)


def print_machine(machines: list[Machine]) -> None:
    rows = []
    for name, unit in (
        ("read", "GB/s"), ("read_huge_pages", "GB/s"), ("fp32", "GFLOP/s"), ("bf16", "GFLOP/s"), ("int8", "GOP/s")
    ):  # fmt: skip
        rates = [getattr(machine, name) for machine in machines]
        cells = ["no such instruction" if rate is None else f"{rate / 1e9:.1f}" for rate in rates]
        rows.append([f"{name.replace('_', ' ')}, {unit}", *cells])
    print_table(["the machine", *(f"{machine.num_threads} threads" for machine in machines)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser, "qwen3-0.6b")
    parser.add_argument("--workloads", default="all", help="all, long, or names separated by commas [%(default)s]")
    args = parser.parse_args()
    try:
        workloads = select(args.workloads)
    except ValueError as error:
        parser.error(str(error))
    needs = read_needs(model_folder(args.model, args.models))
    counts = sorted({1, len(os.sched_getaffinity(0))})
    machines = [measure_machine(count) for count in counts]
    for machine in machines:
        emit(benchmark="roofline", **vars(machine))
    print_machine(machines)
    rows = []
    for weight_format in WEIGHT_BITS if needs.stored_bytes_read is None else (STORED,):
        limits = [tokens_per_second(needs, machines[-1], weight_format, workload) for workload in workloads]
        emit(
            benchmark="roofline", weight_format=weight_format,
            **{workload.name: round(limit, 1) for workload, limit in zip(workloads, limits, strict=True)},
        )  # fmt: skip
        rows.append([weight_format, *(f"{limit:.1f}" for limit in limits)])
    print_table(["tokens/s at most", *(workload.name for workload in workloads)], rows)


if __name__ == "__main__":
    main()
