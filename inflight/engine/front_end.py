"""`FrontEnd`: all of a model except its weights: configuration, tokenizer, chat template, defaults, checks of requests.

`LLMEngine` and `AsyncLLM` each have one. It imports no torch, so it starts while the engine's process loads the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from inflight import envs
from inflight.config.engine import EngineConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.gguf_config import read_model_config
from inflight.config.gguf_file import read_gguf
from inflight.config.machine import detect_machine
from inflight.config.parse_architecture import parse_architecture
from inflight.config.resolve import resolve
from inflight.engine.generation_defaults import model_eos_token_ids
from inflight.engine.input_processor import InputProcessor, ProcessedRequest, Prompt, RequestOptions
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


class ChatOptions(TypedDict, total=False):
    """How a conversation is rendered.

    Attributes:
        tools: functions that the model may call, as JSON schemas. Default: none.
        add_generation_prompt: whether to open the assistant's turn. Default: True.
        continue_final_message: whether the model continues the last message. Default: False.
        chat_template_kwargs: further variables for the template. Default: none.
    """

    tools: Sequence[Mapping[str, Any]] | None  # Any: JSON, checked by the chat template
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The model that is served. `name`: as it was given, or "embedded". `num_kv_cache_tokens`: how many fit the KV cache."""

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    max_num_seqs: int
    num_kv_cache_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, num_kv_cache_tokens: int) -> ModelInfo:
        return cls(
            name=config.model.name,
            max_model_len=config.model.max_model_len,
            vocab_size=config.model.architecture.vocab_size,
            dtype=config.model.dtype,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_kv_cache_tokens=num_kv_cache_tokens,
        )


class FrontEnd:
    """Several threads may use it.

    Attributes:
        config: the resolved configuration.
        tokenizer: None with skip_tokenizer_init.
        chat_template: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
        default_max_tokens: their `max_tokens`, if generation_config.json names one.
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
        default_seed: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ProcessedRequest:
        """`InputProcessor.process`, which describes the arguments and errors. A priority is refused if it has no effect."""
        priority = options.get("priority", 0)
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect here, because requests run in the order of their arrival: leave it out, or "
                "start the engine with scheduling_policy='priority'"
            )
        return self._input_processor.process(request_id, prompt, params, default_seed=default_seed, **options)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._input_processor.encode(text, add_special_tokens=add_special_tokens)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """A conversation as text, by the model's chat template. It holds its special tokens.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
            TokenizerError: the model has no chat template.
        """
        if self.chat_template is None:
            raise InvalidRequestError("chat needs a tokenizer, and the engine has none (skip_tokenizer_init=True)")
        return self.chat_template.render(messages, **options)

    def with_strict_tools(
        self, params: SamplingParams | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> SamplingParams | None:
        """The parameters of a chat with these tools. If a tool is strict, a grammar makes its calls satisfy its schema."""
        if not tools or self.chat_template is None:
            return params
        given = params or self.default_params
        constrained = constrain_tools(given, tools, markup=self.tool_markup)
        return params if constrained is given else constrained

    @cached_property
    def tool_markup(self) -> ToolMarkup | None:
        """How the model writes tool calls, found in its chat template."""
        return detect_parsers(self.chat_template).markup

    def make_grammars(self) -> StructuredOutputManager | None:
        """For an engine core in this process."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else make_grammars(self.config, lambda: tokenizer)


def resolve_config(args: EngineArgs) -> EngineConfig:
    """The configuration of this model on this machine. Reads the model's config.json, and fetches the files of a hub id.

    Raises:
        ConfigError: the arguments, the folder or the machine do not fit.
    """
    folder = resolve_model_folder(args.model, args.revision)
    return resolve(
        args,
        folder=folder,
        architecture=parse_architecture(read_model_config(folder)),
        machine=detect_machine(args.device),
        timeout_seconds=envs.execute_model_timeout_seconds(),
    )


def make_grammars(config: EngineConfig, read: Callable[[], Tokenizer]) -> StructuredOutputManager:
    """The manager that compiles grammars. `read`: gives the tokenizer; called at the first request with a grammar."""
    architecture = config.model.architecture

    def create() -> GrammarBackend:
        tokenizer = read()
        eos = model_eos_token_ids(architecture, tokenizer, read_generation_config(config.model.folder))
        return create_backend(config.structured_outputs.backend, tokenizer, architecture.vocab_size, sorted(eos))

    return StructuredOutputManager(create, architecture.vocab_size, num_buffers=2 * config.scheduler.max_depth)


def read_tokenizer(model_folder: Path, tokenizer: str | None) -> Tokenizer:
    """The model's own tokenizer, or that of another folder or hub id.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    source = _tokenizer_source(model_folder, tokenizer)
    return gguf_tokenizer(read_gguf(source)) if source.is_file() else Tokenizer.from_folder(source)


def read_chat_template(model_folder: Path, tokenizer: str | None, given: str | None) -> ChatTemplate:
    """The chat template that belongs to the tokenizer, or `given` in its place: a file, or a text.

    Raises:
        ConfigError: it cannot be read, or is no template.
    """
    source = _tokenizer_source(model_folder, tokenizer)
    if source.is_file():
        return gguf_chat_template(read_gguf(source), given)
    return ChatTemplate.from_folder(source, given)


def _tokenizer_source(model_folder: Path, tokenizer: str | None) -> Path:
    """A folder, or a GGUF file that has no tokenizer.json beside it."""
    source = model_folder if tokenizer is None else resolve_tokenizer_folder(tokenizer)
    return source.parent if source.is_file() and (source.parent / "tokenizer.json").is_file() else source
