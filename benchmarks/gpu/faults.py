"""What only a real GPU can show to be wrong, a part for each fault: `python -m benchmarks.gpu.faults NAME [--device cpu]`.

    mixture    a mixture of experts by transformers' code has the tokens of transformers
    nccl       a world of one rank: collectives are recorded, replayed and aborted, and recorded again in a new world
    recovery   after a step that fails, the next epoch has the tokens of the first; twice
    kv-tiers   tokens with blocks in host memory are those without; the process takes no more memory than was asked for
    files      GPTQ, AWQ and compressed-tensors files have the tokens of the same weights, unpacked

A part emits what it has compared, and fails if two things differ that must not.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks.gpu.arguments import device_parser, measured
from benchmarks.gpu.sizes import random_prompts
from benchmarks.shared.report import emit
from inflight import LLM, SamplingParams
from inflight.device.host_memory import own_bytes

NUM_TOKENS = 24
PROMPTS = random_prompts([40, 9, 70])
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
KV_BYTES = 1 << 26
GIB = float(1 << 30)
SLAB_GIB = {"cuda": 5.0, "cpu": 0.3}  # no power of two
TIER_SLACK = 1.15


class Faults:
    """Each method is a part."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device, folder

    def mixture(self) -> None:
        model = write(Qwen3MoeConfig(**SHAPE, **MIXTURE), self._folder)
        prompt = torch.tensor(PROMPTS[:1])
        with torch.inference_mode():
            options: dict[str, Any] = {
                "do_sample": False,
                "max_new_tokens": NUM_TOKENS,
                "eos_token_id": None,
                "pad_token_id": 0,
            }
            expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
                0, prompt.shape[1] :
            ].tolist()
        for name, more in {"own code": {}, "transformers' code": {"model_impl": "transformers"}}.items():
            with self._engine(self._folder, **more) as llm:
                must_be_equal(f"mixture/{name}", tokens_of(llm, PROMPTS[:1]), [expected])

    def nccl(self) -> None:
        if self._device == "cpu":
            emit(figure="nccl", left_out="NCCL needs a GPU")
            return
        from torch._C._distributed_c10d import HashStore, PrefixStore

        from inflight.device.cuda import record_graph
        from inflight.distributed.nccl import NcclCollectives, connect

        device, store = torch.device("cuda", 0), HashStore()
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            for epoch in range(2):
                communicator = connect(PrefixStore(f"epoch {epoch}", store), 0, 1, device, 60.0)
                group = NcclCollectives(1, 0, communicator)
                x = torch.ones(1 << 16, device=device)
                group.all_reduce(x)
                graph = record_graph(lambda group=group, x=x: group.all_reduce(x.add_(1)))  # type: ignore[misc]
                graph.replay()
                torch.cuda.synchronize(device)
                must_be_equal(f"nccl/{epoch}", [float(x.sum())], [2.0 * (1 << 16)])
                communicator.close()  # while the graph holds it
                graph.reset()

    def recovery(self) -> None:
        write(Qwen3Config(**SHAPE), self._folder)
        with self._engine(self._folder) as llm:
            expected = tokens_of(llm, PROMPTS)
            runner = type(llm.llm_engine.executor._ranks[0].loop._worker.runner)  # type: ignore[attr-defined]
            for fault in range(2):
                with patch.object(runner, "sample", failing_in_the_second_call(runner.sample)):
                    must_be_equal(f"recovery/{fault}", tokens_of(llm, PROMPTS), expected)
            must_be_equal("recovery/count", [llm.llm_engine.core.fault_status().num_recoveries], [{"step_failed": 2}])

    def kv_tiers(self) -> None:
        write(Qwen3Config(**SHAPE), self._folder)
        prompts = random_prompts([100] * 6)
        with self._engine(self._folder) as llm:
            expected = tokens_of(llm, prompts)
        asked = SLAB_GIB[self._device]
        few = {
            "kv_cache_memory_bytes": 5 << 18,
            "max_num_seqs": 2,
        }  # so few blocks that prompts come back from the host
        before = own_bytes()
        with self._engine(self._folder, kv_offloading_size=asked, **few) as llm:
            for turn in range(3):
                must_be_equal(f"kv-tiers/{turn}", tokens_of(llm, prompts), expected)
            taken = (own_bytes() - before) / GIB
        emit(figure="kv-tiers/memory", asked_gib=asked, taken_gib=round(taken, 2))
        if self._device == "cuda" and taken > TIER_SLACK * asked + 1.0:
            raise AssertionError(f"{taken:.2f} GiB were taken where {asked} were asked for")

    def files(self) -> None:
        from tests.support import quantized_checkpoints as packed

        four_bits = {"bits": 4, "group_size": 128}
        gptq = {"quant_method": "gptq", "desc_act": False, "sym": False, **four_bits}
        awq = {"quant_method": "awq", "version": "gemm", "zero_point": True, **four_bits}
        write(Qwen3Config(**SHAPE), self._folder / "plain")
        for name, config, pack in (("gptq", gptq, packed.gptq), ("awq", awq, packed.awq)):
            measured(f"files/{name}", lambda name=name, config=config, pack=pack: self._file(name, config, pack))  # type: ignore[misc]

    def _file(self, name: str, config: dict[str, Any], pack: Callable[[Any], dict[str, torch.Tensor]]) -> None:
        """Writes the model in the format, and with the weights that the format means."""
        from tests.support.quantized_checkpoints import draw

        random, weights = np.random.default_rng(3), load_file(self._folder / "plain" / "model.safetensors")
        stored = {}
        for weight, tensor in list(weights.items()):
            module = weight.removesuffix(".weight")
            if not module.endswith("_proj"):
                stored[weight] = tensor
                continue
            drawn = draw(random, *tensor.shape, bits=4, group_size=128)
            weights[weight] = drawn.weight()
            stored |= {f"{module}.{part}": value for part, value in pack(drawn).items()}
        fields = json.loads((self._folder / "plain" / "config.json").read_text())
        found = []
        for kind, tensors, more in (("means", weights, {}), ("packed", stored, {"quantization_config": config})):
            folder = self._folder / f"{name}-{kind}"
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps({**fields, **more}))
            with self._engine(folder) as llm:
                found.append(tokens_of(llm, PROMPTS))
        must_be_equal(f"files/{name}", found[1], found[0])

    def _engine(self, folder: Path, **more: Any) -> LLM:  # Any: arguments of LLM
        fixed: dict[str, Any] = {
            "device": self._device,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": KV_BYTES,
            "distributed_executor_backend": "uni",
        }
        return LLM(str(folder), **{**fixed, **({"num_threads": 1} if self._device == "cpu" else {}), **more})


PARTS: dict[str, Callable[[Faults], None]] = {
    "mixture": Faults.mixture,
    "nccl": Faults.nccl,
    "recovery": Faults.recovery,
    "kv-tiers": Faults.kv_tiers,
    "files": Faults.files,
}


def write(config: Any, folder: Path) -> Any:  # Any: a config and a model of transformers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.1)
    model.save_pretrained(folder)
    return model


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def must_be_equal(figure: str, found: list[Any], expected: list[Any]) -> None:
    if found != expected:
        raise AssertionError(f"{figure}: {found} in place of {expected}")
    emit(figure=figure, equal=len(found))


def failing_in_the_second_call(function: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count()

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("a fault of the check")
        return function(*arguments, **more)

    return call


def main() -> None:
    parser = device_parser(__doc__)
    parser.add_argument("name", choices=PARTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured(args.name, lambda: PARTS[args.name](Faults(args.device, Path(folder))))


if __name__ == "__main__":
    main()
