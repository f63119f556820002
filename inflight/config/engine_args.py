"""`EngineArgs`: the engine's arguments as the user gave them, and their bounds; `resolve.py` goes on from here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from inflight.config.weight_format import STORED_QUANTIZATIONS
from inflight.errors import ConfigError

_CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "load_format": ("auto", "safetensors", "gguf", "dummy"),
    "quantization": (None, "int8", "int4", "fp8", *STORED_QUANTIZATIONS),
    "head_quantization": ("auto", "none", "int8", "int4", "fp8"),
    "quantization_group_size": (32, 64, 128),
    "scheduling_policy": ("fcfs", "priority"),
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "triton"),
    "generation_config": ("auto", "none"),
    "structured_outputs_backend": ("llguidance", "xgrammar"),
}
# Values that other engines want as `quantization` for a quantized checkpoint.
_SWITCHES = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "skip_tokenizer_init",
    "batch_invariant",
    "enforce_eager",
)
_EXECUTORS = ("uni", "mp", "external_launcher")
_QUALIFIED_NAME = re.compile(r"\w+(\.\w+)*:\w+")
_BOUNDS = {
    "max_model_len": (1, 2**24),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 2**24),
    "block_size": (1, 4096),
    "kv_cache_memory_bytes": (1, 2**60),
    "tensor_parallel_size": (1, 65536),
    "pipeline_parallel_size": (1, 65536),
    "pipeline_stagger": (1, 65536),
    "pipeline_depth": (1, 65537),
    "nnodes": (1, 65536),
    "node_rank": (0, 65535),
    "master_port": (1, 65535),
    "cuda_graph_max_tokens": (0, 2**24),
    "num_threads": (1, 4096),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of `LLM`. None and "auto" leave the choice to `resolve.py`.

    Attributes:
        model: a folder in the Hugging Face layout, a GGUF file, a hub id, or None for the embedded model.
        tokenizer: a folder or hub id to take the tokenizer from; None is the model's own.
        revision: branch, tag or commit of a hub id.
        dtype: of weights, activations and, unless `kv_cache_dtype` says otherwise, the KV cache.
        quantization: bring weights that are floats to fewer bits as they are read: "int8" (a scale a row), "int4" (a scale and
            an offset a group), or on a GPU "fp8" (a scale a row). With "fp8", and on a CPU always, activations are quantized
            too, in each step, a scale a row. None leaves them. A checkpoint that is quantized already needs no
            option, and is used as it is; "awq", "gptq", "compressed-tensors" or "gguf" is accepted if it is stored in this way.
        head_quantization: of the head (lm_head); "auto" is "int8" where quantization is set.
        quantization_group_size: input features that share a scale and an offset in 4 bits.
        batch_invariant: refuse to start where tokens and log-probabilities could depend, in their last bits, on what else
            is computed with them. Where the C++ kernels serve they do not.
        max_model_len: longest sequence, prompt and output together; None is the model's own limit.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: token budget of one step.
        block_size: tokens per KV block.
        kv_cache_dtype: "auto" keeps keys and values in the model's dtype. Half the memory, and half the bytes that each step
            reads: on a CPU "int8" with a scale per head and token (C++ kernels only), on a GPU "fp8" without a scale.
        enable_prefix_caching: reuse the KV blocks of equal prompt beginnings.
        enable_chunked_prefill: let a long prompt take several steps, beside the others.
        kv_cache_memory_bytes: size of the KV cache of a rank. None: on a GPU all that `gpu_memory_utilization` leaves; on a CPU
            room for max_num_seqs sequences of 1,024 tokens, at least for one of max_model_len tokens, and at most what
            `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of the device's memory (on a CPU: of the RAM that is free at the start) that the engine
            may use. None is 0.9, on a CPU 0.5. If it is given, the KV cache takes all that this share leaves, on a CPU too.
        seed: requests without a seed, and dummy weights, get theirs from it. None is 0 for dummy weights and for `LLM`; with
            None a server and `AsyncLLM` draw a new seed at each start, so that their texts differ from start to start.
        load_format: "auto" reads the weights that are there ("safetensors" and "gguf" say which these have to be), "dummy"
            draws them from the config alone.
        skip_tokenizer_init: serve token ids only; no tokenizer is needed.
        chat_template: a Jinja template, or a file that holds one, instead of the tokenizer's.
        generation_config: "auto" takes sampling defaults from generation_config.json, "none" does not.
        scheduling_policy: "fcfs" or "priority".
        async_scheduling: plan a step while the one before it runs; None is True. A pipeline cannot do without.
        speculative_config: verify several proposed tokens in one step: {"method": "ngram", "num_speculative_tokens": 4,
            "prompt_lookup_min": 2, "prompt_lookup_max": 4}; the last three may be left out.
        structured_outputs_backend: the library behind SamplingParams.structured_outputs: "llguidance" or "xgrammar".
        reasoning_end: the text that ends the thinking of a reasoning model, as "</think>": structured outputs start after it.
        tensor_parallel_size: ranks that share each layer.
        pipeline_parallel_size: stages that share the layers; there are tensor_parallel_size ranks in each.
        pipeline_layer_partition: the number of layers of each stage, as "8,8,6,6"; None divides them by their cost.
        pipeline_stagger: a request draws a token at most in every pipeline_stagger-th step. None: the start measures which
            value keeps all stages busy, from pipeline_parallel_size to three times that; with external_launcher None is
            pipeline_parallel_size.
        pipeline_depth: steps in flight over all stages, more than pipeline_stagger. None is pipeline_stagger + 1.
        distributed_executor_backend: "uni" runs the ranks as threads of this process, "mp" as a process each; None is "uni"
            for one rank and "mp" for more. "external_launcher" is for a script that torchrun starts once per rank: each is an
            engine with one rank, and all make the same calls and return the same outputs. "package.module:ClassName" is an
            `Executor` of your own.
        nnodes: machines to split the ranks over; the others run `inflight worker`.
        node_rank: which of them this is. The engine runs on node 0.
        master_addr: the address of node 0 that the other nodes connect to.
        master_port: its port.
        device: "cuda" for NVIDIA GPUs, a rank on each, "cpu", or "auto": GPUs if they can be used.
        enforce_eager: launch kernel by kernel, without CUDA graphs: slower, but nothing is captured at the start.
        attention_backend: on a GPU "triton", which is also what "auto" means there.
        cuda_graph_max_tokens: steps that hold prompts are captured as CUDA graphs up to so many tokens; None is 512, 0 captures
            steps that only decode.
        num_threads: compute threads of a rank on a CPU; None splits the cores among the ranks of a node.
        cpu_threads_bind: the cores of these threads, one each: "0-3,8", with "|" between the lists of several ranks of a node;
            "off" lets the kernel place them, "auto" binds them if they fill the cores. None is INFLIGHT_CPU_THREADS_BIND.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    seed: int | None = None
    load_format: str = "auto"
    quantization: str | None = None
    head_quantization: str = "auto"
    quantization_group_size: int = 64
    batch_invariant: bool = False
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    generation_config: str = "auto"
    scheduling_policy: str = "fcfs"
    async_scheduling: bool | None = None
    speculative_config: Mapping[str, Any] | None = None  # Any: values are checked by `resolve`
    structured_outputs_backend: str = "llguidance"
    reasoning_end: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pipeline_stagger: int | None = None
    pipeline_depth: int | None = None
    pipeline_layer_partition: str | None = None
    distributed_executor_backend: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    device: str = "auto"
    enforce_eager: bool = False
    attention_backend: str = "auto"
    cuda_graph_max_tokens: int | None = None
    num_threads: int | None = None
    cpu_threads_bind: str | None = None

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> EngineArgs:  # Any: values are checked below
        """As the constructor, but an unknown name is a `ConfigError` that proposes the nearest known one."""
        known = [entry.name for entry in fields(cls)]
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known arguments: {', '.join(known)}"
                raise ConfigError(f"unknown argument {name!r}{hint}")
        return cls(**kwargs)

    def __post_init__(self) -> None:
        # A combination is judged only where its parts are what they should be.
        if problems := list(self._wrong_values()) or list(self._conflicts()):
            raise ConfigError("; ".join(problems))

    def _wrong_values(self) -> Iterator[str]:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices or type(value) not in {type(choice) for choice in choices}:
                known = ", ".join(repr(choice) for choice in choices if choice is not None)
                yield f"{name}={value!r} is not one of {known}; give one of them, or leave it out"
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                yield f"{name}={value!r} is not an integer in [{low}, {high}]; give one, or leave it out"
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                yield f"{name}={getattr(self, name)!r} is not True or False; give one of them, or leave it out"
        if not isinstance(getattr(self, "async_scheduling"), bool | None):  # noqa: B009 for mypy it can be nothing else
            yield f"async_scheduling={self.async_scheduling!r} is not True, False or None; give one of them"
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            yield f"gpu_memory_utilization={share!r} is not a number in (0, 1]; give one such as 0.9, or leave it out"
        for name, example in (("pipeline_layer_partition", "8,8,6,6"), ("cpu_threads_bind", "0-3,8")):
            if not isinstance(getattr(self, name), str | None):
                yield f"{name}={getattr(self, name)!r} is not a text like {example!r}; give one, or leave it out"
        if not isinstance(getattr(self, "reasoning_end"), str):  # noqa: B009 as above
            yield f"reasoning_end={self.reasoning_end!r} is not a text like '</think>'; give one, or leave it out"
        backend = self.distributed_executor_backend
        is_class = isinstance(backend, str) and _QUALIFIED_NAME.fullmatch(backend) is not None
        if backend is not None and backend not in _EXECUTORS and not is_class:
            yield (
                f"distributed_executor_backend={backend!r} is not one of {', '.join(_EXECUTORS)}, nor a class named as "
                "'package.module:ClassName'; give one of them, or leave it out"
            )

    def _conflicts(self) -> Iterator[str]:
        if self.node_rank != 0:
            yield (
                f"node_rank={self.node_rank}: the engine runs on node 0; here run `inflight worker` with the same options"
            )
        if self.enforce_eager and self.cuda_graph_max_tokens:
            yield (
                f"enforce_eager=True with cuda_graph_max_tokens={self.cuda_graph_max_tokens}: the first captures "
                "nothing; leave one of them out"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "external_launcher":
            yield (
                f"nnodes={self.nnodes} with distributed_executor_backend='external_launcher': the launcher knows "
                "the nodes; give --nnodes to torchrun and leave it out here"
            )
        if self.nnodes > 1 and self.distributed_executor_backend == "uni":
            yield (f"nnodes={self.nnodes} with distributed_executor_backend='uni': threads run on one node; use 'mp'")
