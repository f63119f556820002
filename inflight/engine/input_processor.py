"""`InputProcessor`: renders chats, tokenises prompts, checks requests, and makes of them what the engine core runs.

This is the only place where a request is checked against the model's limits. It counts the requests: the seed of a request
that brings none follows from (engine seed, count).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NotRequired, TypedDict, Unpack

import numpy as np

from inflight.config.engine import EngineConfig
from inflight.engine.generation_defaults import default_sampling_params, model_eos_token_ids
from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.parsers.markup import ToolMarkup
from inflight.parsers.selector import detect_parsers
from inflight.parsers.tool_choice import constrain_tools
from inflight.sample.seeds import derive_seed
from inflight.sample.validation import check_sampling
from inflight.sampling_params import SamplingParams
from inflight.structured_output.selector import backend_class
from inflight.structured_output.spec import GrammarSpec
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class RequestOptions(TypedDict, total=False):
    """What a caller may say about a request besides its prompt and its parameters.

    Attributes:
        arrival_time: `time.monotonic()` when the request came. Default: now.
        priority: lower numbers are served first, if the scheduling policy is "priority". Default: 0.
        cache_salt: only requests with the same salt share cached prompts. The "cache_salt" of a dict prompt replaces it.
        add_special_tokens: False for text of a chat template, which holds its own special tokens. Default: True.
        thinks_first: whether a grammar starts only after the engine's `reasoning_end`, if the engine has one. False if the
            model is not asked to think: for a raw prompt, or for the continuation of an answer. Default: True.
        trace_headers: the W3C headers of the request, in lower case. Observers of the engine get them.
    """

    arrival_time: float
    priority: int
    cache_salt: str
    add_special_tokens: bool
    thinks_first: bool
    trace_headers: Mapping[str, str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request that is ready to start.

    Attributes:
        prompt: None if the request was given as token ids.
        children: its sequences, in the order of their index. They go to the engine core.
        unenforced: the places in its JSON schemas that the grammar does not enforce.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    children: tuple[EngineCoreRequest, ...]
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()


class InputProcessor:
    """Several threads may use it. If the order of their requests is not known, the caller gives each its `default_seed`.

    Attributes:
        config: the resolved configuration.
        tokenizer: None with skip_tokenizer_init.
        chat_template: None with skip_tokenizer_init.
        default_params: the `SamplingParams` of a request that brings none.
        default_max_tokens: their `max_tokens`, if generation_config.json names one.
        eos_token_ids: the model's end tokens, from all its files.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        generation_config: Mapping[str, Any] | None,  # Any: JSON
        *,
        seed: int,
        use_generation_defaults: bool = True,
    ) -> None:
        """
        Args:
            generation_config: what generation_config.json says. None: the model has no such file.
            use_generation_defaults: False takes only its end tokens.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._vocab_size = config.model.architecture.vocab_size
        self._max_model_len = config.model.max_model_len
        self._seed = seed
        self._numbers = itertools.count(1)
        overrides = config.model.generation_overrides
        generation_config = {**(generation_config or {}), **overrides}
        defaults = generation_config if use_generation_defaults else overrides
        self.default_params = default_sampling_params(defaults)
        self.default_max_tokens = None if defaults.get("max_new_tokens") is None else self.default_params.max_tokens
        self.eos_token_ids = model_eos_token_ids(config.model.architecture, tokenizer, generation_config)
        self._reasoning_end_ids: tuple[int, ...] = ()
        if config.structured_outputs.reasoning_end and tokenizer is not None:
            self._reasoning_end_ids = tuple(tokenizer.encode(config.structured_outputs.reasoning_end, False))

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        default_seed: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ProcessedRequest:
        """Check and resolve one request.

        Args:
            params: None takes `default_params`. If the context has room for fewer than `max_tokens` tokens, the request ends
                with the context, with the finish reason "length". If `min_tokens` is larger than this room, end tokens are
                never drawn.
            default_seed: the seed if `params` have none. None derives one from the count of requests.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a token.
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        arrival_time, priority = options.get("arrival_time", time.monotonic()), options.get("priority", 0)
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect here, because requests run in the order of their arrival: leave it out, or "
                "start the engine with scheduling_policy='priority'"
            )
        text, token_ids, cache_salt = self._read_prompt(prompt, options)
        room = self._check_length(len(token_ids))
        params = self.default_params if params is None else params
        unenforced = self._check_structured_outputs(params)
        self._check_params(params)
        # a request that brings a seed is counted, too: it does not change the seeds of the later ones
        seed = derive_seed(self._seed, next(self._numbers)) if default_seed is None else default_seed
        thinks_first = params.structured_outputs is not None and options.get("thinks_first", True)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        sampling = ResolvedSampling(
            params=params,
            seed=seed if params.seed is None else derive_seed(params.seed, 0),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            eos_token_ids=eos,
            reasoning_end_ids=self._reasoning_end_of(token_ids) if thinks_first else (),
            bad_words_token_ids=self._tokenize_bad_words(params.bad_words or ()),
        )
        check_sampling(sampling, self._vocab_size)
        parent = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        return ProcessedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids.tolist(),
            params=params,
            arrival_time=arrival_time,
            children=_make_children(parent),
            trace_headers=options.get("trace_headers", {}),
            unenforced=unenforced,
        )

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

    # -- grammars ------------------------------------------------------------------------------------------------------

    def _check_structured_outputs(self, params: SamplingParams) -> tuple[str, ...]:
        """Check what can be checked before the grammar is compiled. Returns the places that the grammar will not enforce."""
        wanted = params.structured_outputs
        if wanted is None:
            return ()
        if self.tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and the engine has none (skip_tokenizer_init=True); leave it out"
            )
        if not self.eos_token_ids:
            raise InvalidRequestError("structured_outputs needs a model with an EOS token: a grammar ends by one")
        if params.allowed_token_ids is not None:
            raise InvalidRequestError(
                "allowed_token_ids and structured_outputs both say which tokens may come, and may leave none; give one"
            )
        return tuple(backend_class(self.config.structured_outputs.backend).relax(GrammarSpec.from_params(wanted))[1])

    def _reasoning_end_of(self, prompt_token_ids: Int32Array) -> tuple[int, ...]:
        """The marker behind which the grammar starts; none if the prompt's last turn holds it already."""
        marker, prompt = self._reasoning_end_ids, prompt_token_ids.tolist()
        turn = next((i + 1 for i in range(len(prompt) - 1, -1, -1) if prompt[i] in self.eos_token_ids), 0)
        last = range(turn, len(prompt) - len(marker) + 1)
        return () if any(tuple(prompt[i : i + len(marker)]) == marker for i in last) else marker

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt, options: RequestOptions) -> tuple[str | None, Int32Array, str]:
        """Returns the text (None if there is none), the token ids and the cache salt."""
        given: object = prompt
        salt: object = options.get("cache_salt", "")
        if isinstance(prompt, Mapping):
            given, salt = _open_dict(prompt), prompt.get("cache_salt", salt)
        if not isinstance(salt, str):
            raise InvalidRequestError(f"cache_salt={salt!r} is not a string")
        if not isinstance(given, str):
            return None, self._check_token_ids(given), salt
        token_ids = self.encode(given, add_special_tokens=options.get("add_special_tokens", True))
        return given, self._check_token_ids(token_ids), salt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids. A text that is far too long is refused before it is tokenised, which would take seconds.

        Raises:
            ContextLengthExceededError: it is too long.
            InvalidRequestError: the text is not valid Unicode, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids"
            )
        self._check_length(self.tokenizer.fewest_tokens(text), "at least ")
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_token_ids(self, token_ids: object) -> Int32Array:
        if isinstance(token_ids, (bytes, bytearray)) or not isinstance(token_ids, (Sequence, np.ndarray)):
            raise InvalidRequestError(
                f"a prompt must be text, a list of token ids, {{'prompt': ...}} or {{'prompt_token_ids': ...}}; "
                f"this one is a {type(token_ids).__name__}"
            )
        if len(token_ids) == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        self._check_length(len(token_ids))  # before anything is copied
        # without a loop in Python, so that a long prompt does not hold up other threads
        is_valid = set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self._vocab_size
        for position, token_id in enumerate(() if is_valid else token_ids):  # finds the position of the wrong token
            if isinstance(token_id, (bool, np.bool_)) or not isinstance(token_id, (int, np.integer)):
                raise InvalidRequestError(f"prompt token {token_id!r} at position {position} is not an integer")
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt token {token_id} at position {position} is outside the vocabulary of {self._vocab_size} tokens"
                )
        return np.array(token_ids, dtype=np.int32)

    def _check_length(self, num_prompt_tokens: int, how_exact: str = "") -> int:
        """How many tokens may follow the prompt."""
        room = self._max_model_len - num_prompt_tokens
        if room < 1:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, the prompt is too long: "
                f"it has {how_exact}{num_prompt_tokens} tokens, and at least one more is needed to generate: shorten it."
            )
        return room

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._vocab_size:
                raise InvalidRequestError(f"{name}={count} is more than the vocabulary's {self._vocab_size} tokens")
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise InvalidRequestError(
                        f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init=True): leave it out"
                    )

    def _tokenize_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the beginning of a text, and those after a space if they differ."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            at_start = self._tokenize_bad_word(word, bare or word)
            found[at_start] = None
            if bare:
                after_space = self._tokenize_bad_word(word, " " + bare)
                if after_space[-len(at_start) :] != at_start:  # otherwise `at_start` forbids it already
                    found[after_space] = None
        return tuple(found)

    def _tokenize_bad_word(self, word: str, variant: str) -> tuple[int, ...]:
        assert self.tokenizer is not None
        token_ids = self.tokenizer.encode(variant, add_special_tokens=False)
        unknown = self.tokenizer.unk_token_id in token_ids
        if not token_ids or unknown or max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(f"the bad word {word!r} has no tokens in the vocabulary; leave it out")
        return tuple(token_ids)


