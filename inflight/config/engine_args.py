"""`EngineArgs`: the engine's arguments as the user gave them, and their bounds. `resolve.py` makes `EngineConfig` of them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.config.expert_args import ExpertArgs
from inflight.config.image_args import ImageArgs
from inflight.config.milliseconds import parse_milliseconds, time_problem
from inflight.config.replica_conflicts import MAX_LOCAL_REPLICAS, replica_conflicts
from inflight.config.text_values import read_texts
from inflight.config.weight_format import STORED_QUANTIZATIONS
from inflight.errors import ConfigError, UnknownArgumentError
from inflight.model_name import read_model_name
from inflight.setting import check_values, names_unknown, setting, unknown_name
from inflight.setting_text import parse_bytes, parse_count

_EXECUTORS = ("uni", "mp", "ray", "external_launcher")
_NO_NODES = {  # executor -> why it does not take `nnodes`
    "uni": "threads run on one node; use 'mp'",
    "ray": "Ray chooses the machines; leave nnodes out",
    "external_launcher": "the launcher knows the nodes; give --nnodes to torchrun and leave it out here",
}
LLGUIDANCE = ("llguidance", "guidance", "auto")  # what vLLM and SGLang call llguidance, or the choice of a library
_QUALIFIED_NAME = re.compile(r"\w+(\.\w+)*:\w+")

_model = partial(setting, group="Model")
_engine = partial(setting, group="Engine")
_parallel = partial(setting, group="Parallel")
_faults = partial(setting, group="Faults")
_COUNT = {"bounds": (1, 65536)}
_LENGTH = {"bounds": (1, 2**24), "metavar": "TOKENS", "parse": parse_count}
_PORT = {"bounds": (1, 65535), "metavar": "PORT"}


@names_unknown(UnknownArgumentError)
@dataclass(frozen=True, kw_only=True)
class EngineArgs(ImageArgs, ExpertArgs):
    """Arguments of `LLM`, and options of every command that runs a model. None and "auto" leave the choice to `resolve.py`.
    Sizes may be texts, as on the command line: "200M" bytes, "32k" tokens.

    Raises:
        ConfigError: its message names all wrong arguments, not only the first one.
    """

    model: str | None = _model(
        None,
        "Folder in the Hugging Face layout, GGUF file, hub id or its address, or a GGUF file of the hub: ORG/NAME:FILE.gguf, "
        "ORG/NAME:Q4_K_M. "
        "Without it: the small embedded model.",
        short="-m",
    )
    tokenizer: str | None = _model(None, "Take the tokenizer from this folder or hub id.")
    revision: str | None = _model(None, "Branch, tag or commit of a hub id.")
    chat_template: str | None = _model(
        None,
        "Jinja template, a file that holds one, or the name of one of the model's templates, instead of its default.",
    )
    generation_config: str = _model(
        "auto", "Take sampling defaults from the model's generation_config.json.", choices=("auto", "none")
    )
    override_generation_config: Mapping[str, Any] | None = _model(  # Any: JSON
        None, "Fields that replace those of generation_config.json: '{\"temperature\": 0.6}'."
    )
    hf_overrides: Mapping[str, Any] | None = _model(  # Any: JSON
        None, "Fields that replace those of config.json: '{\"rope_theta\": 1000000}'."
    )
    model_impl: str = _model(
        "auto",
        "Who computes the model: Inflight's own code or, on Inflight's KV cache, that of Hugging Face transformers (extra "
        "`transformers`). auto: transformers only for models that Inflight's own code does not support.",
        choices=("auto", "inflight", "transformers"),
    )
    runner: str = _model(
        "auto",
        "generate: the model writes text (and makes vectors, too). pooling: it only makes vectors or scores, and its head is "
        "not loaded. auto: what its config.json and its modules.json say.",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = _model(
        "auto",
        "What a pooling model makes of a text: embed: a vector. classify: scores of classes. auto: what its config.json says.",
        choices=("auto", "none", "embed", "classify"),
    )
    pooler_config: Mapping[str, Any] | None = _model(  # Any: `resolve_pooler` checks the values
        None,
        'How hidden states become a vector: \'{"pooling_type": "MEAN", "use_activation": true, "dimensions": 256}\'. '
        "Types are CLS, LAST, MEAN, MAX, ALL and STEP.",
    )
    trust_remote_code: bool = _model(
        False,
        "Run the Python files of the model's folder, if transformers does not know the model. They can do anything.",
    )
    dtype: str = _model(
        "auto", "Data type of weights and activations.", choices=("auto", "bfloat16", "float16", "float32")
    )
    load_format: str = _model(
        "auto",
        "Format of the weights; dummy: random weights, for which only config.json is needed.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    weight_cache: bool = _model(True, "On a CPU, keep packed weights on the disk for the next start (on by default).")
    weight_cache_gb: float = _model(
        40.0, "Most GB of packed weights that are kept.", bounds=(0, 2**20), excludes_low=True, metavar="GB"
    )
    skip_tokenizer_init: bool = _model(False, "Serve token ids only; no tokenizer is read.")
    seed: int | None = _model(
        None,
        "Makes texts repeatable: requests without a seed, and dummy weights, use it. Default: 0 for `LLM` and dummy "
        "weights; a server draws a new seed at each start.",
        bounds=(0, 2**63 - 1),
    )
    max_model_len: int | None = _engine(
        None, "Longest sequence, prompt and output together. Default: the model's own limit.", **_LENGTH
    )
    max_num_seqs: int | None = _engine(None, "Most sequences in one step.", **_COUNT)
    max_num_batched_tokens: int | None = _engine(None, "Most tokens in one step.", **_LENGTH)
    block_size: int | None = _engine(None, "Tokens per KV block.", bounds=(1, 4096))
    kv_cache_dtype: str = _engine(
        "auto",
        "auto is the dtype of the model; int8 (on a CPU, C++ kernels only) and fp8 (on a GPU) halve the KV cache.",
        choices=("auto", "int8", "fp8"),
    )
    kv_cache_memory_bytes: int | None = _engine(
        None,
        "Size of a rank's KV cache: 2G, 512M, ... Default: what --gpu-memory-utilization leaves, on a CPU at most enough for "
        "--max-num-seqs sequences of 1,024 tokens.",
        bounds=(1, 2**60),
        metavar="BYTES",
        parse=parse_bytes,
    )
    gpu_memory_utilization: float | None = _engine(
        None,
        "Share of the device's memory to use; on a CPU of the free RAM that the weights leave. If given, the KV cache gets "
        "all of this share that activations (on a GPU weights, too) leave. Default: 0.9, on a CPU 0.5.",
        bounds=(0, 1),
        excludes_low=True,
    )
    enable_prefix_caching: bool = _engine(True, "Reuse the KV blocks of equal prompt beginnings (on by default).")
    state_checkpoint_tokens: int = _engine(
        512, "Tokens between two states of recurrent layers that the prefix cache keeps.", bounds=(1, 2**20)
    )
    enable_chunked_prefill: bool = _engine(True, "Let a long prompt take several steps (on by default).")
    target_inter_token_latency: str | float = _engine(
        "auto",
        "Longest time in milliseconds between two tokens of a request while prompts of other requests are computed. auto: "
        "twice the time of a step that only decodes, at least 100. none: only --max-num-batched-tokens limits a step, as in "
        "`LLM` by default.",
        metavar="auto|none|MS",
        parse=parse_milliseconds,
    )
    max_step_time: str | float = _engine(
        1000,
        "Most milliseconds of a step while no request decodes; none: no limit, as in `LLM` by default.",
        metavar="none|MS",
        parse=parse_milliseconds,
    )
    kv_events_config: Mapping[str, Any] | None = _engine(  # Any: `resolve` checks the values
        None,
        "Publish which blocks are in the prefix cache, for routers outside, as JSON with vLLM's fields. Example: "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'.',
    )
    kv_transfer_config: Mapping[str, Any] | None = _engine(  # Any: `resolve` checks the values
        None,
        "Where KV blocks are kept outside of the KV cache, as JSON with vLLM's fields. Example: "
        '\'{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 8e9,'
        ' "secondary_tiers": [{"type": "fs", "path": "/mnt/kv"}]}}\'.',
        is_secret=True,  # it may contain passwords of tiers
    )
    kv_offloading_size: float | None = _engine(
        None,
        "Also keep KV blocks in so much host memory, all ranks together: they stay there when they leave the KV cache.",
        bounds=(0, 2**20),
        excludes_low=True,
        metavar="GIB",
    )
    kv_offloading_backend: str = _engine("native", "What keeps KV blocks in host memory.", choices=("native",))
    max_num_partial_prefills: int = _engine(4, "Most prompts that are computed in part at the same time.", **_COUNT)
    max_long_partial_prefills: int = _engine(
        1,
        "Most long prompts that are computed in part at the same time. Further long ones wait; short prompts may overtake "
        "them.",
        **_COUNT,
    )
    long_prefill_token_threshold: int = _engine(
        0, "A prompt with more tokens to compute is long. 0: 4 % of --max-model-len, at least 256.", bounds=(0, 2**24)
    )
    scheduling_policy: str = _engine(
        "fcfs", "Order of requests: by arrival, or by priority.", choices=("fcfs", "priority")
    )
    device: str = _engine(
        "auto", "What to run on; auto uses GPUs if they can be used.", choices=("auto", "cpu", "cuda")
    )
    enforce_eager: bool = _engine(False, "GPU: launch kernel by kernel, without CUDA graphs.")
    attention_backend: str = _engine("auto", "GPU: which attention kernels to use.", choices=("auto", "triton"))
    cuda_graph_max_tokens: int | None = _engine(
        None,
        "GPU: capture steps with prompts up to N tokens; 0 captures only steps without prompts. Default: 512.",
        bounds=(0, 2**24),
    )
    num_threads: int | None = _engine(
        None, "Compute threads of a rank on a CPU. Default: the cores, split among the ranks.", bounds=(1, 4096)
    )
    # With int8 and int4 on a CPU, each step also quantizes the activations, with one scale for each row. With fp8, the products
    # that torch's library computes do so, too.
    quantization: str | None = _engine(
        None,
        "Quantize float weights as they are read: int8, fp8 with a scale per row, int4 with a scale and an offset per group. "
        "fp8 is for GPUs. A checkpoint that is quantized already needs no option; the name of its format is accepted.",
        choices=(None, "int8", "int4", "fp8", *STORED_QUANTIZATIONS),
        metavar="int8|int4|fp8",
    )
    head_quantization: str = _engine(
        "auto",
        "How to quantize the head (lm_head). auto: int8 if --quantization is set, else none.",
        choices=("auto", "none", "int8", "int4", "fp8"),
    )
    quantization_group_size: int = _engine(64, "Input features that share a scale in int4.", choices=(32, 64, 128))
    batch_invariant: bool = _engine(
        False, "Refuse to start if the last bits of a result could depend on the other requests in its batch."
    )
    cpu_threads_bind: str | None = _engine(
        None,
        "Cores of the compute threads: 0-3,8, with | between the lists of several ranks. off: the system chooses. auto: "
        "the threads of a rank are bound if they are as many as the rank's share of several usable cores. Default: "
        "INFLIGHT_CPU_THREADS_BIND, or auto.",
        metavar="auto|off|CORES",
    )
    speculative_config: Mapping[str, Any] | None = _engine(  # Any: `resolve` checks the values
        None, 'Propose tokens, and verify several in a step: \'{"method": "ngram", "num_speculative_tokens": 4}\'.'
    )
    structured_outputs_backend: str = _engine(
        LLGUIDANCE[0],
        "Library that enforces structured outputs. It is always llguidance: the names of other libraries have no effect.",
        choices=(*LLGUIDANCE, "xgrammar", "outlines", "lm-format-enforcer"),
        metavar="llguidance",
    )
    reasoning_end: str = _engine(
        "", "Text that ends a model's thinking, such as </think>. Grammars do not apply to it."
    )
    reasoning_budget: int = _engine(
        -1,
        "Largest number of tokens of the reasoning, if a chat does not set its own (thinking_token_budget); -1: no limit.",
        bounds=(-1, 2**31 - 1),
    )
    reasoning_budget_message: str = _engine(
        "", "Text that is written before the end tag if the reasoning reaches its limit.", metavar="TEXT"
    )
    reasoning_config: Mapping[str, Any] | None = _engine(  # Any: `resolve` checks the values
        None, 'Tags around the reasoning, in vLLM\'s form: \'{"reasoning_end_str": "I answer now.</think>"}\'.'
    )
    tensor_parallel_size: int = _parallel(1, "Ranks that share each layer.", short="-tp", **_COUNT)
    pipeline_parallel_size: int = _parallel(1, "Stages that share the layers.", short="-pp", **_COUNT)
    data_parallel_size: int = _parallel(
        1,
        "Replicas of the engine, each with its own ranks. `inflight serve`, `AsyncLLM` and `LLM` divide the requests "
        "among them.",
        short="-dp",
        bounds=(1, 4096),
    )
    data_parallel_rank: int | None = _parallel(
        None,
        "This server has one replica, which has this number. The others are at other servers, behind one load balancer.",
        short="-dpn",
        bounds=(0, 4095),
    )
    data_parallel_external_lb: bool = _parallel(
        False,
        "Each server has one replica. --data-parallel-rank says so already: this flag adds nothing.",
        short="-dpe",
    )
    data_parallel_hybrid_lb: bool = _parallel(
        False,
        "There are several servers behind one load balancer. Each has --data-parallel-size-local replicas, with the numbers "
        "from --data-parallel-start-rank on.",
        short="-dph",
    )
    data_parallel_size_local: int | None = _parallel(
        None,
        "How many of the replicas run on this machine. Default: all.",
        short="-dpl",
        bounds=(1, MAX_LOCAL_REPLICAS),
    )
    data_parallel_start_rank: int = _parallel(
        0, "The number of the first replica on this machine.", short="-dpr", bounds=(0, 4095)
    )
    data_parallel_backend: str = _parallel(
        "mp", "How replicas are started: as processes on this machine.", short="-dpb", choices=("mp",)
    )
    data_parallel_address: str | None = _parallel(
        None,
        "Address of the machine with the front ends (the head). Replicas on other machines join there.",
        short="-dpa",
        metavar="HOST",
    )
    data_parallel_rpc_port: int = _parallel(
        29550, "Port of the head for replicas on other machines.", short="-dpp", **_PORT
    )
    data_parallel_routing: str = _parallel(
        "prefix",
        "Which replica gets a request: the one with the fewest tokens to compute. With prefix, prompt tokens that are in its "
        "prefix cache do not count.",
        choices=("prefix", "load"),
    )
    pipeline_layer_partition: str | None = _parallel(
        None, "Layers of each stage, as 8,8,6,6. Default: by their cost.", metavar="N,N,..."
    )
    pipeline_stagger: int | None = _parallel(
        None,
        "A request draws a token in every N-th step. Default: measured at the start; at least --pipeline-parallel-size, at "
        "most 3 times --pipeline-parallel-size.",
        **_COUNT,
    )
    pipeline_depth: int | None = _parallel(
        None, "Steps in flight over all stages. Default: pipeline_stagger + 1.", bounds=(1, 65537)
    )
    async_scheduling: bool | None = _parallel(
        None, "Plan a step while the previous one runs (on by default; a pipeline needs it)."
    )
    distributed_executor_backend: str | None = _parallel(
        None,
        "Ranks as threads (uni) or processes (mp). Default: uni for one rank, else mp. ray: as processes, on the machines "
        "that Ray chooses. external_launcher: torchrun starts a script once per rank, and all ranks make the same calls. "
        "package.module:ClassName: an `Executor` of your own.",
        metavar="uni|mp|ray",
    )
    nnodes: int = _parallel(1, "Machines to split the ranks over; the others run `inflight worker`.", **_COUNT)
    node_rank: int = _parallel(0, "Which of the nodes this is; the engine runs on node 0.", bounds=(0, 65535))
    master_addr: str = _parallel(
        "127.0.0.1", "Address of node 0.", flags=("--master-address", "--master-addr"), metavar="HOST"
    )
    master_port: int = _parallel(29501, "Port of node 0.", **_PORT)
    enable_fault_tolerance: bool = _faults(
        True, "Repair the engine when a process of it dies or hangs, and resume its requests (on by default)."
    )
    fault_tolerance_config: Mapping[str, Any] | None = _faults(  # Any: `resolve` checks the values
        None,
        "How to recover, as JSON: engine_recovery_timeout_sec (longest time of a recovery; default 120), "
        "resume_requests_after_recovery (default true), max_recoveries (most within one hour; default 10), spare_workers "
        "(processes that wait to replace a rank; default 0). Example: '{\"max_recoveries\": 3}'.",
    )

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "EngineArgs":  # Any: values are checked below
        """The constructor, for arguments whose names are not known to be right."""
        if unknown := unknown_name(cls, kwargs):
            raise UnknownArgumentError(f"unknown argument {unknown}")
        return cls(**kwargs)

    @property
    def replicas(self) -> range:
        """The numbers of the replicas on this machine, among all replicas of all servers."""
        if self.data_parallel_rank is not None:
            return range(self.data_parallel_rank, self.data_parallel_rank + 1)
        count = self.data_parallel_size_local or self.data_parallel_size
        return range(self.data_parallel_start_rank, self.data_parallel_start_rank + count)

    @property
    def served_replicas(self) -> range:
        """The numbers of all replicas behind this server, those on other machines included."""
        is_alone = self.data_parallel_hybrid_lb or self.data_parallel_rank is not None
        if is_alone or not self.data_parallel_address:
            return self.replicas
        return range(self.data_parallel_size)

    @property
    def routes_by_prefix(self) -> bool:
        return len(self.served_replicas) > 1 and self.data_parallel_routing == "prefix" and self.enable_prefix_caching

    @property
    def config_overrides(self) -> dict[str, Any]:  # Any: JSON
        """`hf_overrides`, and the dtype if it is given: then config.json need not name one that is supported."""
        return {**({} if self.dtype == "auto" else {"dtype": self.dtype}), **(self.hf_overrides or {})}

    def __post_init__(self) -> None:
        read, unreadable = read_texts(EngineArgs, vars(self))
        for name, value in read.items():
            object.__setattr__(self, name, value)
        self._read_model_name()
        times = (
            time_problem("target_inter_token_latency", self.target_inter_token_latency, ("auto", "none")),
            time_problem("max_step_time", self.max_step_time, ("none",)),
        )
        wrong = [*(check_values(EngineArgs, vars(self)) | unreadable).values(), *filter(None, times)]
        # Combinations are checked only if each value by itself is right.
        if problems := [f"{problem}; give one, or leave it out" for problem in wrong] or list(self._conflicts()):
            raise ConfigError("; ".join(problems))

    def _read_model_name(self) -> None:
        """Replace the address of a page of the hub by the hub id, and "embedded" by None."""
        if not isinstance(self.model, str):
            return
        model, revision = read_model_name(self.model)
        object.__setattr__(self, "model", model)
        if self.revision is None:
            object.__setattr__(self, "revision", revision)

    def _conflicts(self) -> Iterator[str]:
        yield from self.image_problems()
        yield from self.expert_problems()
        backend = self.distributed_executor_backend
        if backend is not None and backend not in _EXECUTORS and not _QUALIFIED_NAME.fullmatch(backend):
            yield (
                f"distributed_executor_backend={backend!r} is not one of {', '.join(_EXECUTORS)}, nor a class named as "
                "'package.module:ClassName'; give one of them, or leave it out"
            )
        if self.node_rank != 0:
            yield (
                f"node_rank={self.node_rank}: the engine runs on node 0; here run `inflight worker` with the same options"
            )
        if len(self.served_replicas) > 1 and (self.nnodes > 1 or backend == "external_launcher"):
            other = f"nnodes={self.nnodes}" if self.nnodes > 1 else "distributed_executor_backend='external_launcher'"
            yield (
                f"data_parallel_size={self.data_parallel_size} with {other}: Inflight starts the ranks of several replicas "
                "itself, each on one machine; leave one of the two options out"
            )
        yield from replica_conflicts(
            size=self.data_parallel_size,
            rank=self.data_parallel_rank,
            local=self.data_parallel_size_local,
            start=self.data_parallel_start_rank,
            is_hybrid=self.data_parallel_hybrid_lb,
            is_external=self.data_parallel_external_lb,
            replicas=self.replicas,
            served=self.served_replicas,
        )
        if self.enforce_eager and self.cuda_graph_max_tokens:
            yield (
                f"enforce_eager=True with cuda_graph_max_tokens={self.cuda_graph_max_tokens}: with the first no "
                "graph is captured; leave one of them out"
            )
        if self.nnodes > 1 and backend in _NO_NODES:
            yield f"nnodes={self.nnodes} with distributed_executor_backend={backend!r}: {_NO_NODES[backend]}"
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            yield (
                f"max_long_partial_prefills={self.max_long_partial_prefills} is more than "
                f"max_num_partial_prefills={self.max_num_partial_prefills}; raise the second or lower the first"
            )
        if self.target_inter_token_latency not in ("auto", "none"):
            target = f"target_inter_token_latency={self.target_inter_token_latency}"
            if backend == "external_launcher":
                yield (
                    f"{target} with distributed_executor_backend='external_launcher': all ranks must make the same plans, "
                    "but the times that they measure differ; leave it out, and bound steps by max_num_batched_tokens"
                )
            if not self.enable_chunked_prefill:
                yield f"{target} with enable_chunked_prefill=False: a prompt cannot be split; leave one of them out"
