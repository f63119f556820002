"""vLLM's CPU build in bfloat16. By default it keeps a core for itself; here its workers get all of them."""

from __future__ import annotations

import os

from benchmarks.compare.driver import Construct, Generate, Settings, serve


def load(settings: Settings) -> Construct:
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {  # read when vllm is imported
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1000000",  # a step may be stopped on its way
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    def construct() -> Generate:
        llm = LLM(
            model=settings.folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            enable_prefix_caching=False,
        )

        def generate(prompts: list[list[int]], output_len: int) -> int:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return generate

    return construct


if __name__ == "__main__":
    serve(load)
