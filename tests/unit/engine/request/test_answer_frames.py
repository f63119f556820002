"""`AnswerFrames`: which requests have a budget of their reasoning, and with what text it is closed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.config.engine import EngineConfig
from inflight.config.reasoning import ReasoningConfig
from inflight.engine.request.answer_frames import FIND, AnswerFrames, GivenFrame
from inflight.engine.request.prompt import token_array
from inflight.errors import InvalidRequestError
from inflight.interface.request import AnswerFrame
from inflight.parsers.harmony import FRAME
from inflight.sampling_params import SamplingParams
from inflight.structured_outputs_params import StructuredOutputsParams
from inflight.tokenizer.chat_template import ChatTemplate
from tests.support.fakes_tokenizer import EOS_ID, byte_tokenizer

BYTES = byte_tokenizer()
TAGS = AnswerFrame(begin="<think>", end="</think>")
OPEN = replace(TAGS, is_open=True)
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHOICE = StructuredOutputsParams(choice=["a"])


def frames(template: str = THINKING, **config: Any) -> AnswerFrames:
    settings: dict[str, Any] = {"reasoning_end": "", "reasoning_budget": -1, "reasoning_budget_message": ""}
    settings |= {"reasoning": ReasoningConfig(), **config}
    return AnswerFrames(
        cast("EngineConfig", SimpleNamespace(**settings)),
        BYTES,
        ChatTemplate({"default": template}),
        frozenset([EOS_ID]),
    )


def find(
    each: AnswerFrames,
    prompt: str = "?",
    given: GivenFrame = FIND,
    thinks_first: bool = True,
    max_tokens: int = 100,
    **params: Any,
) -> AnswerFrame | None:
    token_ids = token_array(BYTES.encode(prompt, add_special_tokens=False) or [5], BYTES.vocab_size)
    return each.find(SamplingParams(**params), token_ids, max_tokens=max_tokens, thinks_first=thinks_first, given=given)


def closing(frame: AnswerFrame | None) -> str:
    assert frame is not None
    return BYTES.decode(list(frame.closing_token_ids), skip_special_tokens=False)


def test_a_request_without_a_budget_has_none() -> None:
    assert find(frames()) is None
    assert find(frames(), given=OPEN) is None
    assert find(frames(), thinking_token_budget=-1) is None
    assert find(frames(), given=OPEN, structured_outputs=CHOICE) == OPEN
    assert find(frames(), structured_outputs=CHOICE) is None


def test_the_tags_of_the_prompt_say_where_the_reasoning_is() -> None:
    found = find(frames(), "?<think>", thinking_token_budget=7)
    assert found is not None and found.is_open and found.max_reasoning_tokens == 7
    assert closing(found) == "</think>"
    found = find(frames(), "?", thinking_token_budget=7)
    assert found is not None and (found.begin, found.is_open) == ("<think>", False)
    found = find(frames(), "?<think></think>", thinking_token_budget=7)
    assert found is not None and not found.is_open, "a model may begin reasoning where the prompt has closed one"
    assert find(frames(), "?<think></think>", thinking_token_budget=7, structured_outputs=CHOICE) is None
    found = find(frames(), "?<think>", thinks_first=False, thinking_token_budget=7)
    assert found is not None and found.is_open, "a prompt that a client has rendered itself"


def test_behind_calls_no_reasoning_is_looked_for() -> None:
    """In a text without a grammar: the beginnings of the calls that the template writes."""
    call = (
        '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    )
    each = frames(THINKING.replace("{{ m.content }}", "{{ m.content }}" + call))
    found = find(each, "?<think>", thinking_token_budget=7)
    assert found is not None and found.calls == ("<tool_call>",)
    found = find(each, "?<think>", thinking_token_budget=7, structured_outputs=CHOICE)
    assert found is not None and not found.calls


def test_the_frame_of_the_caller_counts() -> None:
    found = find(frames(), "?", given=OPEN, thinking_token_budget=7)
    assert found is not None and replace(found, max_reasoning_tokens=None, closing_token_ids=()) == OPEN
    assert find(frames(), "?", given=None, thinking_token_budget=7) is None
    found = find(frames(), "?", given=OPEN, thinking_token_budget=7, structured_outputs=CHOICE)
    assert found is not None and found.max_reasoning_tokens == 7
    only_calls = AnswerFrame(begin="", end="", calls=("<c>",))
    assert find(frames(), "?", given=only_calls, thinking_token_budget=7, structured_outputs=CHOICE) == only_calls
    assert closing(find(frames(), "?", given=FRAME, thinking_token_budget=7)) == "<|end|>"


def test_the_default_of_the_engine_holds_for_chats_that_set_none() -> None:
    each = frames(reasoning_budget=3)
    for params, budget in (({}, 3), ({"thinking_token_budget": 9}, 9), ({"thinking_token_budget": 0}, 0)):
        found = find(each, given=OPEN, **params)
        assert found is not None and found.max_reasoning_tokens == budget
    assert find(each, given=OPEN, thinking_token_budget=-1) is None
    assert find(each, given=OPEN, thinks_first=False) is None
    assert find(each, given=OPEN, allowed_token_ids=[5]) is None
    assert find(frames(PLAIN, reasoning_budget=3)) is None


def test_a_budget_that_max_tokens_makes_needless_costs_nothing() -> None:
    assert find(frames(), given=OPEN, thinking_token_budget=100) is None
    assert find(frames(), given=OPEN, thinking_token_budget=99) is not None


def test_a_message_stands_before_the_tag_unless_there_is_no_reasoning() -> None:
    each = frames(reasoning_budget_message="Enough.\n")
    assert closing(find(each, given=OPEN, thinking_token_budget=1)) == "Enough.\n</think>"
    assert closing(find(each, given=OPEN, thinking_token_budget=0)) == "</think>"


@pytest.mark.parametrize("message", ["a</think>b", "<|start|>"])
def test_a_message_that_is_no_reasoning_is_refused(message: str) -> None:
    frame = OPEN if "think" in message else FRAME
    with pytest.raises(InvalidRequestError):
        find(frames(reasoning_budget_message=message), given=frame, thinking_token_budget=1)


def test_a_budget_for_a_model_whose_reasoning_is_not_found_is_refused() -> None:
    with pytest.raises(InvalidRequestError):
        find(frames(PLAIN), thinking_token_budget=1)
    assert find(frames(PLAIN, reasoning_end=";;"), thinking_token_budget=1) == AnswerFrame(
        begin="", end=";;", is_open=True, max_reasoning_tokens=1, closing_token_ids=(*BYTES.encode(";;", False),)
    )


def test_the_tags_of_the_operator_come_before_those_of_the_template() -> None:
    named = ReasoningConfig(reasoning_start_str="<a>", reasoning_end_str="</a>")
    found = find(frames(PLAIN, reasoning=named), "?<a>", thinking_token_budget=1)
    assert found is not None and (found.begin, found.end, found.is_open) == ("<a>", "</a>", True)
    with_message = ReasoningConfig(reasoning_end_str="Enough.</think>")
    assert closing(find(frames(reasoning=with_message), "?<think>", thinking_token_budget=1)) == "Enough.</think>"
    both = frames(reasoning=with_message, reasoning_budget_message="Now.")
    assert closing(find(both, "?<think>", thinking_token_budget=1)) == "Now.</think>"
    by_name = frames(PLAIN, reasoning=ReasoningConfig(reasoning_parser="seed_oss"))
    assert closing(find(by_name, "?<seed:think>", thinking_token_budget=1)) == "</seed:think>"
