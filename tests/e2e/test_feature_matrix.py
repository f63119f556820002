"""Features together: a generated covering array, each row token-identical to the plain synchronous run.

A row is an engine (depth, ranks as threads, chunked prefill, prefix cache, a KV cache that is too small, blocks kept in host
memory, n-gram speculation, a core that loses all requests, so that they are resumed) and what its requests ask for (n > 1,
sampling, penalties, log-probabilities, a grammar, a bound for the reasoning, stop strings, an abort), and whether others make
vectors beside them. One of the models reads images, and some of its prompts have them. Two requests of each
schedule ask for all of it, the others for some. Each row has schedules of its own.

`make test-full` has every three features together, and many schedules of each row. `make test` has the first half of the rows:
every two features together, and 97 % of all threes, because each row is chosen for the most combinations that are new.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedConfig

from inflight import AsyncLLM, RequestOutput, SamplingParams
from inflight.config.engine_args import EngineArgs
from inflight.config.parse_architecture import parse_architecture
from inflight.config.vision import Grid, VisionSpec
from inflight.engine.request.request_state import RequestOutputKind
from inflight.hub import read_config
from inflight.structured_outputs_params import StructuredOutputsParams
from tests.conftest import FULL
from tests.e2e.identity import (
    IMAGES,
    MARGIN,
    PLAIN,
    POOLING,
    Engines,
    Event,
    Features,
    compare,
    examples,
    reference_scores,
    run_example,
)
from tests.support.covering_array import Row, covering_array
from tests.support.eagle_models import write_head
from tests.support.fakes_tokenizer import save_folder, trained
from tests.support.image_chats import make_chat
from tests.support.model_zoo import FAMILY_CONFIGS, write_model
from tests.support.mtp_models import write_mtp_model
from tests.support.vision_models import VISION_CONFIGS, write_vision_model
from tests.support.vision_models import reference_model as reference_with_images
from tests.support.waits import wait_until

# the first example of hypothesis is always the plainest
NUM_EXAMPLES = 60 if FULL else 3
NUM_ROWS = 36  # in `make test`
NUM_PROCESS_EXAMPLES = 20 if FULL else 3
TOKENIZER = "byte_level"
MAX_MODEL_LEN, MAX_PROMPT, MAX_TOKENS = 128, 80, 24
NUM_DRAFTS = 3
# (configuration, block size): blocks of 16 are attended to by the C++ kernel, of 4 by plain torch. The last one also reads
# images: some prompts have them, with three positions a token, and features for a decoder layer.
IMAGES_AND_EXPERTS = "images and experts"
MODELS: dict[str, tuple[PreTrainedConfig, int]] = {
    "full": (FAMILY_CONFIGS["llama"][0], 16),
    "windows": (FAMILY_CONFIGS["qwen3"][4], 4),
    IMAGES_AND_EXPERTS: (VISION_CONFIGS["qwen3_vl_moe"][0], 16),
}
GRIDS: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 8))
MAX_IMAGE_TOKENS = 12  # of a prompt

GRAMMARS = {
    "json": StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"name": {"enum": ["girl", "fox"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        disable_any_whitespace=True,
    ),
    "regex": StructuredOutputsParams(regex=r"(the (quick|lazy) ){1,3}(dog|fox)[0-9]{0,4}"),
    "choice": StructuredOutputsParams(choice=["yes", "the quick brown fox", "the quick dog", "naïve 東京 🙂"]),
    "grammar": StructuredOutputsParams(grammar='start: WORD (" and " WORD)~1..4\nWORD: "dog" | "fox" | /[0-9]{1,2}/'),
    "json_object": StructuredOutputsParams(json_object=True),
}
PROMPTS = [
    '{"name":"girl","age":42} {"name":"fox","age":7} ',
    "the quick brown fox and the lazy dog and ",
    "Größe 東京 ",
    "print(f(41)) ",
]
TAG = {"reasoning_end_str": "quick;;"}  # the reasoning is open from the beginning; "quick" is written before the tag
PENALTIES = [{"repetition_penalty": 1.2}, {"frequency_penalty": 0.6}, {"presence_penalty": -0.5}]
STOPS = [["e"], ["he", "1"], [" an", "}"], ["fo", '":'], ["\n"]]

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "depth": (1, 2),
    "pp": (1, 2),
    "tp": (1, 2),
    "chunk": (False, True),
    "cache": (False, True),
    "preempt": (False, True),
    "abort": (False, True),
    "n": (False, True),
    "sampled": (False, True),
    "penalties": (False, True),
    "logprobs": (False, True),
    "grammar": (None, *GRAMMARS),
    "drafts": (None, "ngram", "draft_model"),
    "stop": (False, True),
    "budget": (False, True),
    "resume": (False, True),
    "host pool": (False, True),
    "pool": (False, True),
}


CELLS = covering_array(FACTORS, strength=3)[: None if FULL else NUM_ROWS]
for cell in [cell for cell in CELLS if cell["drafts"] == "ngram"][::2]:  # both methods see tokens only
    cell["drafts"] = "suffix"
for cell in [cell for cell in CELLS if cell["drafts"] == "draft_model"][::2]:  # these have weights and keys, too
    cell["drafts"] = "mtp" if cell["model"] == "windows" else "eagle3"
for cell in [cell for cell in CELLS if (cell["model"], cell["tp"]) == (IMAGES_AND_EXPERTS, 2)][::2]:
    cell["ep"] = True  # only the experts are divided in another way
# an engine of processes takes seconds to start: one of every layout, with grammars and drafts
PROCESS_CELLS = [
    next(cell for cell in CELLS if (cell["tp"], cell["pp"]) == layout and cell["grammar"] and cell["drafts"])
    for layout in ((2, 1), (1, 2), (2, 2))
]
PROCESS_CELLS.append(
    {**PROCESS_CELLS[0], "model": IMAGES_AND_EXPERTS, "ep": True}
)  # which exchange rows in shared memory


def name_of(cell: Row) -> str:
    """What is on, and the values of what is more than on or off."""
    shown = {name: value for name, value in cell.items() if value}
    return " ".join(name if value is True else f"{name}={value}" for name, value in shown.items())


def features_of(cell: Row, drafters: dict[str, Path]) -> Features:
    """`drafters`: method -> what `speculative_config` names as its model."""
    return Features(
        caching=bool(cell["cache"]),
        chunk=11 if cell["chunk"] else None,
        tight=bool(cell["preempt"]),
        max_num_seqs=4,
        plans_ahead=cell["depth"] == 2,
        tensor_parallel_size=2 if cell["tp"] == 2 else 1,
        pipeline_parallel_size=2 if cell["pp"] == 2 else 1,
        expert_parallel=bool(cell.get("ep")),
        num_drafts=NUM_DRAFTS if cell["drafts"] else 0,
        draft_method=str(cell["drafts"] or "ngram"),
        draft_model=drafters.get(str(cell["drafts"])),
        resumed_at=(5, 12, 30, 60) if cell["resume"] else (),
        offloads=bool(cell["host pool"]),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A text again and again, so that n-grams occur and beginnings are shared, and some more tokens."""
    text = trained(TOKENIZER).encode(draw(st.sampled_from(PROMPTS)), add_special_tokens=False).ids
    tail = draw(st.lists(st.integers(10, 60), max_size=6))
    return [*(text * 20)[: draw(st.integers(1, MAX_PROMPT - 6))], *tail]


