"""`InputProcessor`: tokenises prompts, checks requests, and makes the requests that the engine core runs.

This file checks each request against the model's limits. The processor also counts the requests. If a request has no seed, its
seed is derived from the engine's seed and the count.
"""

import dataclasses
import difflib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from inflight.config.engine import EngineConfig
from inflight.engine.request.answer_frames import FIND, AnswerFrames, GivenFrame
from inflight.engine.request.chats import Chats
from inflight.engine.request.prompt import Prompt, as_token_ids, open_prompt, token_array
from inflight.engine.request.text_parameters import check_text_parameters, tokenize_bad_words, unenforced_places
from inflight.engine.start.generation_defaults import default_sampling_params, model_eos_token_ids
from inflight.errors import ContextLengthExceededError, InvalidRequestError, UnknownParameterError
from inflight.interface.part_kinds import PARTS_OF_PARAMETERS, parts_of
from inflight.interface.parts import RequestPart
from inflight.interface.request import AnswerFrame, EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.kv_cache.block_hash import BlockHasher
from inflight.parsers.output_parser import OutputParser
from inflight.sample.seeds import derive_seed
from inflight.sample.validation import check_num_logprobs, check_sampling
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer


class RequestOptions(TypedDict, total=False):
    """Optional arguments of a request, besides its prompt and its sampling parameters.

    Attributes:
        arrival_time: when the request arrived, as a time of `time.monotonic()`. Default: now.
        priority: if the scheduling policy is "priority", lower numbers are served first. Default: 0.
        cache_salt: only requests with the same salt share cached prompts. If the prompt is a dictionary with a "cache_salt",
            that salt is used instead.
        add_special_tokens: whether the tokenizer adds its special tokens. Set it to False if the text was rendered with a chat
            template, because such a text already contains them. Default: True.
        thinks_first: whether the model may think before it answers. If so, and if the engine has a `reasoning_end` marker (the
            text that ends the thinking), the grammar of the request applies to the text without its reasoning. Set it to False
            for a raw prompt, or to continue an answer. Default: True.
        answer_frame: where the reasoning is in the text, and what else may be around the text that a grammar constrains; None
            if there is nothing. It is used if the engine has no `reasoning_end`. Default: `FIND`. Then it is what the tags of
            the chat template say if the reasoning has a budget, and otherwise None.
        trace_headers: the W3C trace headers of the request, in lower case. Observers of the engine get them.
        make_parser: makes a parser for the text of one sequence. Outputs then have `events`, and stop strings are searched for
            in the content only. Default: None, no parser.
        parts: what the request wants beside its tokens (`RequestPart`), if no sampling parameter asks for it. Default: nothing.
    """

    arrival_time: float
    priority: int
    cache_salt: str
    add_special_tokens: bool
    thinks_first: bool
    answer_frame: GivenFrame
    trace_headers: Mapping[str, str]
    make_parser: Callable[[], OutputParser] | None
    parts: Sequence[RequestPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request that is ready to start.

    Attributes:
        prompt: the text, or None if the request was given as token ids.
        prompt_array: the `prompt_token_ids` as the engine core gets them, once for all `sequences`.
        sequences: its sequences, ordered by index. They are sent to the engine core.
        block_names: the names of the prompt's blocks (`BlockHasher.names`) if they decide which replica gets it; else b"".
        unenforced: the places in the request's JSON schemas that its grammar does not enforce.
        make_parser: makes a parser for the text of one of its sequences; None if there is none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_array: Int32Array
    params: SamplingParams
    arrival_time: float
    sequences: tuple[EngineCoreRequest, ...]
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    unenforced: tuple[str, ...] = ()
    make_parser: Callable[[], OutputParser] | None = None
    block_names: bytes = b""


class InputProcessor:
    """Several threads may call all methods. If `process` derives a seed from the number of its earlier calls, the seed depends
    on the order of the calls. If threads may change this order, the caller must give each request a `default_seed`.

    Attributes:
        config: the resolved configuration.
        tokenizer: None if skip_tokenizer_init=True.
        chat_template: None if skip_tokenizer_init=True.
        chats: renders conversations with the chat template.
        default_params: used for a request without `SamplingParams`.
        default_max_tokens: `max_new_tokens` in the model's generation defaults; None if they do not contain it.
        eos_token_ids: all end tokens that the model's files name.
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
            generation_config: the content of generation_config.json; None if the model has no such file.
            use_generation_defaults: whether to use the sampling defaults in `generation_config`. If False, only its end tokens
                are used.
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
        self.chats = Chats(chat_template, self.default_params)
        self.default_max_tokens = None if defaults.get("max_new_tokens") is None else self.default_params.max_tokens
        self.eos_token_ids = model_eos_token_ids(config.model.architecture, tokenizer, generation_config)
        self._frames = AnswerFrames(config, tokenizer, chat_template, self.eos_token_ids)
        self._hasher = None
        if config.parallel.routes_by_prefix:
            self._hasher = BlockHasher(config.model.fingerprint, config.cache.block_size)

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
            params: the sampling parameters. None means `default_params`. If the context has room for fewer than `max_tokens`
                tokens, the request ends when the context is full, with the finish reason "length". If the context has room for
                fewer than `min_tokens` tokens, end tokens are never drawn.
            default_seed: used if `params` has no seed. If `default_seed` is None too, a seed is derived from the number of
                earlier calls.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a generated token.
            InvalidRequestError: the request is wrong. The message says what was given, what is allowed and what to do.
        """
        if not options.keys() <= RequestOptions.__annotations__.keys():
            raise _unknown_option(options)
        arrival_time, priority = options.get("arrival_time", time.monotonic()), options.get("priority", 0)
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect here, because requests run in the order of their arrival: leave it out, or "
                "start the engine with scheduling_policy='priority'"
            )
        text, token_ids, cache_salt = self._read_prompt(prompt, options)
        room = self._max_model_len - len(token_ids)
        # a copy, because the caller may change its object later
        params = (self.default_params if params is None else params).checked_copy()
        check_text_parameters(params, self.tokenizer, self.eos_token_ids)
        unenforced = unenforced_places(params)
        check_num_logprobs(params, self._vocab_size)
        # Requests with a seed of their own count, too. So the derived seeds of later requests do not depend on this seed.
        seed = derive_seed(self._seed, next(self._numbers)) if default_seed is None else default_seed
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        sampling = ResolvedSampling(
            params=params,
            seed=seed if params.seed is None else derive_seed(params.seed, 0),
            max_tokens=max_tokens,
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            eos_token_ids=eos,
            answer_frame=self._frame_of(params, token_ids, max_tokens, options)
            if self._may_have_frame(params)
            else None,
            bad_words_token_ids=self._bad_words_of(params),
        )
        check_sampling(sampling, self._vocab_size)
        parent = EngineCoreRequest(request_id=request_id, sampling=sampling, priority=priority, cache_salt=cache_salt)
        if "parts" in options or any(getattr(params, name) is not None for name in PARTS_OF_PARAMETERS):
            parent = dataclasses.replace(parent, parts=parts_of(params, options.get("parts", ())))
        return ProcessedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids.tolist(),
            prompt_array=token_ids,
            params=params,
            arrival_time=arrival_time,
            sequences=(parent,) if params.n == 1 else _siblings(parent),
            trace_headers=options.get("trace_headers", {}),
            unenforced=unenforced,
            make_parser=options.get("make_parser"),
            block_names=b"" if self._hasher is None else self._hasher.names(cache_salt, token_ids),
        )

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _may_have_frame(self, params: SamplingParams) -> bool:
        """A frame serves a grammar or a reasoning budget, so most requests have none."""
        has_budget = params.thinking_token_budget is not None or self.config.reasoning_budget >= 0
        return has_budget or params.structured_outputs is not None

    def _frame_of(
        self, params: SamplingParams, token_ids: Int32Array, max_tokens: int, options: RequestOptions
    ) -> AnswerFrame | None:
        thinks_first, given = options.get("thinks_first", True), options.get("answer_frame", FIND)
        return self._frames.find(params, token_ids, max_tokens=max_tokens, thinks_first=thinks_first, given=given)

    def _bad_words_of(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words or self.tokenizer is None:
            return ()
        return tokenize_bad_words(params.bad_words, self.tokenizer, self._vocab_size)

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt, options: RequestOptions) -> tuple[str | None, Int32Array, str]:
        """Returns the text (None if the prompt was given as token ids), the token ids, and the cache salt."""
        given, salt = open_prompt(prompt, options.get("cache_salt", ""))
        text = given if isinstance(given, str) else None
        if text is not None:
            given = self.encode(text, add_special_tokens=options.get("add_special_tokens", True))
        token_ids = as_token_ids(given)
        self._check_length(len(token_ids))  # before `token_array` copies the tokens
        return text, token_array(token_ids, self._vocab_size), salt

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise a prompt. If a text is so long that its tokens cannot fit, it is refused before it is tokenised, because
        tokenising it would take seconds.

        Raises:
            ContextLengthExceededError: the text is too long.
            InvalidRequestError: the text is not valid Unicode, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids"
            )
        self._check_length(self.tokenizer.fewest_tokens(text), "at least ")
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_length(self, num_prompt_tokens: int, how_exact: str = "") -> None:
        if num_prompt_tokens >= self._max_model_len:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, the prompt is too long: "
                f"it has {how_exact}{num_prompt_tokens} tokens, and at least one more is needed to generate: shorten it.",
                num_prompt_tokens,
            )


def _unknown_option(options: RequestOptions) -> UnknownParameterError:
    """Makes the error for an option that `RequestOptions` does not have. A program may give it, since Python does not check the
    keys of a TypedDict."""
    known = RequestOptions.__annotations__
    name = next(name for name in options if name not in known)
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return UnknownParameterError(f"a request has no option {name!r}; {advice}")


def _siblings(parent: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """Returns the n sequences of a request with n > 1, each with its own seed. The first sequence computes the prompt, and what
    the request wants of the prompt. The other sequences use the KV cache of this prompt."""
    params, seed, leader = parent.sampling.params, parent.sampling.seed, f"0_{parent.request_id}"
    return tuple(
        dataclasses.replace(
            parent,
            request_id=f"{index}_{parent.request_id}",
            sampling=dataclasses.replace(parent.sampling, seed=derive_seed(seed, index)),
            prompt_leader=None if index == 0 else leader,
            parts=tuple(part for part in parent.parts if index == 0 or not part.is_of_leader),
        )
        for index in range(params.n)
    )
