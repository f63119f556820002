"""`FrontEnd`: what a front end has of a model: all but its weights. `LLMEngine` and `AsyncLLM` are made of one.

No torch: a front end starts while the process of the engine loads the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_file import read_gguf
from inflight.config.machine import detect_machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import resolve
from inflight.engine.generation_defaults import model_eos_token_ids
from inflight.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from inflight.errors import InvalidRequestError
from inflight.hub import read_generation_config, resolve_model_folder, resolve_tokenizer_folder
from inflight.parsers.markup import ToolMarkup
from inflight.parsers.selector import detect_parsers
from inflight.parsers.tool_choice import constrain_tools
from inflight.sampling_params import SamplingParams
from inflight.structured_output.backend import GrammarBackend
from inflight.structured_output.manager import StructuredOutputManager
from inflight.structured_output.selector import create_backend
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from inflight.tokenizer.tokenizer import Tokenizer


class FrontEnd:
    """Several threads may use it.

    Attributes:
        config: the resolved configuration.
        tokenizer: None with skip_tokenizer_init.
        chat_template: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
        default_max_tokens: of these, if generation_config.json names it.
    """

    def __init__(self, args: EngineArgs, config: EngineConfig) -> None:
        """Read the tokenizer, the chat template and the generation defaults.

        Raises:
            ConfigError: one of them cannot be read.
        """
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        if not args.skip_tokenizer_init:
            self.tokenizer = read_tokenizer(config.model.folder, args.tokenizer)
            self.chat_template = read_chat_template(config.model.folder, args.tokenizer, args.chat_template)
        self._input_processor = InputProcessor(
            config.model,
            self.tokenizer,
            read_generation_config(config.model.folder),
            0 if args.seed is None else args.seed,
            use_generation_defaults=args.generation_config == "auto",
            structured_outputs=config.structured_outputs,
        )
        self.default_params = self._input_processor.default_params
        self.default_max_tokens = self._input_processor.default_max_tokens

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        thinks_first: bool = True,
        arrival_time: float | None = None,
        default_seed: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ProcessedRequest:
        """Validate and tokenise. The arguments are those of `InputProcessor.process`; the request arrives now if not before.

        Raises:
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect here, because requests run in the order of their arrival: leave it out, or "
                "start the engine with scheduling_policy='priority'"
            )
        return self._input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            thinks_first=thinks_first,
            default_seed=default_seed,
            trace_headers=trace_headers,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids; see `InputProcessor.encode`."""
        return self._input_processor.encode(text, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as the token ids of a prompt, by the model's chat template."""
        text = self.render_text(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],  # Any: JSON
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """What `render_chat` tokenises: the template has written the special tokens."""
        if self.tokenizer is None or self.chat_template is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        return self.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """The parameters of a chat that `render_chat` renders with `tools`: calls of one that is strict satisfy its schema."""
        if not tools or self.chat_template is None:
            return params
        given = params or self.default_params
        constrained = constrain_tools(given, tools, markup=self.tool_markup)
        return params if constrained is given else constrained

    @cached_property
    def tool_markup(self) -> ToolMarkup | None:
        """How the model writes calls, by its chat template."""
        return detect_parsers(self.chat_template).markup

    def make_grammars(self) -> StructuredOutputManager | None:
        """For an engine core in this process."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else make_grammars(self.config, lambda: tokenizer)


def resolve_config(args: EngineArgs) -> EngineConfig:
    """The concrete configuration of the model and this machine. Reads the model's config, and fetches a hub id's files.

    Raises:
        ConfigError: the arguments, the folder or the machine do not fit.
    """
    folder = resolve_model_folder(args.model, args.revision)
    return resolve(
        args,
        folder=folder,
        architecture=parse_architecture(read_model_config(folder, args.hf_overrides)),
        machine=detect_machine(args.device),
        timeout_seconds=envs.execute_model_timeout_seconds(),
    )


def make_grammars(config: EngineConfig, read: Callable[[], Tokenizer]) -> StructuredOutputManager:
    """What compiles grammars. It costs nothing before the first request that needs it: then `read` gives the tokenizer."""
    vocab_size = config.model.architecture.vocab_size
    create = partial(_create_backend, config, read)
    return StructuredOutputManager(create, vocab_size, num_buffers=2 * config.scheduler.max_depth)


def _create_backend(config: EngineConfig, read: Callable[[], Tokenizer]) -> GrammarBackend:
    architecture, tokenizer = config.model.architecture, read()
    generation_config = {**(read_generation_config(config.model.folder) or {}), **config.model.generation_overrides}
    eos = model_eos_token_ids(architecture, tokenizer, generation_config)
    return create_backend(config.structured_outputs.backend, tokenizer, architecture.vocab_size, sorted(eos))


def read_tokenizer(model_folder: Path, tokenizer: str | None) -> Tokenizer:
    """The model's own tokenizer, or that of another folder or hub id.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    source = _tokenizer_source(model_folder, tokenizer)
    return gguf_tokenizer(read_gguf(source)) if source.is_file() else Tokenizer.from_folder(source)


def read_chat_template(model_folder: Path, tokenizer: str | None, given: str | None) -> ChatTemplate:
    """That of the tokenizer's source; `given`: a file or a text instead of it.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    source = _tokenizer_source(model_folder, tokenizer)
    if source.is_file():
        return gguf_chat_template(read_gguf(source), given)
    return ChatTemplate.from_folder(source, given)


def _tokenizer_source(model_folder: Path, tokenizer: str | None) -> Path:
    """A folder, or a GGUF file without a tokenizer.json beside it."""
    source = model_folder if tokenizer is None else resolve_tokenizer_folder(tokenizer)
    return source.parent if source.is_file() and (source.parent / "tokenizer.json").is_file() else source
