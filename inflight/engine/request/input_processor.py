"""`InputProcessor`: tokenises prompts, checks requests, and makes the requests that the engine core runs.

This file checks each request against the model's limits. The processor also counts the requests. If a request has no seed, its
seed is derived from the engine's seed and the count.
"""

import dataclasses
import itertools
import time
from collections.abc import Mapping
from typing import Any, Unpack

from inflight.config.engine import EngineConfig
from inflight.engine.request.answer_frames import FIND, AnswerFrames
from inflight.engine.request.bad_words import tokenize_bad_words
from inflight.engine.request.chats import Chats
from inflight.engine.request.image_support import ImageSupport, NoImages
from inflight.engine.request.prepared_prompt import PreparedPrompt
from inflight.engine.request.processed import ProcessedRequest, RequestOptions
from inflight.engine.request.prompt import Prompt, as_token_ids, open_prompt, token_array
from inflight.engine.request.prompt_request import prompt_request
from inflight.engine.request.siblings import siblings, unknown_option
from inflight.engine.request.text_parameters import check_text_parameters, unenforced_places
from inflight.engine.start.generation_defaults import default_sampling_params, model_eos_token_ids
from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.interface.part_kinds import PARTS_OF_PARAMETERS, PARTS_OF_PROMPTS, parts_of
from inflight.interface.parts import contents_of
from inflight.interface.request import AnswerFrame, EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.kv_cache.block_hash import BlockHasher
from inflight.pooling_params import Params
from inflight.sample.seeds import derive_seed
from inflight.sample.validation import check_num_logprobs, check_sampling
from inflight.sampling_params import SamplingParams
from inflight.tokenizer.chat_template import ChatTemplate
from inflight.tokenizer.tokenizer import Tokenizer


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
        images: prepares prompts with images.
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
        images: ImageSupport | None = None,
    ) -> None:
        """
        Args:
            generation_config: the content of generation_config.json; None if the model has no such file.
            use_generation_defaults: whether to use the sampling defaults in `generation_config`. If False, only its end tokens
                are used.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.images: ImageSupport = images or NoImages()
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
        params: Params | None = None,
        *,
        default_seed: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> ProcessedRequest:
        """Check and resolve one request.

        Args:
            params: the sampling parameters. None means `default_params`. If the context has room for fewer than `max_tokens`
                tokens, the request ends when the context is full, with the finish reason "length". If the context has room for
                fewer than `min_tokens` tokens, end tokens are never drawn. With `PoolingParams` nothing is drawn: the
                request makes vectors of its prompt (`RequestOutput.parts["pooling"]`).
            default_seed: used if `params` has no seed. If `default_seed` is None too, a seed is derived from the number of
                earlier calls.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a generated token.
            InvalidRequestError: the request is wrong. The message says what was given, what is allowed and what to do.
        """
        if not options.keys() <= RequestOptions.__annotations__.keys():
            raise unknown_option(options)
        arrival_time, priority = options.get("arrival_time", time.monotonic()), options.get("priority", 0)
        if priority and self.config.scheduler.policy != "priority":
            raise InvalidRequestError(
                f"priority={priority} has no effect here, because requests run in the order of their arrival: leave it out, or "
                "start the engine with scheduling_policy='priority'",
                "priority",
            )
        if not isinstance(params, SamplingParams | None):
            part = PARTS_OF_PROMPTS[type(params)](params, self.config.model)
            next(self._numbers)  # each request counts, so that the seeds of later ones do not depend on its kind
            text, token_ids, cache_salt = self._read_prompt(prompt, options, params.truncate_prompt_tokens, draws=False)
            names = self._block_names(cache_salt, token_ids, options)
            return prompt_request(request_id, text, token_ids, cache_salt, names, part, arrival_time, options)
        if self.config.model.architecture.pooler is not None:
            tasks = " and ".join(self.config.model.pooler.tasks)
            raise InvalidRequestError(f"this model generates no text; it does {tasks}", "task")
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
            sequences=(parent,) if params.n == 1 else siblings(parent),
            trace_headers=options.get("trace_headers", {}),
            unenforced=unenforced,
            make_parser=options.get("make_parser"),
            block_names=self._block_names(cache_salt, token_ids, options),
        )

    def prepare(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> PreparedPrompt:
        """Returns a prompt for `process`. Of the options, it has `cache_salt` and `parts`.

        Raises: as `process`.
        """
        text, token_ids, cache_salt = self._read_prompt(prompt, options)
        return PreparedPrompt(text, token_ids, cache_salt, tuple(options.get("parts", ())))

    def _block_names(self, cache_salt: str, token_ids: Int32Array, options: RequestOptions) -> bytes:
        if self._hasher is None:
            return b""
        return self._hasher.names(cache_salt, token_ids, contents_of(options.get("parts", ())))

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

    def _read_prompt(
        self, prompt: Prompt, options: RequestOptions, cut_to: int | None = None, *, draws: bool = True
    ) -> tuple[str | None, Int32Array, str]:
        """Returns the text (None for token ids), the token ids, and the cache salt.

        Args:
            cut_to: a longer prompt is cut to so many tokens (-1: as many as the model takes); None: it is refused.
            draws: whether there must be room for a token behind the prompt.
        """
        if isinstance(prompt, PreparedPrompt):
            options["parts"] = prompt.parts
            return prompt.text, prompt.array, prompt.cache_salt
        given, salt = open_prompt(prompt, options.get("cache_salt", ""))
        text = given if isinstance(given, str) else None
        may_have_images = isinstance(prompt, Mapping) or self.config.model.architecture.vision is not None
        images = self.images.processed(prompt, salt) if may_have_images else ()
        given = self.images.expanded(given, images) if images else given
        most = self._max_model_len if cut_to in (None, -1) else min(cut_to, self._max_model_len)
        adds_special = options.get("add_special_tokens", True)
        if isinstance(given, str):
            if cut_to is not None and self.tokenizer is not None:
                given = self.tokenizer.encode_cut(given, most, adds_special)
            else:
                given = self.encode(given, add_special_tokens=adds_special, draws=draws)
        token_ids = as_token_ids(given)
        if cut_to is not None:
            token_ids = token_ids[:most]
        self._check_length(len(token_ids), draws=draws)  # before `token_array` copies the tokens
        array = token_array(token_ids, self._vocab_size)
        if may_have_images and (parts := self.images.parts(array, images, options.get("parts", ()))):
            options["parts"] = parts
        return text, array, salt

    def encode(self, text: str, *, add_special_tokens: bool = True, draws: bool = True) -> list[int]:
        """Tokenise a prompt. If a text is so long that its tokens cannot fit, it is refused before it is tokenised, because
        tokenising it would take seconds.

        Raises:
            ContextLengthExceededError: the text is too long.
            InvalidRequestError: the text is not valid Unicode, or there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids",
                "prompt",
            )
        self._check_length(self.tokenizer.fewest_tokens(text), "at least ", draws=draws)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_length(self, num_prompt_tokens: int, how_exact: str = "", *, draws: bool = True) -> None:
        if num_prompt_tokens + draws > self._max_model_len:
            needed = "and at least one more is needed to generate: shorten it" if draws else "so shorten it"
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self._max_model_len} tokens. However, the prompt is too long: "
                f"it has {how_exact}{num_prompt_tokens} tokens, {needed}"
                f"{'.' if draws else ', or let it be cut (truncate_prompt_tokens, or truncate).'}",
                num_prompt_tokens,
            )
