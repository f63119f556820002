"""Chooses the tool parser and the reasoning parser of a model, by name or from the model's chat template."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from inflight.config.reasoning import ReasoningConfig
from inflight.errors import ConfigError, TokenizerError
from inflight.parsers.gemma4 import FunctionGemmaToolParser, Gemma4ToolParser
from inflight.parsers.harmony import HarmonyParser
from inflight.parsers.json_between_tags import (
    ApertusToolParser,
    CohereToolParser,
    CommandRToolParser,
    GigaChat3ToolParser,
    Granite20bToolParser,
    GraniteToolParser,
    InternLmToolParser,
    JambaToolParser,
    Llama4JsonToolParser,
    NemotronJsonToolParser,
    NemotronMiniToolParser,
    Phi4MiniToolParser,
    XLamToolParser,
)
from inflight.parsers.json_tool_parsers import (
    DeepSeekV3ToolParser,
    DeepSeekV31ToolParser,
    HermesToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
)
from inflight.parsers.kimi_k3 import KimiK3ToolParser
from inflight.parsers.markup import ToolMarkup, default_markup
from inflight.parsers.minimax_m3 import MiniMaxM3ToolParser
from inflight.parsers.more_tagged_tool_parsers import (
    DeepSeekV4ToolParser,
    DeepSeekV32ToolParser,
    HyV3ToolParser,
    LongCatToolParser,
    MiniCpm5ToolParser,
    SolarOpen2ToolParser,
    ZayaToolParser,
)
from inflight.parsers.named_json_tool_parsers import (
    FunctionaryV31ToolParser,
    FunctionaryV32ToolParser,
    KimiK2ToolParser,
    SolarToolParser,
)
from inflight.parsers.output_parser import OutputParser
from inflight.parsers.pythonic_tool_parsers import (
    Lfm2ToolParser,
    MiniCpm3ToolParser,
    Olmo3ToolParser,
    PythonicToolParser,
)
from inflight.parsers.reasoning import Opening, ReasoningMarkup
from inflight.parsers.reasoning_families import REASONING
from inflight.parsers.tagged_tool_parsers import (
    Glm45ToolParser,
    MiniMaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)
from inflight.parsers.template_markup import find_reasoning, find_tool_markup
from inflight.parsers.tool_parser import ToolParser
from inflight.tokenizer.chat_template import ChatTemplate

_T = TypeVar("_T")

AUTO = "auto"
NONE = "none"

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "apertus": ApertusToolParser,
    "cohere_command3": CohereToolParser,
    "cohere_command4": CohereToolParser,
    "command_r": CommandRToolParser,
    "deepseek_v3": DeepSeekV3ToolParser,
    "deepseek_v31": DeepSeekV31ToolParser,
    "deepseek_v32": DeepSeekV32ToolParser,
    "deepseek_v4": DeepSeekV4ToolParser,
    "ernie45": HermesToolParser,
    "functiongemma": FunctionGemmaToolParser,
    "functionary_v3_1": FunctionaryV31ToolParser,
    "functionary_v3_2": FunctionaryV32ToolParser,
    "gemma4": Gemma4ToolParser,
    "gigachat3": GigaChat3ToolParser,
    "glm45": Glm45ToolParser,
    "glm47": Glm45ToolParser,
    "granite": GraniteToolParser,
    "granite-20b-fc": Granite20bToolParser,
    "granite4": HermesToolParser,
    "hermes": HermesToolParser,
    "hunyuan_a13b": JambaToolParser,
    "hy_v3": HyV3ToolParser,
    "internlm": InternLmToolParser,
    "jamba": JambaToolParser,
    "kimi_k2": KimiK2ToolParser,
    "kimi_k3": KimiK3ToolParser,
    "lfm2": Lfm2ToolParser,
    "llama3_json": Llama3JsonToolParser,
    "llama4_json": Llama4JsonToolParser,
    "llama4_pythonic": PythonicToolParser,
    "longcat": LongCatToolParser,
    "mimo": Qwen3CoderToolParser,
    "minicpm3": MiniCpm3ToolParser,
    "minicpm5": MiniCpm5ToolParser,
    "minimax": JambaToolParser,
    "minimax_m2": MiniMaxM2ToolParser,
    "minimax_m3": MiniMaxM3ToolParser,
    "mistral": MistralToolParser,
    "nemotron_json": NemotronJsonToolParser,
    "nemotron_mini": NemotronMiniToolParser,
    "olmo3": Olmo3ToolParser,
    "openai": HarmonyParser,
    "phi4_mini_json": Phi4MiniToolParser,
    "poolside_v1": Glm45ToolParser,
    "pythonic": PythonicToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "qwen3_xml": Qwen3CoderToolParser,
    "seed_oss": SeedOssToolParser,
    "solar_open": SolarToolParser,
    "solar_open2": SolarOpen2ToolParser,
    "step3p5": Qwen3CoderToolParser,
    "xlam": XLamToolParser,
    "zaya_xml": ZayaToolParser,
}


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
    """The tags around the reasoning; None if there is no parser.

    Raises:
        ConfigError: there is no parser of this name.
    """
    return _look_up("reasoning_parser", reasoning_parser, REASONING)


def reasoning_with_end(end: str) -> ReasoningMarkup:
    """The tags around reasoning that ends with `end`. The opening tag is known if a family has this end."""
    known = (each for each in REASONING.values() if each.end == end and not each.starts_inside and not each.answer_ends)
    return next(known, ReasoningMarkup("", end))


class NamedTags(NamedTuple):
    """Tags as an operator names them.

    Attributes:
        parser: the name of the parser that reads them; None if there is none.
        message: the text that the operator has put before the closing tag.
    """

    parser: str | None
    markup: ReasoningMarkup
    message: str


def read_tags(begin: str, end: str) -> NamedTags:
    """Find the parser of the tags. `end` may have a text before the closing tag. `begin` may be ""."""
    # of several families with the same tags, one that has nothing else comes first
    for name, markup in sorted(
        REASONING.items(), key=lambda entry: entry[1] != ReasoningMarkup(entry[1].begin, entry[1].end)
    ):
        if end.endswith(markup.end) and begin in ("", markup.begin):
            message = end.removesuffix(markup.end)
            if markup.frame is not None:  # further markup of the family is no part of the message
                message = message.partition(markup.frame.end)[0]
            return NamedTags(name, markup, message)
    return NamedTags(None, ReasoningMarkup(begin, end), "")


def choose_reasoning_parser(setting: str, config: ReasoningConfig, template: ChatTemplate | None) -> str:
    """Returns the server's setting of the reasoning parser. If it is "auto", `config` may name a parser, or tags.

    Raises:
        ConfigError: no parser reads these tags.
    """
    if setting != AUTO or not (config.reasoning_parser or config.reasoning_end_str):
        return setting
    if config.reasoning_parser:
        return config.reasoning_parser
    tags = read_tags(config.reasoning_start_str, config.reasoning_end_str)
    if tags.parser is None:
        raise ConfigError(
            f"reasoning_config: no parser reads reasoning between {config.reasoning_start_str!r} and "
            f"{config.reasoning_end_str!r}: give the tags of one of {', '.join(REASONING)}"
        )
    found = reasoning_markup(detect_parsers(template).reasoning)
    is_same = found is not None and (found.begin, found.end) == (tags.markup.begin, tags.markup.end)
    return AUTO if is_same else tags.parser


def call_beginnings(tool_parser: str | None) -> tuple[str, ...]:
    """The texts with which a call begins that the parser reads."""
    return () if tool_parser is None else TOOL_PARSERS[tool_parser].beginnings()


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
    tool_class = _look_up("tool_call_parser", tool_parser, TOOL_PARSERS)
    reasoning = _look_up("reasoning_parser", reasoning_parser, REASONING)
    if tool_class is None or not tools:
        tool_class = None
        tools = ()
    begun = ""
    if reasoning is not None and reasoning.whole_parser is not None:
        begun = reasoning.begin if opening is Opening.OPEN else ""
        tool_class = reasoning.whole_parser
        reasoning = None
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
        thinks_again=not is_constrained,
        max_tool_calls=max_tool_calls,
    )
    if begun:
        parser.push(begun)  # the part of the format that stands in the prompt
    return parser


def detect_parsers(template: ChatTemplate | None) -> DetectedParsers:
    """Find the parsers of a model from the markup that its template writes in some short conversations."""
    if template is not None:
        with suppress(TokenizerError):  # the model has no template
            tool, markup = find_tool_markup(template)
            return DetectedParsers(tool, find_reasoning(template), markup)
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
    _look_up("tool_call_parser", tool, TOOL_PARSERS)
    _look_up("reasoning_parser", reasoning, REASONING)
    if tool is None or tool == detected.tool:
        return DetectedParsers(tool, reasoning, detected.markup if tool else None)
    return DetectedParsers(tool, reasoning, default_markup(tool))


def _look_up(option: str, name: str | None, table: Mapping[str, _T]) -> _T | None:
    if name is None:
        return None
    if name not in table:
        raise ConfigError(f"{option}={name!r} is unknown; allowed are {', '.join([AUTO, NONE, *table])}")
    return table[name]
