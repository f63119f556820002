"""Accepts flags of other engines, mostly vLLM's: renames them to our options, ignores them with a note, or refuses them.

docs/from-vllm.md is made from the tables of this file. In the tables `=` after a flag means that the flag has a value, and `+`
that it has one or more values. `*` matches any text. Each boolean flag --name also has the form --no-name.
"""

import fnmatch
import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from inflight.errors import ConfigError

# Flag of another engine -> our flag with the same meaning. If [] follows a flag, its value is a JSON list, and our flag is used
# once for each entry.
SAME = {
    "-q": "--quantization",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--max-cudagraph-capture-size": "--cuda-graph-max-tokens",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--max-num-queued-tokens": "--max-queued-tokens",
    "--sse-keep-alive-interval": "--stream-keep-alive-interval",
    "--enable-log-requests": "--log-requests",
    "--disable-log-stats": "--log-stats-interval=0",
    "--allowed-origins[]": "--allowed-origin",
    "--allowed-methods[]": "--allowed-method",
    "--allowed-headers[]": "--allowed-header",
}

# Value that another engine has for one of our options -> our value with the same meaning.
SAME_VALUES = {
    "--dtype half": "float16",
    "--dtype float": "float32",
    "--generation-config vllm": "none",
    "--model-impl vllm": "inflight",
    "--kv-cache-dtype fp8_e4m3": "fp8",
}