def _open_dict(prompt: Mapping[str, object]) -> object:
    """The text or the token ids in it."""
    if unknown := sorted(str(key) for key in set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}):
        raise InvalidRequestError(
            f"unknown key {unknown[0]!r} in the prompt; known are 'prompt', 'prompt_token_ids' and 'cache_salt'"
        )
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise InvalidRequestError("a dict prompt has either 'prompt' (text) or 'prompt_token_ids', and not both")
    if "prompt" in prompt and not isinstance(prompt["prompt"], str):
        raise InvalidRequestError(f"'prompt' is a {type(prompt['prompt']).__name__}; it must be text")
    if isinstance(prompt.get("prompt_token_ids"), str):
        raise InvalidRequestError("'prompt_token_ids' is text; give it as 'prompt'")
    return prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]


def _make_children(parent: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """n sequences, each with a seed of its own. The first one computes the prompt and its log-probabilities for all."""
    params, seed = parent.sampling.params, parent.sampling.seed
    if params.n == 1:
        return (parent,)
    without_prompt_logprobs = dataclasses.replace(params, prompt_logprobs=None)
    leader = f"0_{parent.request_id}"
    return tuple(
        dataclasses.replace(
            parent,
            request_id=f"{index}_{parent.request_id}",
            sampling=dataclasses.replace(
                parent.sampling,
                params=params if index == 0 else without_prompt_logprobs,
                seed=derive_seed(seed, index),
            ),
            prompt_leader=None if index == 0 else leader,
        )
        for index in range(params.n)
    )
