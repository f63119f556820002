"""Environment variables of other engines, mostly vLLM's: what to use instead, or why they have no effect here.

docs/from-vllm.md is made from the tables of this file. In the tables `*` matches any text. A variable that is set is never
ignored without a word. If a server without it would be less safe, or would give other results, the server does not start.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from inflight import envs

_Entry = TypeVar("_Entry")

# Variable of vLLM -> what has the same meaning here.
SAME = {
    "VLLM_LOGGING_LEVEL": "INFLIGHT_LOG_LEVEL",
    "VLLM_CPU_OMP_THREADS_BIND": "INFLIGHT_CPU_THREADS_BIND, or --cpu-threads-bind",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes, such as 4G",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "--cpu-threads-bind, with the cores that the engine may use, or --num-threads",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--keep-alive-timeout",
    "VLLM_LOG_STATS_INTERVAL": "--log-stats-interval",
    "VLLM_PP_LAYER_PARTITION": "--pipeline-layer-partition",
    "VLLM_HOST_IP": "--master-address, or --data-parallel-address",
    "VLLM_DP_SIZE": "--data-parallel-size",
    "VLLM_DP_RANK": "--data-parallel-rank",
    "VLLM_DP_MASTER_IP": "--data-parallel-address",
    "VLLM_DP_MASTER_PORT": "--data-parallel-rpc-port",
    "VLLM_TORCH_PROFILER_DIR": "the command `inflight trace`",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "--no-strict-model-names",
    "VLLM_USE_SIMPLE_KV_OFFLOAD": "--kv-offloading-size",
    "VLLM_IMAGE_FETCH_TIMEOUT": "INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS",
}

# Reason -> the variables of vLLM that have no effect here for this reason.
NO_EFFECT = {
    "--port is the port of the server; the engine needs no other": "VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP",
    "models come from the Hugging Face hub: HF_HOME is the folder, HF_TOKEN the key": """
        VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN""",
    "Inflight sends no statistics to anybody": """
        VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER""",
    "INFLIGHT_LOG_LEVEL and INFLIGHT_LOG_FORMAT (text, json) set the log, which goes to stderr": """
        VLLM_CONFIGURE_LOGGING VLLM_LOGGING_* VLLM_DISABLE_LOG_LOGO VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
        VLLM_PROCESS_NAME_PREFIX VLLM_RINGBUFFER_WARNING_INTERVAL""",
    "texts are never logged": "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
    "`inflight trace` shows what each step does": """
        VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_TRACE_FUNCTION VLLM_GC_DEBUG VLLM_DEBUG_*
        VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG""",
    "a length above the model's own needs --hf-overrides": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "LoRA adapters are not served": "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_*",
    "no code from outside is loaded into the server": "VLLM_PLUGINS",
    "the server has no routes for development": "VLLM_SERVER_DEV_MODE",
    "a recovery has its own limits: --fault-tolerance-config": """
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_ENGINE_READY_TIMEOUT_S VLLM_ENGINE_ITERATION_TIMEOUT_S
        VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_RPC_TIMEOUT""",
    "the parts of one request have fixed limits": """
        VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS""",
    "each tool sets with `strict` whether its arguments must follow the schema": "VLLM_ENFORCE_STRICT_TOOL_CALLING",
    "a call that cannot be read is text of the answer": "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY",
    "the server runs no tools": "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS",
    "responses are stored, within bounds (`--response-store`)": "VLLM_ENABLE_RESPONSES_API_STORE",
    "the API has other routes": "VLLM_ENABLE_COHERE_API",
    "llguidance enforces structured outputs": "VLLM_XGRAMMAR_CACHE_MB VLLM_V*_USE_OUTLINES_CACHE",
    "one library reads tokenizer.json; there is no other": "VLLM_USE_FASTOKENS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT",
    "images have no such setting": """
        VLLM_IMAGE_* VLLM_VIDEO_* VLLM_AUDIO_* VLLM_MEDIA_* VLLM_MAX_AUDIO_* VLLM_MAX_IMAGE_* VLLM_MAX_EMBED_* VLLM_MAX_MEDIA_*
        VLLM_MM_*""",
    "KV blocks go to the tiers of --kv-transfer-config only": """
        VLLM_NIXL_* VLLM_MOONCAKE_* VLLM_MORI* VLLM_P2P_* VLLM_EC_* VLLM_KV_OFFLOAD_* VLLM_NIC_SELECTION_VARS
        VLLM_GPU_NIC_PCIE_MAPPING""",
    "--kv-events-config publishes the hashes of blocks as bytes": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
    "the engine starts its processes in one way": """
        VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENABLE_STARTUP_PLAN VLLM_RUST_FRONTEND_PATH
        VLLM_USE_RUST_* VLLM_USE_HW_AGNOSTIC VLLM_SLEEP_WHEN_IDLE VLLM_USE_SPINLOOP_EXT""",
    "--distributed-executor-backend ray has no such setting": """
        VLLM_RAY_* VLLM_USE_RAY_*""",
    "a replica is chosen by --data-parallel-rank": "VLLM_DP_RANK_LOCAL VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
    "the messages between processes have their own format": """
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_DISABLE_REQUEST_ID_RANDOMIZATION""",
    "a logit that is NaN or infinite always ends its request": "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS",
    "nothing is compiled at run time": """
        VLLM_*COMPILE* VLLM_*AOT* VLLM_*INDUCTOR* VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME
        VLLM_ENABLE_CUDAGRAPH_GC VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS""",
    "weights are read in parallel, each file once, and stay on one device": """
        VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_WEIGHT_OFFLOADING_* VLLM_MXFP*_EMULATION_DEQUANT_AT_LOAD VLLM_TEST_*
        VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_WSL2_ENABLE_PIN_MEMORY""",
    "each operation has one implementation, chosen by the device": """
        VLLM_ATTENTION_BACKEND VLLM_*FLASHINFER* VLLM_USE_TRITON_* VLLM_TRITON_* VLLM_FLASH_ATTN_* VLLM_ALLREDUCE_* VLLM_ROCM_*
        VLLM_XPU_* VLLM_XLA_* VLLM_TPU_* VLLM_CPU_* VLLM_*DEEP_GEMM* VLLM_DEEPEP* VLLM_*MOE* VLLM_MARLIN_* VLLM_HUMMING_*
        VLLM_*KIMI* VLLM_*DCP* VLLM_*GEMM* VLLM_*STREAM* VLLM_ELASTIC_EP_* VLLM_DBO_* VLLM_USE_* VLLM_*NCCL* VLLM_SSM_*
        VLLM_KV_CACHE_LAYOUT VLLM_DISABLED_KERNELS VLLM_MLA_DISABLE VLLM_SKIP_P2P_CHECK VLLM_CUDART_SO_PATH
        VLLM_*CUDA_COMPATIBILITY*
        VLLM_FLOAT32_MATMUL_PRECISION VLLM_TUNED_CONFIG_FOLDER VLLM_REPLICATE_EMBED VLLM_GDN_DECODE_KERNEL
        VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_HPC_OPS VLLM_DISTRIBUTED_USE_SPLIT_GROUP
        VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
        VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_LOGITS_PROCESSOR_THREADS""",
    "it is a setting of the build of vLLM": """
        VLLM_TARGET_DEVICE VLLM_BUILD_* VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_SKIP_*_SUFFIX
        VLLM_PRECOMPILED_*""",
}


class Refusal(NamedTuple):
    reason: str  # why a server does not start, and what to do
    unless: tuple[str, ...] = ()  # names of settings: if one of them has a value, a note is enough

    def applies(self, settings: Mapping[str, object]) -> bool:
        return not any(settings.get(name) for name in self.unless)


_NO_KEY = Refusal(
    "the server reads no key from it, and would answer everybody who can reach it: set INFLIGHT_API_KEY, or "
    "INFLIGHT_SERVE_API_KEY_FILE to a file with keys",
    unless=("api_keys", "api_key_file", "ssl_ca_certs", "headless"),
)
_NO_TLS = Refusal(
    "the server would not speak TLS: give --ssl-certfile and --ssl-keyfile", unless=("ssl_certfile", "headless")
)
# Variable -> why a server does not start if the variable is set to something else than "no".
REFUSED = {
    "VLLM_BATCH_INVARIANT": Refusal(
        "results could depend on the other requests of a step: give --batch-invariant", unless=("batch_invariant",)
    ),
    "VLLM_USE_MODELSCOPE": Refusal("models come from the Hugging Face hub: give a folder as the model"),
    "VLLM_MODEL_REDIRECT_PATH": Refusal("another model would be served: give its folder as the model"),
    "VLLM_SYSTEM_START_DATE": Refusal("the chat template writes the date of the day: give --chat-template"),
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": Refusal(
        "the chat template decides where instructions stand: give --chat-template"
    ),
    # names that look as if they were variables of keys
    "VLLM_*API_KEY*": _NO_KEY,
    "VLLM_*APIKEY*": _NO_KEY,
    "INFLIGHT_*API_KEY*": _NO_KEY,
    "INFLIGHT_*APIKEY*": _NO_KEY,
    # variables of other servers, and of programs made from vLLM
    "APHRODITE_API_KEY": _NO_KEY,
    "LLAMA_API_KEY": _NO_KEY,
    "LLAMA_ARG_API_KEY*": _NO_KEY,
    "LLAMA_ARG_SSL_*": _NO_TLS,
}

# Variables of other servers -> what to use instead, or why there is nothing.
OF_OTHER_SERVERS = {
    "API_KEY": "use INFLIGHT_API_KEY for the key that clients of this server need",  # of Text Generation Inference
    "OLLAMA_HOST": "use --host and --port",
    "OLLAMA_ORIGINS": "use --allowed-origin",
    "OLLAMA_API_KEY": "use INFLIGHT_API_KEY for the key that clients of this server need",
    "OLLAMA_MODELS": "use a folder, a GGUF file or a hub id as the model",
    "OLLAMA_CONTEXT_LENGTH": "use --max-model-len",
    "OLLAMA_NUM_PARALLEL": "use --max-num-seqs",
    "OLLAMA_MAX_QUEUE": "use --max-queued-requests",
    "OLLAMA_KV_CACHE_TYPE": "use --kv-cache-dtype",
    "OLLAMA_DEBUG": "use -v, or INFLIGHT_LOG_LEVEL=DEBUG",
    "OLLAMA_KEEP_ALIVE": "the model stays in memory until the server ends",
    "OLLAMA_LOAD_TIMEOUT": "loading has no time limit",
    "OLLAMA_MAX_LOADED_MODELS": "use one server for each model",
    "SGLANG_*API_KEY*": "use INFLIGHT_API_KEY for the key that clients of this server need",
    "LLAMA_ARG_HOST": "use --host",
    "LLAMA_ARG_PORT": "use --port",
    "LLAMA_ARG_MODEL": "use --model",
    "LLAMA_ARG_HF_REPO": "use --model",
    "LLAMA_ARG_ALIAS": "use --served-model-name",
    "LLAMA_ARG_THINK_BUDGET": "use --reasoning-budget",
    "LLAMA_ARG_THINK_BUDGET_MESSAGE": "use --reasoning-budget-message",
    "LLAMA_ARG_CTX_SIZE": "use --max-model-len",
    "LLAMA_ARG_N_PARALLEL": "use --max-num-seqs",
    "LLAMA_ARG_THREADS": "use --num-threads",
    "LLAMA_ARG_BATCH": "use --max-num-batched-tokens",
    "LLAMA_ARG_CACHE_TYPE_*": "use --kv-cache-dtype",
    "LLAMA_ARG_CHAT_TEMPLATE*": "use --chat-template",
    "LLAMA_ARG_ENDPOINT_METRICS": "/metrics is always there",
    "LLAMA_ARG_API_PREFIX": "use --root-path",
    "LLAMA_CACHE": "use HF_HOME",
}
PREFIXES = ("INFLIGHT_", "VLLM_", "APHRODITE_", "SGLANG_", "SGL_", "LLAMA_", "OLLAMA_", "API_KEY")
# Prefix -> the engine whose variables have it. Ollama is left out, because its clients have variables with this prefix, too.
_ENGINES = {"VLLM_": "vLLM", "SGLANG_": "SGLang", "SGL_": "SGLang", "LLAMA_ARG_": "llama.cpp"}

_REASONS = {name: reason for reason, names in NO_EFFECT.items() for name in names.split()}
_READ = frozenset(
    {
        *envs.API_KEY_VARIABLES,
        envs.ADMIN_KEY_VARIABLE,
        "INFLIGHT_SERVE_API_KEY_FILE",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    }
)
_NO = frozenset({"0", "false", "no", "off"})
# Kubernetes sets such variables for a Service whose name begins with the name of an engine, such as "vllm-qwen".
_KUBERNETES = re.compile(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?")
_URL = re.compile(r"(tcp|udp|sctp)://\S+")  # the value of VLLM_QWEN_PORT


def refusals(environment: Mapping[str, str], settings: Mapping[str, object]) -> Iterator[str]:
    """Yields the reasons why a server with these settings must not start.

    Args:
        settings: name -> value of the settings of the server and of its engine.
    """
    for name in _unread(environment):
        refusal = _find(REFUSED, name)
        if refusal is not None and refusal.applies(settings):
            yield f"{name} is set, but {refusal.reason}; or unset {name}"


def server_notes(environment: Mapping[str, str], settings: Mapping[str, object]) -> Iterator[str]:
    """Yields a line for each variable of another engine that is set and not read, except for those that `refusals` names. A
    variable of API keys that gives no key has a line, too: it is empty, or another variable has precedence."""
    for name in _unread(environment):
        refusal = _find(REFUSED, name)
        if (refusal is None or not refusal.applies(settings)) and (note := _note(name)):
            yield note
    given = [name for name in envs.API_KEY_VARIABLES if name in environment]
    used = next((name for name in given if environment[name].strip()), None)
    for name in given:
        if not environment[name].strip():
            yield f"{name} is empty, and gives no key"
        elif name != used:
            yield f"{name} is not read, because {used} is set"


def engine_notes(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each variable of vLLM that is set and is not read. For programs that run no server."""
    for name in _unread(environment):
        if name.startswith("VLLM_") and (note := _note(name)):
            yield note