# Reason -> the flags that have no effect here for this reason.
NO_EFFECT = {
    "tool calls are always parsed; --tool-call-parser chooses the parser": "--enable-auto-tool-choice",
    "reasoning is always parsed; --reasoning-parser chooses the parser": "--enable-reasoning",
    "code is taken from the revision of the model": "--code-revision=",
    "requests are logged only with --log-requests": "--disable-log-requests",
    "--log-requests and --access-log never log texts": "--enable-log-outputs --enable-log-deltas --max-log-len=",
    "--access-log off does this": "--disable-uvicorn-access-log",
    "successful health checks and reads of /metrics are not logged": "--disable-access-log-for-endpoints=",
    "statistics are at /metrics": """
        --aggregate-engine-logging --enable-logging-iteration-details --enable-server-load-tracking
        --show-hidden-metrics-for-version= --kv-cache-metrics --kv-cache-metrics-sample= --cudagraph-metrics
        --enable-mfu-metrics --custom-histogram-buckets= --per-request-spec-decode-metrics=""",
    "INFLIGHT_LOG_LEVEL sets the level of the log, --log-format its format": """
        --uvicorn-log-level= --log-level= --log-config-file= --logging-config= --log-error-stack""",
    "`inflight trace` shows what each step does": """
        --enable-layerwise-nvtx-tracing --collect-detailed-traces+ --ray-workers-use-nsight""",
    "a rank always reads only the experts that it has, which are neighbours": """
        --enable-ep-weight-filter --expert-placement-strategy=""",
    "preempted requests are computed again, or loaded with --kv-offloading-size": "--swap-space= --preemption-mode=",
    "replicas need no collective to keep step": "--disable-nccl-for-dp-synchronization --dp-*=",
    "weights stay on one device": """
        --cpu-offload-gb= --cpu-offload-params+ --offload-backend= --offload-group-size= --offload-num-in-group=
        --offload-params+ --offload-prefetch-step=""",
    "weights are read in parallel, each file once": """
        --max-parallel-loading-workers= --safetensors-load-strategy= --safetensors-prefetch-num-threads=
        --safetensors-prefetch-block-size= --use-tqdm-on-load --ignore-patterns+ --pt-load-map-location=
        --model-loader-extra-config=""",
    "HF_HOME sets the folder of downloaded models": "--download-dir=",
    "HF_TOKEN is the token for the hub": "--hf-token=",
    "one library reads tokenizer.json; there is no other mode": "--tokenizer-mode= --tokenizer-pool-size=",
    "--max-model-len bounds a sequence": "--max-seq-len=",
    "--max-num-seqs and --max-num-batched-tokens bound a step": "--max-num-active-seqs= --max-num-scheduled-tokens=",
    "nothing is compiled at run time; --cuda-graph-max-tokens bounds what is captured": """
        --compilation-config= -cc= --optimization-level= --performance-mode= --max-seq-len-to-capture=
        --cudagraph-capture-sizes+ --jit-monitor-mode= --jit-monitor-verbose""",
    "llguidance enforces structured outputs": "--guided-decoding-backend=",
    "the server finds the format in the template": "--chat-template-content-format=",
    "the role of answers is always assistant": "--response-role=",
    "--api-server-count is the number of front ends": "--disable-frontend-multiprocessing --renderer-num-workers=",
    "usage always says how many prompt tokens were cached": "--enable-prompt-tokens-details",
    "every answer has an X-Request-Id": "--enable-request-id-headers",
    "/tokenizer_info is always there": "--enable-tokenizer-info-endpoint",
    "the page /docs loads its scripts from the network": "--enable-offline-docs",
    "send SIGHUP after a change of the files of keys or certificates": "--enable-ssl-refresh",
    "with --ssl-ca-certs clients need a certificate": "--ssl-cert-reqs=",
    "--max-header-bytes bounds the headers": "--h11-max-incomplete-event-size= --h11-max-header-count=",
    "up to 100 log-probabilities can be asked for": "--max-logprobs=",
    "log-probabilities are always those of the raw logits": "--logprobs-mode=",
    "the fingerprint names version and model": "--fingerprint-mode= --fingerprint-value=",
    "unknown environment variables cause only a warning": "--fail-on-environ-validation",
    "INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS bounds a step": """
        --distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --watchdog-config=""",
    "--cpu-threads-bind binds the threads to cores": "--numa-bind --numa-bind-nodes+ --numa-bind-cpus+",
    "each operation has one implementation, chosen by the device": """
        --attention-config= -ac= --kernel-config= --moe-backend= --linear-backend=
        --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= --sparse-indexer-topk-backend= --ir-op-priority=
        --enable-flashinfer-autotune --monokernel --use-fp64-gumbel --disable-custom-all-reduce --disable-cascade-attn
        --enable-cumem-allocator --enable-nccl-comm-suspend --enable-shm-tensor-arena --enable-batch-sharded-sampling
        --enable-hc-sp --dcp-comm-backend= --enable-flash-late-interaction --calculate-kv-scales""",
    "the scheduler and the KV cache have no such setting": """
        --long-prefill-token-threshold-adaptive --scheduler-reserve-full-isl --watermark= --prefill-schedule-interval=
        --stream-interval= --num-scheduler-steps= --num-lookahead-slots= --use-v2-block-manager
        --disable-hybrid-kv-cache-manager --prefix-caching-hash-algo= --prefix-cache-retention-interval=
        --prefix-match-unit= --kv-sharing-fast-prefill --swa-bounded-replay""",
    "images have no such setting": """
        --media-io-kwargs= --skip-mm-profiling --interleave-mm-strings
        --enable-mm-embeds --disable-chunked-mm-input --trust-request-mm-kwargs
        --mm-device-do-normalize --mm-encoder-only --mm-encoder-attn-*= --mm-encoder-fp8-*= --mm-encoder-tp-mode=
        --mm-hasher-algorithm= --mm-ipc-gpu-memory-gb= --mm-processor-cache-type= --mm-processor-device= --mm-shm-cache-*=
        --mm-tensor-ipc= --video-*=""",
    "a request cannot bring a chat template, --chat-template sets the server's": """
        --trust-request-chat-template --enable-request-chat-template --template-timeout=""",
    "no model that is served needs this": """
        --mamba-*= --enable-mamba-cache-stochastic-rounding
        --enable-mamba-shared-prefix-checkpoint --use-replayssm --replayssm-buffer-len= --allow-deprecated-quantization
        --cohere-format= --cohere-is-reasoning-model --anthropic-disabled-thinking-effort=""",
}

