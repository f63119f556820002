"""`ReasoningConfig`: the tags around the reasoning, as vLLM's option --reasoning-config names them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.config.json_option import from_json
from inflight.setting import setting


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Every value may be "": then it is found in the chat template.

    Attributes:
        reasoning_parser: a name of --reasoning-parser.
        reasoning_start_str: the tag that opens the reasoning.
        reasoning_end_str: the tag that closes it. A text before the tag is written when the reasoning reaches its limit, as
            `reasoning_budget_message` is.
    """

    reasoning_parser: str = setting("", "Name of the parser.")
    reasoning_start_str: str = setting("", "Tag that opens the reasoning.")
    reasoning_end_str: str = setting("", "Tag that closes the reasoning, with a text before it.")


# Any: checked here
def resolve_reasoning(given: Mapping[str, Any] | None) -> ReasoningConfig:
    """Returns the config that `given` (`EngineArgs.reasoning_config`) describes. A value that is None is left out, as in vLLM.

    Raises:
        ConfigError: an unknown field, or a value that is no text.
    """
    if isinstance(given, Mapping):
        given = {name: value for name, value in given.items() if value is not None}
    return from_json(ReasoningConfig, "reasoning_config", given)
