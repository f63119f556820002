"""Which files are the core, as data: what one person must have read to change how a token is made.

The core makes the tokens of a plain dense decoder on a CPU, with one rank or several: it plans steps, owns the KV cache,
starts ranks, sends plans to them, survives their faults, loads and computes layers, draws, and serves callers in other
processes. An edge is read alone, by who changes it: an API, a parser, a model family, a file format, a tier, another device,
what describes a run. `scripts/core.py` counts both. A new file of a core room is core, unless it is added to an edge here.
"""

from __future__ import annotations

from fnmatch import fnmatch

# Rooms of rooms.py, and files of rooms that are edges otherwise
CORE = (
    *("errors", "envs", "timeline", "event_buffer", "sockets", "handshake", "strangers"),
    *("sampling_params", "config", "interface", "outputs", "tokenizer", "kv_cache", "scheduler"),
    *("device", "kernels", "distributed", "attention", "layers", "models", "model_loader", "sample", "worker"),
    *("processes", "executor", "engine"),
    "entrypoints/llm*.py",
)

# Kind of edge -> its files in the rooms above. `*` stands for any characters, "/" too. All other rooms are edges.
EDGES = {
    "model families": (
        *("config/families/*", "config/unknown_family.py", "config/parse_rope.py", "layers/rope_frequencies.py"),
        *("models/transformers_fallback/*", "worker/fewer_threads.py", "config/overrides.py"),
    ),
    "layers that a plain decoder does not have": (
        *("layers/gated_delta.py", "layers/latent_attention.py", "layers/short_conv.py", "layers/recurrent_*.py"),
        *("kernels/gated_delta.py", "kernels/cpu/gated_delta.py", "kernels/short_conv.py"),
        *(
            "config/experts.py",
            "layers/moe.py",
            "layers/dense_and_moe.py",
            "layers/biased_head.py",
            "kernels/expert_choice.py",
            "kernels/cpu/experts.py",
            "kernels/cpu/expert_exchange.py",
            "config/expert_args.py",
            "config/eplb.py",
            "config/expert_parallel.py",
            "distributed/expert_parallel.py",
            "distributed/replica_experts.py",
            "worker/expert_worker.py",
            "worker/expert_balance/*",
            "kernels/cpu/expert_balance.py",
            "interface/expert_counts.py",
        ),
        *("kv_cache/window_group.py", "kv_cache/partings.py", "layers/qk_norm.py"),
        *("kernels/swiglu_oai.py", "layers/attention_sinks.py", "attention/torch_cap_and_sinks.py"),
        *("layers/layer_norm.py", "layers/plain_mlp.py", "config/plain_mlp.py", "layers/added_embeddings.py"),
        *("layers/token_inputs.py", "layers/position_bias.py", "models/shared_layers.py"),
        *("config/whole_prompts.py", "config/added_embeddings.py", "kernels/encoder_ops.py"),
    ),
    "images": (
        *("config/vision.py", "models/vision/*", "interface/image*.py", "scheduler/encoder_inputs.py"),
        *("worker/parts/image*.py", "layers/mrope.py", "attention/image_ends.py"),
        *("config/image_args.py", "engine/request/prepared_prompt.py", "interface/packed_arrays.py"),
        "engine/request/image_support.py",
    ),
    "watching an engine": (
        *("interface/engine_view.py", "kv_cache/block_states.py", "scheduler/watched_state.py"),
        *("engine/process/engine_watch.py", "engine/serving/engine_views.py"),
    ),
    "attention without the C++ kernels": ("attention/torch_sdpa.py",),
    "file formats": (
        *("config/gguf_*.py", "config/safetensors_file.py", "config/stored_*.py", "config/weight_format.py"),
        *("config/separate_quantization.py", "model_loader/gguf_*.py", "model_loader/gptq.py"),
        *("model_loader/stacked_experts.py", "model_loader/float8*.py", "model_loader/open_source.py"),
        "model_loader/stored_names.py",
        "model_loader/mxfp4*.py",
        "engine/start/unused_generation_fields.py",
        *("model_loader/compressed_tensors.py", "model_loader/pack*.py", "tokenizer/gguf_*.py"),
    ),
    "chats": (
        *("tokenizer/history/*", "tokenizer/sandbox/*", "tokenizer/chat_template.py", "tokenizer/template_form.py"),
        *("tokenizer/messages.py", "tokenizer/probes.py", "tokenizer/reasoning_effort.py", "config/reasoning.py"),
        *(
            "tokenizer/call_arguments.py",
            "tokenizer/content_parts.py",
            "tokenizer/image_parts.py",
            "engine/request/chats.py",
            "engine/request/chat_images.py",
            "tokenizer/user_tokenizer.py",
        ),
    ),
    "grammars": (
        *("scheduler/grammars.py", "kernels/token_masks.py", "kernels/triton/token_masks.py"),
        *("engine/request/answer_frames.py", "tokenizer/vocabulary_bytes.py"),
    ),
    "KV tiers and events": (
        *("config/kv_tiers.py", "config/kv_transfer.py", "config/kv_events.py", "scheduler/kv_*.py"),
        *("scheduler/transfers.py", "worker/kv_transfers.py", "device/block_copies.py", "kv_cache/arc_pool.py"),
        *(
            "kv_cache/kept_blocks.py",
            "engine/start/contents.py",
            "kv_cache/block_events.py",
            "interface/block_events.py",
            "engine/process/kv_event_publisher.py",
        ),
    ),
    "GPUs": (
        *("kernels/triton/*", "device/cuda.py", "device/host_memory.py", "config/cuda_driver.py"),
        *(
            "attention/triton_paged.py",
            "layers/gpu_linear.py",
            "layers/gpu_choices.py",
            "layers/linear_tuner.py",
            "sample/device_sampler.py",
        ),
        "layers/gpu_experts.py",
        *("worker/gpu/*", "distributed/nccl.py", "distributed/device_stage_link.py"),
    ),
    "results beside the tokens": (
        *("interface/prompt_logprobs.py", "worker/parts/prompt_logprobs.py", "sample/logprobs.py"),
        "engine/request/token_logprobs.py",
        "engine/request/siblings.py",
    ),
    "vectors instead of text": (
        *("config/*pooler.py", "config/sentence_transformers.py", "layers/pooler.py"),
        *(
            "interface/pooling.py",
            "worker/parts/pooling.py",
            "tokenizer/cut_text.py",
            "tokenizer/text_pair.py",
            "tokenizer/prompted_pair.py",
            "tokenizer/lower_case.py",
            "config/prompted_reranker.py",
            "interface/token_types.py",
            "worker/parts/token_types.py",
            "engine/request/prompt_request.py",
        ),
    ),
    "drafts": (
        *("sample/verification.py", "worker/draw_rows.py", "config/speculative.py", "engine/start/draft_model.py"),
        *("worker/step_drafts.py", "config/hidden_inputs.py", "models/drafting_layer.py", "models/make_decoder.py"),
        *("config/eagle.py", "engine/start/eagle_head.py", "models/eagle3_layer.py", "models/captured_layers.py"),
    ),
    "what measures pipelines": ("engine/start/pipeline_tuning.py",),
    "several engines of one model": (
        *("engine/serving/replicas.py", "engine/serving/routing.py", "engine/serving/cached_index.py"),
        *("engine/process/remote_replica.py", "engine/process/head_links.py", "kv_cache/*_names.py"),
        "engine/lockstep/*",
    ),
    "ranks that others start": (
        *("executor/ray_*.py", "executor/external_launcher.py", "distributed/launcher.py", "executor/node.py"),
    ),
    "weights that are too large to be in memory twice": (
        *("kernels/weight_rows.py", "kernels/cpu/packing_rows.py", "model_loader/streamed_rows.py"),
    ),
    "weights that are read beside other programs": ("model_loader/loading_threads.py",),
    "what is refused before weights are read": (
        *("config/weight_room.py", "config/replica_conflicts.py", "model_loader/weight_check.py"),
    ),
    "what describes a run": (
        *(
            "scheduler/integrity.py",
            "worker/profiling.py",
            "engine/core/chrome_trace.py",
            "engine/core/step_figures.py",
        ),
        *("engine/serving/readiness.py", "engine/serving/output_lengths.py"),
    ),
}


def kind_of(path: str) -> str:
    """The kind of edge that a file is, or "" if it is core. `path` is relative to the package: "config/engine.py"."""
    found = next((kind for kind, patterns in EDGES.items() if any(fnmatch(path, each) for each in patterns)), None)
    if found is not None:
        return found
    room = path.split("/")[0].removesuffix(".py")
    return "" if room in CORE or any("/" in each and fnmatch(path, each) for each in CORE) else room
