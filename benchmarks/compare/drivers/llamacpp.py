"""llama.cpp through its batch API: the greedy loop that its own server runs, without the server.

One context for all runs, its sequences sharing one cache; it is emptied before each. Flash attention and the cache's dtype
are llama.cpp's own choice.
"""

from __future__ import annotations

import os

from benchmarks.compare.driver import Construct, Generate, Settings, serve

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512  # llama.cpp's default; larger ones are no faster on a CPU

Row = tuple[int, int, int, bool]  # sequence, position, token, whether its logits are wanted


def load(settings: Settings) -> Construct:
    import llama_cpp as lib
    import numpy as np

    silence = lib.llama_log_callback(lambda level, text, user_data: None)  # kept by the closure below, as C calls it

    def construct() -> Generate:
        lib.llama_log_set(silence, None)
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(settings.folder.encode(), lib.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp cannot read {settings.folder}")
        vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        params = lib.llama_context_default_params()
        params.n_ctx = settings.max_kv_tokens
        params.n_batch, params.n_ubatch, params.n_seq_max = BATCH_TOKENS, MICRO_BATCH_TOKENS, settings.max_num_seqs
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = True
        context = lib.llama_init_from_model(model, params)
        batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

        def decode(rows: list[Row], last: list[int]) -> None:
            """One call; `last[sequence]` becomes the most probable token behind each row whose logits are wanted."""
            batch.n_tokens = len(rows)
            for index, (sequence, position, token, wants_logits) in enumerate(rows):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, sequence, wants_logits
            status = lib.llama_decode(context, batch)
            assert status == 0, f"llama_decode returned {status}"
            for index, (sequence, _, _, wants_logits) in enumerate(rows):
                if wants_logits:
                    logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, index), (vocab_size,))
                    last[sequence] = int(logits.argmax())

        def generate(prompts: list[list[int]], output_len: int) -> int:
            lib.llama_memory_clear(lib.llama_get_memory(context), False)
            last = [0] * len(prompts)
            rows = [
                (sequence, position, token, position == len(prompt) - 1)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
            for start in range(0, len(rows), BATCH_TOKENS):
                decode(rows[start : start + BATCH_TOKENS], last)
            for step in range(output_len - 1):
                decode([(i, len(prompt) + step, last[i], True) for i, prompt in enumerate(prompts)], last)
            return len(prompts) * output_len

        return generate

    return construct


if __name__ == "__main__":
    serve(load)
