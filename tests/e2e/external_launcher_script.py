"""The script of `test_external_launcher`: FOLDER OUT TP PP MODE, started once per rank by torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from inflight import LLM, SamplingParams
from inflight.errors import EngineError

ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "generation_config": "none",
    "num_threads": 1,
    "block_size": 4,
}
PROMPTS = [[3, 4, 5, 6], list(range(3, 40)), [7] * 20, [9, 3], [3, 4, 5, 6, 7, 8, 9]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=10, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=1.2, max_tokens=20, ignore_eos=True),  # its seed is the engine's
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1),
]


def outputs(llm: LLM) -> list[dict[str, Any]]:
    """Of two calls: the second finds blocks of the first in the prefix cache."""
    rows = []
    for _ in range(2):
        for request in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
            for completion in request.outputs:
                logprobs = [entry.logprob for position in completion.logprobs or () for entry in position.values()]
                rows.append({"token_ids": list(completion.token_ids), "logprobs": logprobs})
    return rows


def main() -> None:
    folder, out, tp, pp, mode = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other ranks, and the test wants their errors
    memory = {"kv_cache_memory_bytes": 1 << 20} if mode else {"gpu_memory_utilization": 0.02}  # else it is measured
    llm = LLM(
        str(folder),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend="external_launcher",
        **ENGINE,
        **memory,
    )
    executor = llm.llm_engine.executor
    result: dict[str, Any] = {"outputs": outputs(llm)}
    if not mode:
        result["available_memory"] = executor.determine_available_memory()
    try:
        if mode == "die":
            interrupted(llm, rank, out)
        if mode == "differ":
            llm.generate([[3 + rank, 4]], PARAMS[0], use_tqdm=False)
    except EngineError as error:
        (out / f"error {rank}.json").write_text(json.dumps([time.time(), str(error)]))
        raise
    (out / f"rank {rank}.json").write_text(json.dumps(result))
    # no close: the end of the script is one


def interrupted(llm: LLM, rank: int, out: Path) -> None:
    engine = llm.llm_engine
    engine.add_request("long", [3, 4, 5], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True))
    for step in range(80):
        if step == 10 and rank == 1:
            (out / "died").write_text(str(time.time()))
            os._exit(7)
        engine.step()


if __name__ == "__main__":
    main()