# Reason -> the flags that are refused for this reason.
REFUSED = {
    "LoRA adapters are not served": """
        --enable-lora --lora-* --max-lora* --max-cpu-loras --fully-sharded-loras --default-mm-loras --specialize-active-lora
        --enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-tower-connector-lora""",
    "on several machines give --data-parallel-hybrid-lb or --headless": """
        --data-parallel-multi-port-external-lb --data-parallel-supervisor-port -dpm""",
    "layers with experts are not split over ranks in this way: use --enable-expert-parallel": """
        --enable-elastic-ep --elastic-ep-max-dp-size --enable-dbo --dbo-decode-token-threshold
        --dbo-prefill-token-threshold --ubatch-size --enable-return-routed-experts""",
    "a sequence is not split over ranks: use --tensor-parallel-size": """
        --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --dcp-q-replicate
        --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size""",
    "give --distributed-executor-backend ray": "--worker-use-ray",
    "CUDA_VISIBLE_DEVICES says which GPUs to use": "--device-ids",
    "no code from outside is loaded into the server": """
        --middleware --tool-parser-plugin --reasoning-parser-plugin --logits-processors --io-processor-plugin
        --worker-cls --worker-extension-cls --scheduler-cls --model-class-overrides --additional-config""",
    "KV caches of encoders are not transferred": "--ec-transfer-config --ec-manager-config",
    "--runner and --convert say what a model does": "--task",
    "use --speculative-config": """
        --spec-method --spec-model --spec-tokens --speculative-model --num-speculative-tokens""",
    "llguidance enforces structured outputs; a request sets the white space": "--structured-outputs-config",
    "use --kv-cache-memory-bytes": "--num-gpu-blocks-override",
    "use --hf-overrides": "--hf-config-path --config-format --rope-scaling --rope-theta",
    "use --quantization, or a checkpoint that is quantized": "--quantization-config",
    "the KV cache has one data type in all layers: --kv-cache-dtype": "--kv-cache-dtype-skip-layers",
    "sliding windows are always computed as the model defines them": "--disable-sliding-window",
    "--tokenizer takes a folder: download the revision that you want": "--tokenizer-revision",
    "the engine does not sleep, and its weights stay as they are": """
        --enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names
        --weight-transfer-config""",
    "TLS uses Python's default ciphers": "--ssl-ciphers",
    "the only protocol is HTTP": "--grpc --grpc-port",
    "the server runs no tools": "--tool-server",
    "each tool sets with `strict` whether its arguments must follow the schema": "--tool-strict-level",
    "tools are in the prompt for every tool_choice": "--exclude-tools-when-tool-choice-none",
    "a request sets variables of its template with chat_template_kwargs": "--reasoning-effort-map",
    "a request sets return_tokens_as_token_ids instead": "--return-tokens-as-token-ids",
    "times are in /metrics and `inflight trace`, not in answers": "--enable-per-request-metrics --profiler-config",
    "prompts are texts or token ids, and only texts and token ids are returned": """
        --enable-prompt-embeds --return-sampling-mask --aux-output-config --tokens-only --enable-scale-out
        --enable-trace-replay --diffusion-config -dc --watermark-config --engram-config""",
}


# Refused flags -> the values with which they ask for nothing that Inflight does not do.
HARMLESS_VALUES = {"--task": ("generate", "auto")}


class ForeignFlag(NamedTuple):
    reason: str
    arity: str  # "" for no value, "=" for one value, "+" for one or more values
    is_refused: bool


def _read(table: dict[str, str], is_refused: bool) -> dict[str, ForeignFlag]:
    return {
        flag.rstrip("=+"): ForeignFlag(reason, flag[len(flag.rstrip("=+")) :], is_refused)
        for reason, flags in table.items()
        for flag in flags.split()
    }


_FOREIGN = _read(NO_EFFECT, False) | _read(REFUSED, True)