def _unread(environment: Mapping[str, str]) -> list[str]:
    """The variables that have a value and are not read, without those that Kubernetes has set, and without those that switch
    off a feature that Inflight does not have."""
    return [
        name
        for name, value in sorted(environment.items())
        if name.startswith(PREFIXES)
        and value.strip()
        and name not in _READ
        and not (_KUBERNETES.fullmatch(name) or (name.endswith("_PORT") and _URL.fullmatch(value)))
        and not (name in REFUSED and value.strip().lower() in _NO)
    ]


def _note(name: str) -> str:
    """The line about a variable that is not read. "" if it is no variable of another engine."""
    reason = f"use {SAME[name]}" if name in SAME else _find(OF_OTHER_SERVERS, name) or _find(_REASONS, name)
    if reason is not None:
        return f"{name} has no effect here: {reason}"
    engine = next((_ENGINES[prefix] for prefix in _ENGINES if name.startswith(prefix)), None)
    if engine is None and (name.startswith("INFLIGHT_") or _find(REFUSED, name) is None):
        return ""
    return f"{name} has no effect here: Inflight reads no such variable" + (f" of {engine}" if engine else "")


def _find(table: Mapping[str, _Entry], name: str) -> _Entry | None:
    """The entry of a table whose key is the name, or a pattern that the name matches."""
    return table.get(name) or next(
        (entry for pattern, entry in table.items() if fnmatch.fnmatchcase(name, pattern)), None
    )
