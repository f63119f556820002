"""Inflight: `LLM` on token ids."""

from __future__ import annotations

from benchmarks.compare.driver import Construct, Generate, Settings, serve


def load(settings: Settings) -> Construct:
    from inflight import LLM, SamplingParams

    def construct() -> Generate:
        weights = settings.weight_format  # the head, too: peers quantize it with the rest
        quantization = {} if weights in ("bf16", "gguf") else {"quantization": weights, "head_quantization": weights}
        arguments = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": settings.kv_bytes,
            **quantization,
            **settings.engine_args,
        }
        llm = LLM(settings.folder, **arguments)

        def generate(prompts: list[list[int]], output_len: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return generate

    return construct


if __name__ == "__main__":
    serve(load)
