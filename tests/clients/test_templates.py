"""What clients send, with the chat templates of real models: nothing is refused or lost, and no absent value is written."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from inflight.entrypoints.fields.messages import template_messages
from inflight.entrypoints.openai.protocol import ChatCompletionRequest
from inflight.entrypoints.written_answer import REASONING_FIELDS, written_answer
from inflight.errors import InvalidRequestError
from inflight.interface.events import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from inflight.tokenizer.chat_template import ChatTemplate
from tests.clients.conversation_forms import FORMS, FULL_TOOLS, TOOLS, Form, all_texts, result, texts, user
from tests.clients.real_templates import FAMILIES, FOLDER, LEFT_OUT, templates
from tests.clients.recorded_requests import FOLDER as RECORDED
from tests.clients.recorded_requests import Rendered, recorded
from tests.unit.tokenizer.image_templates import conversations, pieces_in, pieces_of

TEMPLATES = {name: source for name, source in templates().items() if name not in LEFT_OUT}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
ABSENT = re.compile(r"(?<!\w)(?:None|null|undefined|Undefined)(?!\w)")
# They write no text beside calls, and take no answer before a call.
NO_TEXT_BESIDE_CALLS = {
    "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistral_v2v3",
    "mistral_v3_tekken",
}
# It writes the signatures of tools in Python, where `= None` is what it says of an argument that is not required.
IN_PYTHON = {"CohereForAI-c4ai-command-r-plus-tool_use"}

pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason=f"no *.jinja in {FOLDER}: make test-clients reads them from packages"
)


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS)


def lists_of_tools(name: str) -> list[list[dict[str, Any]] | None]:
    """Templates of the name tool_use are used for requests with tools only."""
    return [FULL_TOOLS] if "tool_use" in name else [None, FULL_TOOLS]


def num_absent(text: str) -> int:
    return len(ABSENT.findall(text))


def expected_absent(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """How often the template itself writes such a word, whatever the messages have: in instructions or in a constant."""
    full = [message if message.get("content") else {**message, "content": "-"} for message in messages]
    counts = []
    for conversation in ([user()], full):
        try:
            counts.append(num_absent(template.render(conversation, **options)))
        except InvalidRequestError:
            continue
    return max(counts, default=0)


def missing_text(prompt: str, words: Sequence[str]) -> str:
    """The first of these words that does not stand in the prompt behind those before it; "" if all do."""
    at = 0
    for word in words:
        found = re.compile(rf"{word}(?![a-z0-9])").search(prompt, at)
        if found is None:
            return word
        at = found.end()
    return ""


def problems(name: str, form: Form) -> Iterator[str]:
    template = template_of(name)
    for tools in lists_of_tools(name):
        for opens in (True, False):
            options = {"tools": tools, "add_generation_prompt": opens}
            case = f"{form.name}, {len(tools or [])} tools, opens={opens}"
            try:
                prompt = template.render(copy.deepcopy(list(form.messages)), **options)
            except InvalidRequestError as error:
                yield f"{case}: {error}"
                continue
            if num_absent(prompt) and num_absent(prompt) > expected_absent(template, form.messages, options):
                yield f"{case}: an absent value in {prompt[-300:]!r}"
            left = [] if name not in NO_TEXT_BESIDE_CALLS else ["TextAnswer"]
            wanted = [word for word in texts(form) if word not in left]
            lost = [word for word in all_texts(form) if word not in left and missing_text(prompt, [word])]
            if (word := missing_text(prompt, wanted)) or lost:
                yield f"{case}: {word or lost} is lost or moved in {prompt[-500:]!r}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_form_of_conversations(name: str) -> None:
    assert [problem for form in FORMS for problem in problems(name, form)] == []


# It refuses images in a conversation with a system message.
NO_SYSTEM_BESIDE_IMAGES = {"llama3_2_vision"}


@pytest.mark.parametrize("name", [name for name, source in TEMPLATES.items() if "image" in source])
def test_each_image_is_written_once(name: str) -> None:
    template = ChatTemplate({"default": TEMPLATES[name]}, SPECIAL_TOKENS, image_token="<|token of an image|>")
    for messages in conversations(seed=0, count=40):
        if name in NO_SYSTEM_BESIDE_IMAGES and any(message["role"] == "system" for message in messages):
            continue
        rendered = template.render_chat(messages)
        wanted = pieces_of(messages)
        assert list(rendered.images) == [int(piece) for piece in wanted if piece.isdigit()]
        found = pieces_in(rendered.text, rendered.images, rendered.image_text)
        # some templates write the images of a message before or behind its texts
        assert sorted(found) == sorted(wanted)
        assert [piece for piece in found if piece.isdigit()] == [piece for piece in wanted if piece.isdigit()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_in_which_something_is_absent(name: str) -> None:
    template = template_of(name)
    for case, tools in TOOLS.items():
        full = num_absent(template.render([user()], tools=(2 * FULL_TOOLS)[: len(tools)]))
        prompt = template.render([user()], tools=copy.deepcopy(tools))
        assert num_absent(prompt) <= full or name in IN_PYTHON, (case, prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_our_own_answers_can_be_sent_back(name: str) -> None:
    template = template_of(name)
    arguments = ['{"city": "TextOslo"}', "{}", '{"city": "Os']
    for thought, names in (([], ()), *(([ReasoningDelta("Thought")], names) for names in REASONING_FIELDS.values())):
        for said in ([], [ContentDelta("TextAnswer")]):
            for num_calls in range(4):
                events: list[Event] = [*thought, *said]
                results = []
                for i in range(num_calls):
                    events += [ToolCallStart(i, f"call_{i}", "get_weather"), ToolArgumentsDelta(i, arguments[i])]
                    results.append(result(f"TextResult{i}", f"call_{i}"))
                given = [user(), written_answer(events).as_message(names), *results, user("TextMore")]
                body = ChatCompletionRequest.model_validate({"messages": json.loads(json.dumps(given))})
                for tools in lists_of_tools(name):
                    prompt = template.render(template_messages(body.messages), tools=tools)
                    words = ["TextUser", *(f"TextResult{i}" for i in range(num_calls)), "TextMore"]
                    assert missing_text(prompt, words) == "", (events, prompt)


@pytest.fixture(scope="module")
def requests() -> list[Rendered]:
    if not RECORDED.is_dir():
        pytest.skip(f"no recorded requests in {RECORDED}")
    found, without = recorded()
    # one has an image, and one names a stored answer
    assert without == ["codex.image.01.json", "sdk.openai.09.json"]
    assert len(found) > 100
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_recorded_requests(name: str, requests: list[Rendered]) -> None:
    template = template_of(name)
    found = []
    for request in requests:
        if "tool_use" in name and not request.options["tools"]:
            continue
        try:
            prompt = template.render(request.messages, **request.options)
        except InvalidRequestError as error:
            found.append(f"{request.file}: {error}")
            continue
        if num_absent(prompt) and num_absent(prompt) > expected_absent(template, request.messages, request.options):
            found.append(f"{request.file}: an absent value")
    assert found == []


def test_the_packages_have_the_templates_of_the_families() -> None:
    unknown = {name for names in FAMILIES.values() for name in names} - set(TEMPLATES)
    assert not unknown or len(TEMPLATES) < 100, "a package has no longer the template"
