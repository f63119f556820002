"""Vectors and scores as they are used: reranking, long texts, HTTP, memory, and chats beside them.

    python -m benchmarks.pooling [rerank] [cut] [http] [memory] [gaps] [--rounds 3] [--scale 1.0]

- rerank: 100 passages of 200 tokens for one query, by a cross-encoder of MiniLM's shape in float32; against what the
  CrossEncoder of sentence-transformers does: pairs tokenised and sorted by length, in padded batches of 32.
- cut: a text of 300,000 tokens that is cut to 512, against one of 512; the ratio is of times.
- http: `LLM.embed`, against 32 clients of `/v1/embeddings` in base64, which send the same texts, 16 in a request.
- memory: what the process has before and after 20,000 texts.
- gaps: the 99th percentile of the gaps between tokens of two chats, beside two clients that embed, against alone.

Models have random weights. `--scale` multiplies the numbers of passages, of texts and of tokens of chats.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig

from benchmarks.shared.in_turns import compare_in_turns
from benchmarks.shared.models import DEFAULT_MODELS_FOLDER
from benchmarks.shared.models import model_folder as chat_folder
from benchmarks.shared.report import MIB, allow_slow_steps, emit, memory_bytes, percentile, print_table
from benchmarks.shared.served_process import ServedProcess
from benchmarks.speed.embeddings import BATCH_SIZE, SHAPES
from inflight import LLM, PoolingParams

WORDS = 4000
MAX_LEN = 512
NUM_PASSAGES, PASSAGE_WORDS, QUERY_WORDS = 100, 190, 8
LONG_WORDS = 300_000
NUM_CLIENTS, TEXTS_IN_REQUEST, HTTP_TEXTS, HTTP_WORDS = 32, 16, 2048, 60
MEMORY_TEXTS, MEMORY_CALL = 20_000, 1000
CHAT_TOKENS, NUM_CHATS, NUM_EMBEDDING = 150, 2, 2


def word_tokenizer() -> Tokenizer:
    """A token for each word, in the form of BERT's."""
    vocabulary = {word: index for index, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])}
    vocabulary |= {f"word{index}": index + 4 for index in range(WORDS)}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


