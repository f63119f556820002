"""Resolves the options that depend on the device, and refuses options that this device does not have."""

import logging

from inflight.config.cpu_binding import AUTO, OFF, cores_of_rank, parse_core_lists
from inflight.config.cuda_driver import to_version
from inflight.config.engine import DeviceConfig, QuantizationConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.machine import Machine
from inflight.config.weight_format import FP8, GENERAL_FORMATS, PLAIN, STORED_QUANTIZATIONS
from inflight.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_TOKEN_IDS = 2**32  # that a rank keeps for all requests: 16 GB of addresses, of which only the used ones take memory
MAX_DEVICE_STATE = 2**31 - 1  # integers that a GPU can keep for all requests: kernels index them with 32 bits
DEFAULT_CUDA_GRAPH_MAX_TOKENS = 512  # a larger step takes longer than its kernel launches, so a graph saves nothing

FLOAT8 = "float8_e4m3fn"
_FLOAT8_COMPUTE_CAPABILITY = (8, 9)  # Ada and Hopper

_KV_CACHE_DTYPES = {"cpu": {"int8": "int8"}, "cuda": {"fp8": FLOAT8}}
_QUANTIZATIONS = {"cpu": ("int8", "int4"), "cuda": ("fp8", "int8", "int4")}


def resolve_device(
    args: EngineArgs, num_machine_ranks: int, machine: Machine, *, max_num_batched_tokens: int
) -> DeviceConfig:
    """`num_machine_ranks`: the ranks of all replicas on this machine.

    Raises:
        ConfigError: an option is for another device, or the machine lacks what the option needs.
    """
    if machine.device == "cuda":
        return _resolve_cuda(args, num_machine_ranks, machine, max_num_batched_tokens)
    if args.enforce_eager:
        logger.info("enforce_eager has no effect on a CPU, which never uses CUDA graphs")
    for name, neutral in (("attention_backend", ("auto",)), ("cuda_graph_max_tokens", (None, 0))):
        if getattr(args, name) not in neutral:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} is for GPUs, and this engine runs on the CPU; leave it out"
            )
    threads_bind = args.cpu_threads_bind or machine.threads_bind
    num_threads = args.num_threads or _threads_of_rank(machine, num_machine_ranks)
    if threads_bind not in (AUTO, OFF):
        lists = parse_core_lists(threads_bind, num_machine_ranks)
        num_threads = args.num_threads or len(lists[0])
        for rank in range(num_machine_ranks):  # ranks of this node; the other nodes check theirs
            cores_of_rank(
                threads_bind,
                usable=machine.usable_cores,
                num_threads=num_threads,
                local_rank=rank,
                num_local_ranks=num_machine_ranks,
            )
    return DeviceConfig(
        kind="cpu", num_threads=num_threads, threads_bind=threads_bind, free_host_bytes=machine.free_host_bytes
    )


def check_device_state(num_numbers: int, *, max_num_seqs: int, max_model_len: int) -> None:
    """`num_numbers`: how many integers (most of them token ids) the GPU has to keep for all requests together.

    Raises:
        ConfigError: `num_numbers` is more than MAX_DEVICE_STATE.
    """
    if num_numbers > MAX_DEVICE_STATE:
        raise ConfigError(
            f"max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len} tokens are {num_numbers} numbers on the "
            f"GPU, which can keep {MAX_DEVICE_STATE} at most; lower one of the two"
        )


def check_token_ids(*, max_num_seqs: int, max_model_len: int) -> None:
    """
    Raises:
        ConfigError: a rank cannot keep the token ids of so many requests of this length.
    """
    if max_num_seqs * max_model_len > MAX_TOKEN_IDS:
        raise ConfigError(
            f"max_num_seqs={max_num_seqs} requests of max_model_len={max_model_len} tokens are more token ids than a rank "
            f"keeps ({MAX_TOKEN_IDS}); lower one of the two"
        )


def resolve_kv_cache_dtype(wanted: str, dtype: str, machine: Machine) -> str:
    """`dtype`: the dtype of the model, which the cache has if `wanted` is "auto".

    Raises:
        ConfigError: the device has no kernels for this dtype.
    """
    if wanted == "auto":
        return dtype
    known = _KV_CACHE_DTYPES[machine.device]
    if wanted not in known:
        raise ConfigError(
            f"kv_cache_dtype={wanted!r} is not for device={machine.device!r}; give 'auto' or {', '.join(map(repr, known))}"
        )
    if known[wanted] == FLOAT8:
        _need_float8("kv_cache_dtype", machine)
    return known[wanted]