@st.composite
def prompts_with_images(draw: st.DrawFn, spec: VisionSpec) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and the field of its images. Texts and images are few, so that the same image comes again, and other ones come
    behind and before the same text, within a block and in several."""
    text = trained(TOKENIZER).encode(draw(st.sampled_from(PROMPTS[:2])), add_special_tokens=False).ids
    tail = draw(st.lists(st.integers(10, 60), max_size=6))
    length = draw(st.integers(12, MAX_PROMPT - MAX_IMAGE_TOKENS - len(tail)))
    pieces: list[int | tuple[int, Grid]] = [*(text * 20)[:length], *tail]
    for _ in range(draw(st.sampled_from([1, 2, 0]))):
        pieces.insert(
            draw(st.sampled_from([5, 0, 11])), (draw(st.sampled_from([1, -1, 2])), draw(st.sampled_from(GRIDS)))
        )
    chat = make_chat(pieces, spec)
    return chat.tokens, {IMAGES: chat.part(spec)} if chat.images else {}


@st.composite
def requests(draw: st.DrawFn, cell: Row, all_features: bool) -> dict[str, Any]:
    """Fields of SamplingParams: of all that the cell names, or of some."""

    def has(name: str) -> bool:
        return bool(cell[name]) and (all_features or draw(st.booleans()))

    fields: dict[str, Any] = {"max_tokens": draw(st.integers(10 if all_features else 1, MAX_TOKENS))}
    fields["temperature"] = draw(st.sampled_from([0.5, 1.0, 1.5])) if has("sampled") else 0.0
    if has("n"):
        fields["n"] = draw(st.integers(2, 3)) if fields["temperature"] else 2
    if has("penalties"):
        fields |= draw(st.sampled_from(PENALTIES))
    if has("logprobs"):
        fields["logprobs"] = draw(st.integers(0, 3))
        fields["prompt_logprobs"] = draw(st.sampled_from([None, 1]))
    if has("stop"):
        fields["stop"] = draw(st.sampled_from(STOPS))
        fields["include_stop_str_in_output"] = draw(st.booleans())
    if has("budget"):
        fields["thinking_token_budget"] = draw(st.integers(0, 12))
    if has("grammar"):
        fields["structured_outputs"] = GRAMMARS[str(cell["grammar"])]
    elif has("drafts"):  # few tokens to choose from: what was drawn before comes again
        few = draw(st.lists(st.integers(10, 90), min_size=2, max_size=4, unique=True))
        if "thinking_token_budget" in fields:
            fields["logit_bias"] = dict.fromkeys(few, 50.0)
        else:
            fields["allowed_token_ids"] = few
    return fields


@st.composite
def schedules(draw: st.DrawFn, cell: Row, spec: VisionSpec | None) -> list[Event]:
    """The second request, which asks for all, is aborted when the third has arrived, if the cell has aborts."""
    events: list[Event] = []
    for i in range(draw(st.integers(3, 6))):
        aborts = bool(cell["abort"]) and (i == 2 or draw(st.booleans()))
        prompt, images = (draw(prompts()), {}) if spec is None else draw(prompts_with_images(spec))
        fields = {**draw(requests(cell, i < 2)), **images}
        events.append((prompt, fields, draw(st.integers(0, 5)), aborts and i > 1))
        if cell["pool"] and (i == 1 or draw(st.booleans())):
            task = draw(st.sampled_from(["embed", "token_embed"]))
            events.append((draw(prompts()), {POOLING: task}, draw(st.integers(0, 5)), False))
    return events


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engines]]:
    made = {}
    for name, (plain_config, block_size) in MODELS.items():
        config = copy.deepcopy(plain_config)
        text = config.get_text_config()
        text.vocab_size = trained(TOKENIZER).get_vocab_size() + 7  # padded, as checkpoints are
        text.bos_token_id, text.eos_token_id = 0, 1
        folder = tmp_path_factory.mktemp("matrix") / "model"
        shared = {"reasoning_config": TAG}
        if name == IMAGES_AND_EXPERTS:
            config.image_token_id = text.vocab_size - 1
            write_vision_model(config, folder, seed=1)
            made[name] = Engines(folder, block_size, reference_with_images, max_model_len=MAX_MODEL_LEN, shared=shared)
        else:
            write = write_mtp_model if name == "windows" else write_model
            write(config, folder, seed=1)
            made[name] = Engines(folder, block_size, max_model_len=MAX_MODEL_LEN, shared=shared)
        layers: dict[str, object] = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
        write_head(folder, folder.parent / "head", "eagle3", seed=1, num_captured=2, head_size=100, fields=layers)
        save_folder(folder, TOKENIZER)
    yield made
    for name, found in made.items():
        print(f"{name}: {found.num_tokens} tokens, {found.num_ties} ties, {found.num_vectors} vectors")
        found.close()


def vision_of(engines: Engines) -> VisionSpec | None:
    return parse_architecture(read_config(engines.folder)).vision


def drafters_of(made: dict[str, Engines], model: str) -> dict[str, Path]:
    """Method -> what `speculative_config` names as the model that writes drafts."""
    return {"draft_model": made["full"].folder, "eagle3": made[model].folder.parent / "head"}


def run_cell(made: dict[str, Engines], cell: Row, executor: str, num_examples: int) -> None:
    engines = made[str(cell["model"])]
    engines.arguments = {"distributed_executor_backend": executor}
    features = features_of(cell, drafters_of(made, str(cell["model"])))

    @examples(num_examples, f"{executor} {name_of(cell)}")
    @given(events=schedules(cell, vision_of(engines)))
    def check(events: list[Event]) -> None:
        run_example(engines, features, events)

    try:
        check()
    finally:
        engines.close(but=PLAIN)


def test_the_rows_have_every_two_features_together() -> None:
    names = [name for name in FACTORS if name != "drafts"]  # some of its values share the rows of one
    for one, other in itertools.combinations(names, 2):
        found = {(cell[one], cell[other]) for cell in CELLS}
        assert found == set(itertools.product(FACTORS[one], FACTORS[other])), (one, other)


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("kind", [None, *GRAMMARS])
def test_the_plain_run_draws_what_the_reference_draws(
    engines: dict[str, Engines], kind: str | None, budget: int | None
) -> None:
    """So that the plain run is right, and that a tie is found with all that changes logits."""
    fields: dict[str, Any] = {} if budget is not None else {"allowed_token_ids": [40, 41, 50]}
    fields = fields if kind is None else {"structured_outputs": GRAMMARS[kind]}
    params = SamplingParams(
        n=2, temperature=1.2, seed=3, max_tokens=12, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=-0.5,
        logit_bias={40: 1.0, 41: -0.5}, thinking_token_budget=budget, **fields,
    )  # fmt: skip
    found, prompt = engines["full"], [40, 50, 60, 40]
    for completion in found.plain(prompt, params).outputs:
        for i, token in enumerate(completion.token_ids):
            scores = reference_scores(found, prompt, completion.token_ids[:i], params, completion.index)
            assert scores.max() - scores[token] < MARGIN


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        *((model, "ngram") for model in MODELS),
        *(("full", "suffix"), ("full", "draft_model"), ("full", "eagle3"), ("windows", "mtp")),
    ],
)
def test_every_feature_is_at_work(engines: dict[str, Engines], model: str, drafts: str) -> None:
    """So that the rows compare something: on one engine with all of them, each leaves its trace in the counters."""
    features = Features(
        caching=True, chunk=11, tight=True, max_num_seqs=4, plans_ahead=True, num_drafts=NUM_DRAFTS, offloads=True,
        draft_method=drafts, draft_model=drafters_of(engines, model).get(drafts),
    )  # fmt: skip
    text = trained(TOKENIZER).encode(PROMPTS[0], add_special_tokens=False).ids
    spec = vision_of(engines[model])
    events: list[Event] = []
    for i, kind in enumerate((None, "json", "regex", None, "json", "choice", None)):
        fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "n": 2}
        fields |= {"allowed_token_ids": [40, 41]} if kind is None else {"structured_outputs": GRAMMARS[kind]}
        prompt = (text * 4)[: 60 + i]
        if spec is not None:
            chat = make_chat([*prompt[:20], (1 + i % 2, GRIDS[0]), *prompt[20:]], spec)
            prompt, fields[IMAGES] = chat.tokens, chat.part(spec)
        events.append((prompt, fields, 2, False))
    try:
        scheduler = engines[model].llm(features).llm_engine.core.scheduler
        for _ in range(2):  # the second time with blocks from host memory
            run_example(engines[model], features, events)
            wait_until(lambda: scheduler.transfers.settle() or not scheduler.transfers.is_running)
        stats, transfers = scheduler.stats, scheduler.transfers.take_counts()
    finally:
        engines[model].close(but=PLAIN)
    assert transfers is not None and min(transfers.num_saved_blocks, transfers.num_loaded_blocks) > 0
    assert min(stats.num_preemptions, stats.num_hit_tokens, stats.num_forced_tokens) > 0
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens > 0 or drafts in ("eagle3", "mtp")  # whose random weights are right by chance only


@pytest.mark.parametrize(
    "pair", [*itertools.combinations(("grammar", "cache", "preempt", "host pool"), 2)], ids=" ".join
)
@pytest.mark.parametrize(("model", "drafts"), [("full", "eagle3"), ("windows", "mtp")])
def test_a_layer_that_writes_drafts_with_two_features(
    engines: dict[str, Engines], model: str, drafts: str, pair: tuple[str, str]
) -> None:
    """Twice, so that the second run finds blocks where there are any; the drafts are other ones then."""
    features = Features(
        caching="cache" in pair,
        chunk=None,
        tight="preempt" in pair,
        max_num_seqs=4,
        plans_ahead=True,
        num_drafts=NUM_DRAFTS,
        offloads="host pool" in pair,
        draft_method=drafts,
        draft_model=drafters_of(engines, model).get(drafts),
    )
    text = trained(TOKENIZER).encode(PROMPTS[0], add_special_tokens=False).ids
    events: list[Event] = []
    for i, kind in enumerate(("json", None, "regex", "choice")):
        fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.7, "n": 2 if "preempt" in pair else 1}
        if kind is not None and "grammar" in pair:
            fields["structured_outputs"] = GRAMMARS[kind]
        events.append(((text * 4)[: 50 + 7 * i], fields, 2, False))
    try:
        llm = engines[model].llm(features)
        for _ in range(2):
            run_example(engines[model], features, events)
        stats = llm.llm_engine.core.scheduler.stats
    finally:
        engines[model].close(but=PLAIN)
    assert stats.num_draft_tokens > 0
    assert stats.num_preemptions > 0 or "preempt" not in pair
    assert stats.num_hit_tokens > 0 or not {"cache", "host pool"} & {*pair}
    assert stats.num_forced_tokens > 0 or "grammar" not in pair


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_tokens_are_those_of_the_plain_run(engines: dict[str, Engines], cell: Row) -> None:
    run_cell(engines, cell, "uni", NUM_EXAMPLES)


@pytest.mark.parametrize("cell", PROCESS_CELLS, ids=name_of)
def test_tokens_of_ranks_that_are_processes(engines: dict[str, Engines], cell: Row) -> None:
    run_cell(engines, cell, "mp", NUM_PROCESS_EXAMPLES)


def test_tokens_of_replicas(engines: dict[str, Engines]) -> None:
    """Two replicas with drafts, chunks and prefix caches, and requests with everything else. One of the two is killed."""
    found = engines["full"]
    features = Features(caching=True, chunk=11, tight=False, max_num_seqs=4, plans_ahead=True, num_drafts=NUM_DRAFTS)
    args = EngineArgs(
        model=str(found.folder),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=found.block_size,
        kv_cache_memory_bytes=1 << 21,
        generation_config="none",
        num_threads=1,
        data_parallel_size=2,
        reasoning_config=TAG,
        **features.arguments(MAX_MODEL_LEN),
    )
    text = trained(TOKENIZER).encode(PROMPTS[0], add_special_tokens=False).ids
    requests: list[tuple[list[int], SamplingParams]] = []
    for i, kind in enumerate((None, "json", "regex", None, "grammar", "choice", None, "json_object")):
        fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "n": 2, "logprobs": i % 3, "seed": i}
        fields |= {**PENALTIES[i % 3], "stop": STOPS[i % 5], "include_stop_str_in_output": True}
        fields |= {"logit_bias": {40: 50.0, 41: 50.0}} if kind is None else {"structured_outputs": GRAMMARS[kind]}
        fields |= {"thinking_token_budget": i} if i % 2 else {}
        requests.append(((text * 4)[: 60 + i], SamplingParams(**fields)))

    async def one(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
        (output,) = [each async for each in engine.generate(prompt, params, kind=RequestOutputKind.FINAL_ONLY)]
        return output

    async def generate() -> list[RequestOutput]:
        async with await AsyncLLM.from_args(args) as engine:
            running = [asyncio.create_task(one(engine, *request)) for request in requests]
            while not all(each.num_requests for each in engine._replicas.engines):
                await asyncio.sleep(0)
            process = engine._keepers[1].process
            assert process is not None
            os.kill(process.process.pid, signal.SIGKILL)
            return await asyncio.gather(*running)

    for (prompt, params), output in zip(requests, asyncio.run(generate()), strict=True):
        compare(found, output, found.plain(prompt, params), params)
