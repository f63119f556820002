"""A constraint always holds: whatever the template, the parser and the model's habit, an answer that ends satisfies it.

Scripted models write what they like as far as the masks allow it, and end as soon as they may. Their answers are read by the
parser that the server makes for the request.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from inflight.entrypoints.fields.images import RequestImages
from inflight.entrypoints.http.chat import validate_chat
from inflight.entrypoints.http.validated import ValidatedRequest
from inflight.entrypoints.openai.chat import read_chat
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.entrypoints.written_answer import written_answer
from inflight.parsers.selector import resolve_parsers
from inflight.sampling_params import SamplingParams
from inflight.structured_output.backend import GrammarBackend
from inflight.structured_output.llguidance_backend import LLGuidanceBackend
from inflight.structured_output.manager import MaskRequest, StructuredOutputManager
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.folder_tokenizer import folder_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer
from inflight.tokenizer.vocabulary_bytes import vocabulary_bytes
from tests.conftest import FULL
from tests.unit.parsers.test_selector import END, QWEN_CALLS, TEMPLATES, TURN
from tests.unit.structured_output.grammar_case import MODEL, allowed_ids

MAX_TOKENS = 150
TAGS = ["<think>", "</think>"]
HARMONY = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"]
MISTRAL = ["[THINK]", "[/THINK]"]


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """That of the embedded model, with tags as tokens or as text."""
    state = json.loads(folder_tokenizer(MODEL).to_json())
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in (TAGS if kind == "tags" else [])])
    backend.add_special_tokens(
        [tokenizers.AddedToken(t, normalized=False) for t in (HARMONY + MISTRAL if kind == "tags" else [])]
    )
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@functools.cache
def grammars(kind: str) -> GrammarBackend:
    ids = tokenizer(kind)
    ends = ["<|im_end|>", "<|return|>", "<|call|>"] if kind == "tags" else ["<|im_end|>"]
    eos = [token_id for token_id in range(ids.vocab_size) if ids.id_to_piece(token_id) in ends]
    return LLGuidanceBackend(ids, ids.vocab_size + 9, eos)


MANAGERS: dict[str, StructuredOutputManager] = {}


def manager(kind: str) -> StructuredOutputManager:
    backend = grammars(kind)
    if kind not in MANAGERS:
        MANAGERS[kind] = StructuredOutputManager(lambda: backend, backend.vocab_size, num_buffers=1)
    return MANAGERS[kind]


@pytest.fixture(scope="module", autouse=True)
def _managers_are_closed() -> Iterator[None]:
    yield
    for held in MANAGERS.values():
        held.close()
    MANAGERS.clear()


# -- templates: what each writes to switch thinking on or off, and the names of parsers ---------------------------------------

SWITCH = (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
QWEN3 = TURN + QWEN_CALLS + END + SWITCH
OPENS = (
    TURN
    + QWEN_CALLS
    + END
    + (
        "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}</think>{% else %}<think>\n"
        "{% endif %}{% endif %}"
    )
)
MODELS: dict[str, tuple[str, str, str]] = {  # template, tool parser, reasoning parser
    "qwen3": (QWEN3, "auto", "auto"),
    "opens": (OPENS, "auto", "auto"),
    "does not think": (TURN + QWEN_CALLS + END, "auto", "qwen3"),
    "does not think, r1": (TURN + QWEN_CALLS + END, "auto", "deepseek_r1"),
    "switch, r1": (QWEN3, "auto", "deepseek_r1"),
    "no parser": (TURN + QWEN_CALLS + END, "auto", "none"),
    "magistral": (TEMPLATES["magistral"][0], "hermes", "auto"),
    "gemma": (TURN + QWEN_CALLS + END, "hermes", "gemma4"),
    "seed": (TURN + QWEN_CALLS + END, "hermes", "seed_oss"),
    "coder": (TURN + END + SWITCH, "qwen3_coder", "qwen3"),
    "gpt-oss": (TEMPLATES["gpt-oss"][0], "auto", "auto"),
    "glm": (TURN + END + SWITCH, "glm45", "glm45"),
}
MODES: dict[str, dict[str, Any]] = {
    "absent": {},
    "on": {"chat_template_kwargs": {"enable_thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "inside the reasoning": {"prefill": "<think>\nLet me"},
    "after the reasoning": {"prefill": "<think>\nLet me</think>\n\n"},
    "inside the answer": {"prefill": "The answer: "},
}

# -- constraints, and what holds of a message ---------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "</think>\n"]}, "b": {"enum": [1, True, "<think>"]}},
    "required": ["b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


Check = Callable[[dict[str, Any]], bool]


def is_json(schema: Mapping[str, Any]) -> Check:
    def check(message: dict[str, Any]) -> bool:
        jsonschema.validate(json.loads(message["content"] or ""), schema)
        return not message.get("tool_calls")

    return check


def calls(message: dict[str, Any]) -> bool:
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    return bool(message["tool_calls"]) and not message["content"]


def calls_or_json(message: dict[str, Any]) -> bool:
    """The tool is not strict. A call whose markup no grammar knows may be malformed."""
    is_call = message.get("tool_calls") or re.search(r"tool_call>|to=functions", message["text"])
    return bool(is_call) or is_json(SCHEMA)(message)


def calls_are_valid(message: dict[str, Any]) -> bool:
    return not message.get("tool_calls") or calls({**message, "content": ""})


CONSTRAINTS: dict[str, tuple[dict[str, Any], Check]] = {
    "schema": ({"response_format": FORMAT}, is_json(SCHEMA)),
    "object": ({"response_format": {"type": "json_object"}}, is_json({"type": "object"})),
    "choice": (
        {"structured_outputs": {"choice": [" yes", "no", "<thing>"]}},
        lambda message: message["content"] in (" yes", "no", "<thing>"),
    ),
    "regex": (
        {"structured_outputs": {"regex": "\\s?[a-f]{2,4}"}},
        lambda message: re.fullmatch("\\s?[a-f]{2,4}", message["content"]) is not None,
    ),
    "required": ({"tools": [TOOL], "tool_choice": "required"}, calls),
    "named": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, calls),
    "strict": ({"tools": [STRICT]}, calls_are_valid),
    "schema and tools": ({"response_format": FORMAT, "tools": [TOOL]}, calls_or_json),
}

HABITS = (
    "Sure, the answer is yes.",
    '{"b": 1}',
    "BEGINI think so.END\n\n{\"b\": 1}",
    "BEGINI think so.END" + '<tool_call>\n{"name": "f", "arguments": {"b": true}}\n</tool_call>',
    "I think so.END{\"a\": \"x\", \"b\": 1}",
    "BEGINI think so.ENDSure, yes",
    "\n\nBEGINI think",
    "<thinEND",
    "BEGINa ENDno",
    "BEGIN",
    "",
    '<tool_call>\n<function=f>\n<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>',
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>Sure.",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>",
    "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Sure",
    '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"b": 1}',
)  # fmt: skip


class Engine:
    default_params = SamplingParams()
    default_max_tokens: int | None = None
    model = SimpleNamespace(max_model_len=10_000)

    def __init__(self, kind: str, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer(kind)
        self.chat_template = template

    async def render(self, render: Callable[[], str]) -> str:
        return render()

    async def encode(self, text: str, *, add_special_tokens: bool, behind: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


@functools.cache
def server(kind: str, model: str) -> Any:
    source, tool_parser, reasoning_parser = MODELS[model]
    template = ChatTemplate({"default": source})
    return SimpleNamespace(
        engine=Engine(kind, template),
        parsers=resolve_parsers(tool_parser, reasoning_parser, template),
        tool_support=SimpleNamespace(report=lambda: ()),
        writes_efforts=False,
        settings=ServerSettings(),
        check_model=lambda name: name or "first",
        new_images=lambda: RequestImages(are_read=False),
    )


def validated(kind: str, model: str, mode: str, constraint: str) -> ValidatedRequest:
    fields = dict(MODES[mode])
    messages = [{"role": "user", "content": "What is <think>?"}]
    if prefill := fields.pop("prefill", ""):
        messages.append({"role": "assistant", "content": prefill})
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    body = {"messages": messages, **fields, **CONSTRAINTS[constraint][0]}
    here = server(kind, model)
    return asyncio.run(validate_chat(here, lambda: read_chat(here, ChatCompletionRequest.model_validate(body))))


def script_for(habit: str, model: str) -> bytes:
    begin, end = {
        "magistral": ("[THINK]", "[/THINK]"),
        "gemma": ("<|channel>thought", "<channel|>"),
        "seed": ("<seed:think>", "</seed:think>"),
    }.get(model, ("<think>", "</think>"))
    return habit.replace("BEGIN", begin).replace("END", end).encode()


@functools.cache
def tokens_by_first_byte(kind: str) -> dict[bytes, list[tuple[bytes, int]]]:
    """(bytes, token), the longest last."""
    found: dict[bytes, list[tuple[bytes, int]]] = {}
    texts = sorted((text, t) for t, text in enumerate(vocabulary_bytes(tokenizer(kind))))
    for text, token_id in sorted(texts, key=lambda each: len(each[0])):
        found.setdefault(text[:1], []).append((text, token_id))
    return {first: tokens for first, tokens in found.items() if first}


def generate(kind: str, request: ValidatedRequest, script: bytes, rng: random.Random) -> tuple[list[int], bool]:
    """Returns the tokens of a scripted model, and whether it has ended the text. The last token is then no EOS."""
    backend, held = grammars(kind), manager(kind)
    constraint = request.params.structured_outputs
    assert constraint is not None
    held.submit("r", constraint, frame=request.answer_frame).result(timeout=300)
    by_first_byte = tokens_by_first_byte(kind)
    emitted: list[int] = []
    try:
        assert held.failure("r") == ""
        while len(emitted) < MAX_TOKENS:
            filled = held.fill([MaskRequest("r")])
            assert not filled.errors, filled.errors
            mask = filled.masks[0]
            candidates = by_first_byte.get(script[:1], ())
            liked = [(text, t) for text, t in candidates if script.startswith(text) and mask[t // 32] >> t % 32 & 1]
            if liked := [(text, t) for text, t in liked if t not in backend.eos_token_ids]:
                text, token_id = liked[-1] if rng.random() < 0.8 else rng.choice(liked)
                script = script[len(text) :]
            else:
                ends = sorted(t for t in backend.eos_token_ids if mask[t // 32] >> t % 32 & 1)
                token_id = rng.choice(ends or allowed_ids(mask))
                script = script[1:] if rng.random() < 0.1 else script
            assert held.advance("r", token_id) == "", token_id
            if token_id in backend.eos_token_ids:
                return emitted, True
            emitted.append(token_id)
        return emitted, False
    finally:
        held.drop("r")


def check_replay(held: StructuredOutputManager, request: ValidatedRequest, emitted: list[int]) -> None:
    """A resumed request is at the same place in its grammar."""
    constraint = request.params.structured_outputs
    assert constraint is not None
    try:
        held.submit("again", constraint, frame=request.answer_frame, emitted_token_ids=emitted).result(timeout=300)
        assert held.failure("again") == ""
        again = held.fill([MaskRequest("again")]).masks[0].copy()
        held.submit("fresh", constraint, frame=request.answer_frame).result(timeout=300)
        drafted = held.fill([MaskRequest("fresh", emitted)]).masks[-1]
        np.testing.assert_array_equal(drafted, again)
    finally:
        held.drop("again")
        held.drop("fresh")


def message_of(kind: str, request: ValidatedRequest, token_ids: list[int]) -> dict[str, Any]:
    text = tokenizer(kind).decode(token_ids, request.params.skip_special_tokens)
    make = request.make_parser
    if make is None:
        return {"content": text}
    parser = make()
    pieces = [event for character in text for event in parser.push(character)]
    return written_answer([*pieces, *parser.finish()]).as_message()


CASES = [
    (kind, model, mode, constraint)
    for kind, model, mode, constraint in itertools.product(("tags", "text"), MODELS, MODES, CONSTRAINTS)
    if (model, constraint) != ("gpt-oss", "strict")
]


@pytest.mark.parametrize("model", MODELS)
def test_the_answer_satisfies_the_constraint(model: str) -> None:
    rng = random.Random(model)
    num_ended = num_answers = 0
    for case in [case for case in CASES if case[1] == model]:
        kind, constraint = case[0], case[3]
        request = validated(*case)
        for habit in HABITS if FULL else rng.sample(HABITS, 1):
            token_ids, has_ended = generate(kind, request, script_for(habit, model), rng)
            num_answers += 1
            num_ended += has_ended
            if has_ended:
                check_replay(manager(kind), request, token_ids)
                text = tokenizer(kind).decode(token_ids, skip_special_tokens=False)
                message = {**message_of(kind, request, token_ids), "text": text}
                what = (*case, habit, message)
                try:
                    assert CONSTRAINTS[constraint][1](message), what
                except (ValueError, KeyError, jsonschema.ValidationError) as error:
                    raise AssertionError(what) from error
    assert num_ended > 0.5 * num_answers
