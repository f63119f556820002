"""OpenVINO GenAI's continuous batching. fp16 weights are computed in bfloat16, its fastest 16-bit setting."""

from __future__ import annotations

from benchmarks.compare.driver import Construct, Generate, Settings, serve

MAX_NUM_BATCHED_TOKENS = 2048


def load(settings: Settings) -> Construct:
    import numpy as np
    import openvino
    import openvino_genai

    def construct() -> Generate:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings.kv_gib
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.max_num_seqs = settings.max_num_seqs
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_PRECISION_HINT": "bf16"} if settings.weight_format == "fp16" else {}
        pipeline = openvino_genai.ContinuousBatchingPipeline(settings.folder, scheduler, "CPU", properties)

        def generate(prompts: list[list[int]], output_len: int) -> int:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
            tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
            results = pipeline.generate(tensors, [config] * len(tensors))
            return sum(len(result.m_generation_ids[0]) for result in results)

        return generate

    return construct


if __name__ == "__main__":
    serve(load)