def sort_out(arguments: Sequence[str], own: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the command line with our flags only, and a note for each foreign flag that was left out.

    Args:
        arguments: the arguments of a command line.
        own: our flag -> "" if it has no value, "=" if it has a value, "+" if it has a value and may be repeated.

    Raises:
        ConfigError: one of the flags is refused.
    """
    found: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    has_model = False
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            found += [argument, *rest]
            break
        if not argument.startswith("-") or argument == "-":
            found.append(argument)
            has_model = True
            continue
        if argument.startswith("-O."):  # -O.mode 3
            argument = f"--compilation-config{argument.removeprefix('-O')}"
        elif argument.startswith("-O") and argument not in own:  # -O3
            argument = f"--optimization-level={argument.removeprefix('-O')}".removesuffix("=")
        flag, equals, value = argument.partition("=")
        flag = _translate(flag.replace("_", "-") if flag.startswith("--") else flag, own)
        if "=" in flag:  # the foreign flag has no value; it has the same meaning as our flag with a certain value
            flag, equals, value = flag.partition("=")
        is_list = flag.endswith("[]")
        flag = flag.removesuffix("[]")
        if own.get(flag):
            values = [value] if equals else rest[:1]
            del rest[: 0 if equals else 1]
            while own[flag] == "+" and has_model and rest and not rest[0].startswith("-"):
                values.append(rest.pop(0))  # as in --served-model-name a b
            has_value = bool(values)
            if is_list:
                values = [entry for text in values for entry in _json_list(text)]
                if not values and has_value:
                    raise ConfigError(f"{argument}: the list is empty; leave the flag out")
            for text in values:
                found += [flag, SAME_VALUES.get(f"{flag} {text}", text)]
            found += [] if values else [flag]
            has_model |= flag in ("-m", "--model")
        elif flag in HARMLESS_VALUES and (value or next(iter(rest), "")) in HARMLESS_VALUES[flag]:
            del rest[: 0 if equals else 1]
        elif (foreign := _foreign(flag, own)) is not None:
            notes.append(f"{flag} has no effect here: {foreign.reason}")
            if foreign.arity == "=" and not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            while foreign.arity == "+" and not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)
        else:
            found.append(f"{flag}{equals}{value}")
    return found, notes


def _translate(flag: str, own: Collection[str]) -> str:
    """Returns our flag with the same meaning as `flag`, or `flag` itself if we have none. "[]" follows our flag if the foreign
    value is a JSON list, and "=" and a value if `flag` has the meaning of our flag with this value."""
    if flag in own:
        return flag
    for theirs, ours in SAME.items():
        name, mark, _ = theirs.partition("[]")
        if flag == name and "=" in ours and ours.partition("=")[0] in own:
            return ours
        if ours in own and flag in (name, name.replace("--", "--no-", 1)):
            if not name.startswith("--"):
                return ours
            return flag.replace(name.lstrip("-"), ours.lstrip("-")) + mark
    return flag


def _foreign(flag: str, own: Collection[str]) -> ForeignFlag | None:
    """Returns the table's entry for a flag that has no effect here. None if no table has the flag.

    Raises:
        ConfigError: the flag is refused.
    """
    name = flag.partition(".")[0]  # --compilation-config.mode is a field of --compilation-config
    if name in own and name != flag:
        raise ConfigError(f"{flag} is not supported: give {name} one JSON object with all fields")
    foreign = find_flag(name)
    if foreign is None and (switch := find_flag(name.replace("--no-", "--", 1))) is not None and not switch.arity:
        return switch  # the flag switches off a feature that does not exist here
    if foreign is not None and foreign.is_refused:
        raise ConfigError(f"{flag} is not supported: {foreign.reason}")
    return foreign


def find_flag(name: str) -> ForeignFlag | None:
    """Returns the entry of the tables for a flag of another engine."""
    return next((flag for pattern, flag in _FOREIGN.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _json_list(text: str) -> list[str]:
    """The entries of a JSON list of strings. If the text is not such a list, the text is the only entry."""
    try:
        found = json.loads(text)
    except ValueError:
        return [text]
    if isinstance(found, list) and all(isinstance(entry, str) for entry in found):
        return found
    return [text]
