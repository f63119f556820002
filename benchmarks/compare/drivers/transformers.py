"""transformers: `generate` on one left-padded batch, sdpa, inference mode: what it does best without further packages."""

from __future__ import annotations

import os

from benchmarks.compare.driver import Construct, Generate, Settings, serve


def load(settings: Settings) -> Construct:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def construct() -> Generate:
        model = AutoModelForCausalLM.from_pretrained(
            settings.folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        model.generation_config.eos_token_id = None  # every token counts
        model.generation_config.pad_token_id = 0

        @torch.inference_mode()
        def generate(prompts: list[list[int]], output_len: int) -> int:
            longest = max(map(len, prompts))
            padding = [longest - len(ids) for ids in prompts]
            input_ids = torch.tensor([[0] * pad + ids for pad, ids in zip(padding, prompts, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * len(ids) for pad, ids in zip(padding, prompts, strict=True)])
            output = model.generate(
                input_ids=input_ids, attention_mask=mask, max_new_tokens=output_len, do_sample=False
            )
            return int(output[:, longest:].numel())

        return generate

    return construct


if __name__ == "__main__":
    serve(load)