@contextmanager
def model(*, classes: bool) -> Iterator[Path]:
    """A folder with a BERT of MiniLM's shape, and its tokenizer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = BertConfig(
            **SHAPES["minilm"],
            vocab_size=WORDS + 4,
            max_position_embeddings=MAX_LEN,
            **({"num_labels": 1} if classes else {}),
        )
        torch.manual_seed(0)
        (AutoModelForSequenceClassification if classes else AutoModel).from_config(config).save_pretrained(folder)
        word_tokenizer().save(str(folder / "tokenizer.json"))
        special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        yield folder


def text_of(rng: random.Random, length: int) -> str:
    return " ".join(f"word{rng.randrange(WORDS)}" for _ in range(length))


def url(server: ServedProcess) -> str:
    host, port = server.address
    return f"http://{host}:{port}"


def per_second(count: int, run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        run()
        return count / (time.perf_counter() - begin)

    return timed


def rerank(rounds: int, scale: float) -> list[list[str]]:
    rng = random.Random(1)
    query = text_of(rng, QUERY_WORDS)
    passages = [text_of(rng, PASSAGE_WORDS) for _ in range(round(NUM_PASSAGES * scale))]
    with model(classes=True) as folder, LLM(str(folder), dtype="float32") as llm:
        peer = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = word_tokenizer()
        tokenizer.enable_truncation(MAX_LEN, strategy="longest_first")
        tokenizer.enable_padding(pad_id=0)

        @torch.inference_mode()
        def padded() -> list[float]:
            order = sorted(range(len(passages)), key=lambda index: -len(passages[index]))
            found = [0.0] * len(passages)
            for first in range(0, len(order), BATCH_SIZE):
                batch = order[first : first + BATCH_SIZE]
                encoded = tokenizer.encode_batch([(query, passages[index]) for index in batch])
                logits = peer(
                    input_ids=torch.tensor([each.ids for each in encoded]),
                    attention_mask=torch.tensor([each.attention_mask for each in encoded]),
                    token_type_ids=torch.tensor([each.type_ids for each in encoded]),
                ).logits
                for index, score in zip(batch, torch.sigmoid(logits[:, 0]).tolist(), strict=True):
                    found[index] = score
            return found

        def own() -> list[float]:
            return [each.outputs.score for each in llm.score(query, passages, use_tqdm=False)]

        difference = max(abs(one - other) for one, other in zip(padded(), own(), strict=True))
        emit(benchmark="pooling", case="rerank", largest_difference=difference)
        count = len(passages)
        return [
            compare_in_turns("pooling", "rerank, passages/s", per_second(count, padded), per_second(count, own), rounds)
        ]


def cut(rounds: int, scale: float) -> list[list[str]]:
    rng = random.Random(2)
    long = text_of(rng, round(LONG_WORDS * scale))
    short = " ".join(long.split(" ")[: MAX_LEN - 2])
    params = PoolingParams(truncate_prompt_tokens=-1)
    with model(classes=False) as folder, LLM(str(folder), dtype="float32") as llm:

        def embed(text: str) -> Callable[[], object]:
            return lambda: [llm.embed(text, pooling_params=params, use_tqdm=False) for _ in range(10)]

        return [
            compare_in_turns(
                "pooling", "cut to 512, texts/s", per_second(10, embed(short)), per_second(10, embed(long)), rounds
            )
        ]


def http(rounds: int, scale: float) -> list[list[str]]:
    rng = random.Random(3)
    texts = [text_of(rng, HTTP_WORDS) for _ in range(round(HTTP_TEXTS * scale))]
    requests = [texts[first : first + TEXTS_IN_REQUEST] for first in range(0, len(texts), TEXTS_IN_REQUEST)]
    with (
        model(classes=False) as folder,
        ServedProcess({"model": str(folder), "dtype": "float32", "access_log": "off"}) as server,
        LLM(str(folder), dtype="float32") as llm,
    ):

        async def client(left: list[list[str]], session: httpx.AsyncClient) -> None:
            while left:
                answer = await session.post("/v1/embeddings", json={"input": left.pop(), "encoding_format": "base64"})
                answer.raise_for_status()

        async def serve() -> None:
            left = list(requests)
            async with httpx.AsyncClient(base_url=url(server), timeout=600) as session:
                await asyncio.gather(*(client(left, session) for _ in range(NUM_CLIENTS)))

        count = len(texts)
        return [
            compare_in_turns(
                "pooling", "LLM.embed, HTTP, texts/s",
                per_second(count, lambda: llm.embed(texts, use_tqdm=False)), per_second(count, lambda: asyncio.run(serve())),
                rounds,
            )
        ]  # fmt: skip


def memory(rounds: int, scale: float) -> list[list[str]]:
    rng = random.Random(4)
    texts = [text_of(rng, rng.randint(4, 60)) for _ in range(MEMORY_CALL)]
    with model(classes=False) as folder, LLM(str(folder), dtype="float32") as llm:
        for _ in range(2):
            llm.embed(texts, use_tqdm=False)
        before = memory_bytes("RssAnon")
        calls = round(MEMORY_TEXTS * scale) // MEMORY_CALL
        for _ in range(calls):
            llm.embed(texts, use_tqdm=False)
        after = memory_bytes("RssAnon")
    emit(benchmark="pooling", case="memory", texts=calls * MEMORY_CALL, before=before, after=after)
    return [["MiB, before and after", f"{before / MIB:.1f}", f"{after / MIB:.1f}", f"{after / before:.3f}"]]


def gaps(rounds: int, scale: float) -> list[list[str]]:
    """Both sides are milliseconds, so a ratio above 1 is slower."""
    folder = chat_folder("qwen3-0.6b", DEFAULT_MODELS_FOLDER)
    rng = random.Random(5)
    text = " ".join(rng.choice(["the", "fox", "runs", "far"]) for _ in range(100))
    options = {"model": str(folder), "max_model_len": 1024, "access_log": "off"}
    num_tokens = round(CHAT_TOKENS * scale)
    with ServedProcess(options) as server:
        address = url(server)

        def chat(_: int) -> list[float]:
            body = {"prompt": text, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            times: list[float] = []
            with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=600) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        times.append(time.perf_counter())
            return [later - earlier for earlier, later in itertools.pairwise(times)]

        def slowest(*, beside: bool) -> float:
            stop = threading.Event()

            def embed(_: int) -> None:
                while not stop.is_set():
                    httpx.post(f"{address}/v1/embeddings", json={"input": [text] * 8}, timeout=600).raise_for_status()

            with ThreadPoolExecutor(NUM_CHATS + NUM_EMBEDDING) as threads:
                embedding = [threads.submit(embed, index) for index in range(NUM_EMBEDDING if beside else 0)]
                found = [gap for each in threads.map(chat, range(NUM_CHATS)) for gap in each]
                stop.set()
                for each in embedding:
                    each.result()
            return 1000 * percentile(found, 0.99)

        return [
            compare_in_turns(
                "pooling",
                "p99 gap, ms, alone and beside",
                lambda: slowest(beside=False),
                lambda: slowest(beside=True),
                rounds,
            )
        ]


PARTS: dict[str, Callable[[int, float], list[list[str]]]] = {
    "rerank": rerank, "cut": cut, "http": http, "memory": memory, "gaps": gaps,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Vectors and scores as they are used.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)} [all]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of texts and tokens [%(default)s]")
    args = parser.parse_args(arguments)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    allow_slow_steps()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows = [row for part in args.parts or PARTS for row in PARTS[part](args.rounds, args.scale)]
    print_table(["case", "first", "second", "second / first"], rows)


if __name__ == "__main__":
    main()