def resolve_quantization(args: EngineArgs, machine: Machine, weight_format: str) -> QuantizationConfig:
    """`weight_format`: how the checkpoint stores its weights; one of the names in `weight_format.py`.

    Raises:
        ConfigError: the device has no kernels for this quantization, or the checkpoint is stored in another format.
    """
    layers = args.quantization
    if layers in STORED_QUANTIZATIONS:
        _check_stored(layers, weight_format)
        layers = None  # stored weights are used as they are
    if layers == "fp8" and machine.device == "cpu" and weight_format == FP8:
        layers = None  # here the word only says how the checkpoint is stored
    head: str | None = args.head_quantization
    if head == "auto":
        head = None if layers is None else "int8"  # 4 bits would be too few for the head: its results are the logits
    elif head == "none":
        head = None
    for name, wanted in (("quantization", layers), ("head_quantization", head)):
        known = _QUANTIZATIONS[machine.device]
        if wanted not in (None, *known):
            raise ConfigError(
                f"{name}={wanted!r} is not for device={machine.device!r}; give {' or '.join(map(repr, known))}, or leave it out"
            )
        if wanted == "fp8":
            _need_float8(name, machine)
    return QuantizationConfig(layers=layers, head=head, group_size=args.quantization_group_size)


def _check_stored(wanted: str, weight_format: str) -> None:
    if weight_format == PLAIN:
        raise ConfigError(
            f"quantization={wanted!r}, but the weights of this checkpoint are not quantized; give 'int8' or 'int4' (on a GPU "
            f"also 'fp8') to quantize them as they are read, or a checkpoint that is stored as {STORED_QUANTIZATIONS[wanted]}"
        )
    stored = GENERAL_FORMATS.get(weight_format, weight_format)
    if STORED_QUANTIZATIONS[wanted] != stored:
        raise ConfigError(
            f"quantization={wanted!r}, but the weights of this checkpoint are stored as {stored}; leave quantization out: the "
            "checkpoint itself says how its weights are stored"
        )


def _resolve_cuda(
    args: EngineArgs, num_machine_ranks: int, machine: Machine, max_num_batched_tokens: int
) -> DeviceConfig:
    for name in ("num_threads", "cpu_threads_bind"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} is for CPUs, and this engine runs on a GPU; leave it out, or give device='cpu'"
            )
    if args.batch_invariant:
        raise ConfigError(
            "batch_invariant=True cannot be kept on a GPU yet: the order in which cuBLAS adds depends on the number of rows; "
            "leave it out, or give device='cpu'"
        )
    backend = args.distributed_executor_backend
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if num_ranks > 1 and backend == "uni":
        raise ConfigError(
            f"distributed_executor_backend='uni' runs {num_ranks} ranks as threads of one process, and on GPUs each rank "
            "needs a process of its own; give 'mp', or leave it out"
        )
    # With any other backend, another program starts the ranks, and each rank checks its own GPU.
    if backend in (None, "uni", "mp") and num_machine_ranks > len(machine.gpus):
        replicas = f" x {len(args.replicas)} replicas" if len(args.replicas) > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size={args.tensor_parallel_size} x pipeline_parallel_size={args.pipeline_parallel_size}"
            f"{replicas} needs {num_machine_ranks} GPUs on this machine, one for each rank, and {len(machine.gpus)} can be "
            "used; lower one of the sizes, or check whether CUDA_VISIBLE_DEVICES hides a GPU"
        )
    wanted = args.cuda_graph_max_tokens
    graph_tokens = DEFAULT_CUDA_GRAPH_MAX_TOKENS if wanted is None else wanted
    return DeviceConfig(
        kind="cuda",
        num_threads=_threads_of_rank(machine, num_machine_ranks),
        threads_bind=OFF,
        free_host_bytes=machine.free_host_bytes,
        enforce_eager=args.enforce_eager,
        cuda_graph_max_tokens=0 if args.enforce_eager else min(graph_tokens, max_num_batched_tokens),
    )


def _need_float8(name: str, machine: Machine) -> None:
    if machine.compute_capability < _FLOAT8_COMPUTE_CAPABILITY:
        raise ConfigError(
            f"{name}='fp8' needs GPUs of compute capability {to_version(_FLOAT8_COMPUTE_CAPABILITY)} (Ada, Hopper) or more, "
            f"and this machine has {to_version(machine.compute_capability)}; leave {name} out"
        )


def _threads_of_rank(machine: Machine, num_machine_ranks: int) -> int:
    return max(1, machine.num_cores // num_machine_ranks)
