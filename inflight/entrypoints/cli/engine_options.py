"""`EngineOptions`: the options of every command that runs a model, named after `EngineArgs`."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from inflight.config.engine_args import EngineArgs
from inflight.entrypoints.cli.command import set_log_level

if TYPE_CHECKING:
    from inflight.engine.llm_engine import LLMEngine  # loads torch

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
MODEL, ENGINE, PARALLEL = "Model", "Engine", "Parallel"


def parse_bytes(text: str) -> int:
    """ "1500000", "512M", "2GiB", "1.5g": units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of bytes like 1500000, 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_json_object(text: str) -> dict[str, Any]:  # Any: JSON
    """A JSON object, or the name of a file that holds one."""
    source = str(text).strip()
    try:
        found = json.loads(source if source.startswith("{") else Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{source!r} is neither a JSON object nor a file that holds one: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{source!r} holds no JSON object, but a {type(found).__name__}")
    return found


def _model(help: str, *names: str, **more: Any) -> Any:  # Any: typer's own type of an option
    return typer.Option(*names, help=help, rich_help_panel=MODEL, **more)


def _engine(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=ENGINE, **more)


def _parallel(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PARALLEL, **more)


TensorParallelSize = Annotated[
    int, _parallel("Ranks that share each layer.", "--tensor-parallel-size", "-tp", metavar="N")
]
PipelineParallelSize = Annotated[
    int, _parallel("Stages that share the layers.", "--pipeline-parallel-size", "-pp", metavar="N")
]
NumNodes = Annotated[int, _parallel("Machines to split the ranks over; the others run `inflight worker`.", metavar="N")]
NodeRank = Annotated[int, _parallel("Which of the nodes this is; the engine runs on node 0.", metavar="N")]
MasterAddress = Annotated[str, _parallel("Address of node 0.", "--master-address", "--master-addr", metavar="HOST")]
MasterPort = Annotated[int, _parallel("Port of node 0.", metavar="PORT")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Fields have the names and the defaults of `EngineArgs`; None leaves the choice to the engine."""

    model: Annotated[
        str | None,
        _model(
            "Folder in the Hugging Face layout, GGUF file, or hub id. Without it: the small embedded model.",
            "--model",
            "-m",
            metavar="TEXT",
        ),
    ] = None
    tokenizer: Annotated[str | None, _model("Take the tokenizer from this folder or hub id.", metavar="TEXT")] = None
    revision: Annotated[str | None, _model("Branch, tag or commit of a hub id.", metavar="TEXT")] = None
    chat_template: Annotated[
        str | None, _model("Jinja template, or a file that holds one, instead of the model's own.", metavar="TEXT")
    ] = None
    generation_config: Annotated[
        str, _model("Take sampling defaults from the model's generation_config.json.", metavar="auto|none")
    ] = "auto"
    dtype: Annotated[str, _model("Data type of weights and activations.", metavar="auto|bfloat16|float16|float32")] = (
        "auto"
    )
    load_format: Annotated[
        str, _model("dummy draws random weights from the config alone.", metavar="auto|safetensors|gguf|dummy")
    ] = "auto"
    skip_tokenizer_init: Annotated[
        bool, _model("Serve token ids only; no tokenizer is read.", "--skip-tokenizer-init")
    ] = False
    max_model_len: Annotated[
        int | None,
        _engine("Longest sequence, prompt and output together. Default: the model's own limit.", metavar="N"),
    ] = None
    max_num_seqs: Annotated[int | None, _engine("Most sequences in one step.", metavar="N")] = None
    max_num_batched_tokens: Annotated[int | None, _engine("Most tokens in one step.", metavar="N")] = None
    block_size: Annotated[int | None, _engine("Tokens per KV block.", metavar="N")] = None
    kv_cache_dtype: Annotated[
        str,
        _engine(
            "auto is the dtype of the model; int8 (on a CPU) and fp8 (on a GPU) halve the KV cache.",
            metavar="auto|int8|fp8",
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int | None,
        _engine(
            "Size of the KV cache: 2G, 512M, ... Default: what --gpu-memory-utilization leaves; on a CPU at most "
            "room for --max-num-seqs sequences of 1,024 tokens.",
            parser=parse_bytes,
            metavar="BYTES",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        _engine(
            "Share of the device's memory to use; on a CPU of the free RAM. If given, the KV cache takes all that it leaves. "
            "Default: 0.9, on a CPU 0.5.",
            metavar="X",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _engine(
            "Reuse the KV blocks of equal prompt beginnings (on by default).",
            "--enable-prefix-caching/--no-enable-prefix-caching",
            show_default=False,
        ),
    ] = True
    enable_chunked_prefill: Annotated[
        bool,
        _engine(
            "Let a long prompt take several steps (on by default).",
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            show_default=False,
        ),
    ] = True
    scheduling_policy: Annotated[
        str, _engine("Order of requests: by arrival, or by priority.", metavar="fcfs|priority")
    ] = "fcfs"
    device: Annotated[str, _engine("What to run on; auto takes GPUs if they can be used.", metavar="auto|cpu|cuda")] = (
        "auto"
    )
    enforce_eager: Annotated[bool, _engine("GPU: launch kernel by kernel, without CUDA graphs.", "--enforce-eager")] = (
        False
    )
    attention_backend: Annotated[str, _engine("GPU: which attention kernels to use.", metavar="auto|triton")] = "auto"
    cuda_graph_max_tokens: Annotated[
        int | None, _engine("GPU: capture steps with prompts up to N tokens. Default: 512.", metavar="N")
    ] = None
    num_threads: Annotated[
        int | None,
        _engine("Compute threads of a rank on a CPU. Default: the cores, split among the ranks.", metavar="N"),
    ] = None
    quantization: Annotated[
        str | None,
        _engine(
            "Weights in fewer bits: quantized as they are read. fp8 is for GPUs.",
            metavar="int8|int4|fp8",
        ),
    ] = None
    head_quantization: Annotated[
        str,
        _engine(
            "--quantization for the head (lm_head). auto: int8 if --quantization is set, else none.",
            metavar="auto|none|int8|int4|fp8",
        ),
    ] = "auto"
    quantization_group_size: Annotated[
        int, _engine("Input features that share a scale in int4.", metavar="32|64|128")
    ] = 64
    batch_invariant: Annotated[
        bool, _engine("Refuse to start where results could depend, in their last bits, on the batch.")
    ] = False
    cpu_threads_bind: Annotated[
        str | None,
        _engine(
            "Cores of the compute threads: 0-3,8. Default: INFLIGHT_CPU_THREADS_BIND, or auto.",
            metavar="auto|off|CORES",
        ),
    ] = None
    tensor_parallel_size: TensorParallelSize = 1
    pipeline_parallel_size: PipelineParallelSize = 1
    pipeline_layer_partition: Annotated[
        str | None, _parallel("Layers of each stage, as 8,8,6,6. Default: by their cost.", metavar="N,N,...")
    ] = None
    pipeline_stagger: Annotated[
        int | None,
        _parallel("A request draws a token in every N-th step. Default: measured at the start.", metavar="N"),
    ] = None
    pipeline_depth: Annotated[
        int | None, _parallel("Steps in flight over all stages. Default: pipeline_stagger + 1.", metavar="N")
    ] = None
    async_scheduling: Annotated[
        bool | None,
        _parallel(
            "Plan a step while the previous one runs (on by default).", "--async-scheduling/--no-async-scheduling"
        ),
    ] = None
    speculative_config: Annotated[
        dict[str, Any] | None,
        _engine(
            'Verify proposed tokens, several in a step: \'{"method": "ngram", "num_speculative_tokens": 4}\'.',
            parser=parse_json_object,
            metavar="JSON",
        ),
    ] = None
    structured_outputs_backend: Annotated[
        str, _engine("Library that enforces structured outputs.", metavar="llguidance|xgrammar")
    ] = "llguidance"
    reasoning_end: Annotated[
        str, _engine("Text that ends a model's thinking, as </think>: grammars start after it.", metavar="TEXT")
    ] = ""
    distributed_executor_backend: Annotated[
        str | None,
        _parallel("Ranks as threads (uni) or processes (mp). Default: uni for one rank, else mp.", metavar="uni|mp"),
    ] = None
    nnodes: NumNodes = 1
    node_rank: NodeRank = 0
    master_addr: MasterAddress = "127.0.0.1"
    master_port: MasterPort = 29501
    verbose: Annotated[
        bool, _engine("Log what happens, and show tracebacks. Also: INFLIGHT_LOG_LEVEL=DEBUG.", "--verbose", "-v")
    ] = False

    def to_args(self, **changes: Any) -> EngineArgs:  # Any: EngineArgs checks every value
        """
        Raises:
            ConfigError: a value is out of bounds.
        """
        return EngineArgs(**{**self.to_values(), **changes})

    def to_values(self) -> dict[str, Any]:
        """By the names of `EngineArgs`, unchecked."""
        names = {field.name for field in fields(EngineArgs)}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in names}


def start_engine(context: typer.Context, options: EngineOptions, **changes: Any) -> LLMEngine:
    """The engine for these options; `changes` are `EngineArgs` on top. The caller closes it.

    The context's object, where it has one, is called with the `EngineArgs` instead of `LLMEngine.from_args`.
    """
    if options.verbose:
        set_log_level("DEBUG")
    args = options.to_args(**changes)
    if context.obj is not None:
        return cast("Callable[[EngineArgs], LLMEngine]", context.obj)(args)
    from inflight.engine.llm_engine import LLMEngine  # loads torch: not for `--help`, not for a mistyped option

    engine = LLMEngine.from_args(args)
    gc.collect()
    gc.freeze()  # what has been made so far stays: a collection that looks through it all takes 100 ms, every 200 steps
    return engine
