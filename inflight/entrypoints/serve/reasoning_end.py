"""Where the thinking of the served model ends, by the parser that the server reads it with: grammars start behind it."""

from __future__ import annotations

from dataclasses import replace

from inflight.config.engine_args import EngineArgs
from inflight.engine.front_end import read_chat_template
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.hub import resolve_model_folder
from inflight.parsers.selector import reasoning_end, resolve_parsers


def with_reasoning_end(args: EngineArgs, settings: ServerSettings) -> EngineArgs:
    """`args` with `reasoning_end`, unless they name one: else a constraint would begin in what the parser files as reasoning.

    Raises:
        ConfigError: there is no such parser, model or chat template.
    """
    if args.reasoning_end or args.skip_tokenizer_init:
        return args
    template = read_chat_template(resolve_model_folder(args.model, args.revision), args.tokenizer, args.chat_template)
    parsers = resolve_parsers(settings.tool_call_parser, settings.reasoning_parser, template)
    return replace(args, reasoning_end=reasoning_end(parsers.reasoning))
