"""Chooses the tool parser and the reasoning parser of a model, by name or from the model's chat template."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from inflight.errors import ConfigError, TokenizerError
from inflight.parsers.gemma4 import Gemma4ToolParser
from inflight.parsers.harmony import FRAME, HarmonyParser
from inflight.parsers.json_tool_parsers import (
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
)
from inflight.parsers.markup import ToolMarkup, default_markup, find_tool_markup, render_or_nothing
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.pythonic_tool_parsers import Lfm2ToolParser, Olmo3ToolParser, PythonicToolParser
from inflight.parsers.reasoning import Opening, ReasoningMarkup
from inflight.parsers.tagged_tool_parsers import (
    Glm45ToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)
from inflight.parsers.tool_parser import ToolParser
from inflight.tokenizer.chat_template import ChatTemplate

_T = TypeVar("_T")

AUTO, NONE = "auto", "none"

_TOOL_PARSERS: Mapping[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "gemma4": Gemma4ToolParser,
    "glm45": Glm45ToolParser,
    "hermes": HermesToolParser,
    "lfm2": Lfm2ToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_pythonic": PythonicToolParser,
    "minimax_m2": MiniMaxM2ToolParser,
    "mistral": MistralToolParser,
    "olmo3": Olmo3ToolParser,
    "openai": HarmonyParser,
    "pythonic": PythonicToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "seed_oss": SeedOssToolParser,
}
_THINK = ReasoningMarkup("<think>", "</think>")
_REASONING: Mapping[str, ReasoningMarkup] = {
    "deepseek_r1": ReasoningMarkup("<think>", "</think>", starts_inside=True),
    "deepseek_v3": _THINK,
    "gemma4": ReasoningMarkup("<|channel>thought", "<channel|>", needs_special_tokens=True),
    "glm45": _THINK,
    "minimax_m2": _THINK,
    "mistral": ReasoningMarkup("[THINK]", "[/THINK]", needs_special_tokens=True),
    "openai_gptoss": ReasoningMarkup(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", whole_parser=HarmonyParser, frame=FRAME
    ),
    "qwen3": _THINK,
    "seed_oss": ReasoningMarkup("<seed:think>", "</seed:think>"),
}
_THOUGHT, _ANSWER = "probed thought", "probed answer"


@dataclass(frozen=True, slots=True)
class DetectedParsers:
    """
    Attributes:
        tool, reasoning: names for `create_output_parser`; None for no parser.
        markup: how the model writes calls, for `constrain_tools`. None if no grammar can force the model to write a call.
    """

    tool: str | None
    reasoning: str | None
    markup: ToolMarkup | None


def reasoning_markup(reasoning_parser: str | None) -> ReasoningMarkup | None:
    """The tags around the reasoning; None if there is no parser."""
    return None if reasoning_parser is None else _REASONING[reasoning_parser]


def reasoning_with_end(end: str) -> ReasoningMarkup:
    """The tags around reasoning that ends with `end`. The opening tag is known if a family has this end."""
    known = (markup for markup in _REASONING.values() if markup.end == end and not markup.starts_inside)
    return next(known, ReasoningMarkup("", end))


def call_beginnings(tool_parser: str | None) -> tuple[str, ...]:
    """The texts with which a call begins that the parser reads."""
    return () if tool_parser is None else _TOOL_PARSERS[tool_parser].beginnings()


def create_output_parser(
    tool_parser: str | None,
    reasoning_parser: str | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None,  # Any: JSON
    opening: Opening = Opening.NONE,
    is_constrained: bool = False,
    keeps_blanks: bool = False,
    only_calls: bool = False,
    max_tool_calls: int | None = None,
) -> OutputParser:
    """Make a parser for one completion.

    Args:
        tool_parser, reasoning_parser: names from the result of `resolve_parsers`; None for no parser.
        tools: the request's tools. If there are none, no text is read as a call.
        opening: what the prompt says about the reasoning (`find_opening`).
        is_constrained: whether a grammar constrains the text, with the frame that `answer_frame` makes of `opening`. Then there
            is reasoning only where the frame has it.
        keeps_blanks: whether the constraint counts white space between the reasoning and the content.
        only_calls: whether the constraint admits nothing but calls after the reasoning.
        max_tool_calls: the largest number of calls; later calls are left out. It is 1 for parallel_tool_calls=False.

    Raises:
        ConfigError: there is no parser of this name.
    """
    tool_class = _look_up("tool_call_parser", tool_parser, _TOOL_PARSERS)
    reasoning = _look_up("reasoning_parser", reasoning_parser, _REASONING)
    if tool_class is None or not tools:
        tool_class, tools = None, ()
    begun = ""
    if reasoning is not None and reasoning.whole_parser is not None:
        begun = reasoning.begin if opening is Opening.OPEN else ""
        tool_class, reasoning = reasoning.whole_parser, None
    elif is_constrained and opening is Opening.CLOSED:
        reasoning = None
    may_start_inside = opening is Opening.NONE and not is_constrained
    parser = OutputParser(
        tool_class,
        reasoning,
        tools=tools,
        starts_in_reasoning=reasoning is not None
        and (opening is Opening.OPEN or (reasoning.starts_inside and may_start_inside)),
        keeps_blanks=keeps_blanks,
        only_calls=only_calls,
        max_tool_calls=max_tool_calls,
    )
    parser.push(begun)  # the part of the format that stands in the prompt
    return parser


def detect_parsers(template: ChatTemplate | None) -> DetectedParsers:
    """Find the parsers of a model from the markup that its template writes in some short conversations."""
    if template is not None:
        with suppress(TokenizerError):  # the model has no template
            tool, markup = find_tool_markup(template)
            return DetectedParsers(tool, _find_reasoning(template), markup)
    return DetectedParsers(None, None, None)


def resolve_parsers(tool_parser: str, reasoning_parser: str, template: ChatTemplate | None) -> DetectedParsers:
    """Find the parsers that the server's settings name. Each setting is "auto", "none", or the name of a parser.

    If a setting names the tool parser that fits the template, the markup of calls is the template's markup. If it names another
    tool parser, the markup is the usual markup of that parser's family.

    Raises:
        ConfigError: there is no parser of this name.
    """
    detected = detect_parsers(template)
    tool = detected.tool if tool_parser == AUTO else None if tool_parser == NONE else tool_parser
    reasoning = (
        detected.reasoning if reasoning_parser == AUTO else None if reasoning_parser == NONE else reasoning_parser
    )
    _look_up("tool_call_parser", tool, _TOOL_PARSERS)
    _look_up("reasoning_parser", reasoning, _REASONING)
    if tool is None or tool == detected.tool:
        return DetectedParsers(tool, reasoning, detected.markup if tool else None)
    return DetectedParsers(tool, reasoning, default_markup(tool))


def _look_up(option: str, name: str | None, table: Mapping[str, _T]) -> _T | None:
    if name is None:
        return None
    if name not in table:
        raise ConfigError(f"{option}={name!r} is unknown; allowed are {', '.join([AUTO, NONE, *table])}")
    return table[name]


def _find_reasoning(template: ChatTemplate) -> str | None:
    """Returns the name of the parser for the template's reasoning tags, or None if no parser fits. A parser fits if the
    template writes the parser's tags around reasoning or at the start of an answer, also of an answer without thinking, or if
    it removes the text between these tags from an earlier answer. Some templates write tags that are special tokens only around
    content parts of a type of their own. There the tags are found in the text of the template."""
    question = {"role": "user", "content": "?"}
    opened = tuple(
        render_or_nothing(template, [question], add_generation_prompt=True, variables=variables).rstrip()
        for variables in (None, {"enable_thinking": False}, {"enable_thinking": True})
    )
    thought = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    written = render_or_nothing(template, [question, thought])
    for name in ("qwen3", "mistral", "gemma4", "openai_gptoss", "seed_oss"):
        begin, end = _REASONING[name].begin, _REASONING[name].end
        if any(text.endswith((begin, end)) for text in opened) or re.search(
            rf"{re.escape(begin)}\s*{_THOUGHT}", written
        ):
            return name
        inline = {"role": "assistant", "content": f"{begin}\n{_THOUGHT}\n{end}\n\n{_ANSWER}"}
        past = render_or_nothing(template, [question, inline, question], add_generation_prompt=True)
        if _ANSWER in past and _THOUGHT not in past:
            return name
    source = template.default_source or ""
    tags = _REASONING["mistral"]
    return "mistral" if tags.begin in source and tags.end in source else None
