"""`InputProcessor`: a prompt and its parameters, checked and resolved into what the engine core runs.

The only place where a request is checked against the model's limits; every front end uses it. It counts the requests that it
checks. If neither a request nor the caller has a seed, the request's seed follows from (engine seed, count).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np

from inflight.config.engine import ModelConfig, StructuredOutputsConfig
from inflight.engine.generation_defaults import default_sampling_params, model_eos_token_ids
from inflight.errors import ContextLengthExceededError, InvalidRequestError
from inflight.interface.request import EngineCoreRequest, Int32Array, ResolvedSampling
from inflight.sample.seeds import derive_seed
from inflight.sample.validation import check_sampling
from inflight.sampling_params import SamplingParams
from inflight.structured_output.selector import backend_class
from inflight.structured_output.spec import GrammarSpec
from inflight.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request, ready: `children` go to the engine core, all of it to the output processor.

    `prompt` is None when the request was given as token ids. `children` are in the order of their index. `trace_headers` are
    the W3C headers that came with it, in lower case: observers of the engine get them. `unenforced`: the places in its JSON
    schemas that the grammar does not enforce.
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
    """Several threads may use it: it keeps nothing of a request except the count. If their order is not known, the caller
    names the `default_seed` of each request.

    Attributes:
        default_params: the `SamplingParams` of a request that brings none.
        default_max_tokens: of these, if generation_config.json names it.
        eos_token_ids: the model's own end tokens, from all its files.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any] | None,  # Any: JSON
        engine_seed: int,
        *,
        use_generation_defaults: bool = True,
        structured_outputs: StructuredOutputsConfig | None = None,
    ) -> None:
        """`generation_config` is generation_config.json, or None. Its end tokens count also without its defaults. Without
        `structured_outputs` no request may have any."""
        self._tokenizer = tokenizer
        self._vocab_size = model_config.architecture.vocab_size
        self._max_model_len = model_config.max_model_len
        self._engine_seed = engine_seed
        self._numbers = itertools.count(1)
        overrides = model_config.generation_overrides
        generation_config = {**(generation_config or {}), **overrides}
        defaults = generation_config if use_generation_defaults else overrides
        self.default_params = default_sampling_params(defaults)
        self.default_max_tokens = None if defaults.get("max_new_tokens") is None else self.default_params.max_tokens
        self.eos_token_ids = model_eos_token_ids(model_config.architecture, tokenizer, generation_config)
        self._structured_outputs = structured_outputs
        self._reasoning_end_ids: tuple[int, ...] = ()
        if structured_outputs is not None and structured_outputs.reasoning_end and tokenizer is not None:
            self._reasoning_end_ids = tuple(tokenizer.encode(structured_outputs.reasoning_end, False))

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        thinks_first: bool = True,
        default_seed: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ProcessedRequest:
        """Check and resolve one request.

        Args:
            params: None takes `default_params`. If the context has room for fewer than `max_tokens` tokens, the request ends
                with the context, with the finish reason "length". If `min_tokens` is larger than this room, end tokens are
                never drawn.
            arrival_time: `time.monotonic()`.
            cache_salt: also a key of a dict prompt, which then counts.
            add_special_tokens: False for a rendered chat template, which holds its own.
            thinks_first: whether a grammar starts only after the engine's `reasoning_end`, if the engine has one. False if the
                model is not asked to think: for a raw prompt, or the continuation of an answer.
            default_seed: the seed if `params` have none. None derives one from the count of checked requests.

        Raises:
            ContextLengthExceededError: the prompt leaves no room for a token.
            InvalidRequestError: says what was given, what is allowed and what to do.
        """
        text, token_ids, cache_salt = self._read_prompt(prompt, cache_salt, add_special_tokens)
        room = self._check_length(len(token_ids))
        params = self.default_params if params is None else params
        unenforced = self._check_structured_outputs(params)
        self._check_params(params)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        sampling = ResolvedSampling(
            params=params,
            seed=self._seed(params.seed, default_seed),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
            eos_token_ids=eos,
            reasoning_end_ids=self._reasoning_end_of(token_ids) if params.structured_outputs and thinks_first else (),
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
            trace_headers=dict(trace_headers or {}),
            unenforced=unenforced,
        )

    def _check_structured_outputs(self, params: SamplingParams) -> tuple[str, ...]:
        """Check all that can be checked before the grammar is compiled, keywords of JSON schemas too. Returns what is not
        enforced."""
        wanted = params.structured_outputs
        if wanted is None:
            return ()
        if self._structured_outputs is None or self._tokenizer is None:
            raise InvalidRequestError(
                "structured_outputs needs a tokenizer, and the engine has none (skip_tokenizer_init=True); leave it out"
            )
        if not self.eos_token_ids:
            raise InvalidRequestError("structured_outputs needs a model with an EOS token: a grammar ends by one")
        if params.allowed_token_ids is not None:
            raise InvalidRequestError(
                "allowed_token_ids and structured_outputs both say which tokens may come, and may leave none; give one"
            )
        return tuple(backend_class(self._structured_outputs.backend).relax(GrammarSpec.from_params(wanted))[1])

    def _reasoning_end_of(self, prompt_token_ids: Int32Array) -> tuple[int, ...]:
        """The marker to wait for; none where the prompt's last turn holds it."""
        marker, prompt = self._reasoning_end_ids, prompt_token_ids.tolist()
        turn = next((i + 1 for i in range(len(prompt) - 1, -1, -1) if prompt[i] in self.eos_token_ids), 0)
        last = range(turn, len(prompt) - len(marker) + 1)
        return () if any(tuple(prompt[i : i + len(marker)]) == marker for i in last) else marker

    # -- the prompt ----------------------------------------------------------------------------------------------------

    def _read_prompt(self, prompt: Prompt, salt: str, add_special_tokens: bool) -> tuple[str | None, Int32Array, str]:
        """Text if there is any, token ids, cache salt."""
        given: object = prompt
        if isinstance(prompt, Mapping):
            given, salt = _open_dict(prompt, salt)
        if not isinstance(salt, str):
            raise InvalidRequestError(f"cache_salt={salt!r} is not a string")
        if not isinstance(given, str):
            return None, self._check_token_ids(given), salt
        return given, self._check_token_ids(self.encode(given, add_special_tokens)), salt

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A prompt's token ids. A text that is far too long is refused before it is tokenised, which would take seconds.

        Raises:
            ContextLengthExceededError: it is too long.
            InvalidRequestError: the text is not valid Unicode, or there is no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                "the prompt is text, but the engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids"
            )
        self._check_length(self._tokenizer.fewest_tokens(text), "at least ")
        return self._tokenizer.encode(text, add_special_tokens)

    def _check_token_ids(self, token_ids: object) -> Int32Array:
        if isinstance(token_ids, (bytes, bytearray)) or not isinstance(token_ids, (Sequence, np.ndarray)):
            raise InvalidRequestError(
                f"a prompt must be text, a list of token ids, {{'prompt': ...}} or {{'prompt_token_ids': ...}}; "
                f"this one is a {type(token_ids).__name__}"
            )
        if len(token_ids) == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        self._check_length(len(token_ids))  # before anything is copied
        if set(map(type, token_ids)) == {
            int
        }:  # without a loop in Python: a long prompt is not to hold up other threads
            lowest, highest = min(token_ids), max(token_ids)
            if lowest >= 0 and highest < self._vocab_size:
                return np.array(token_ids, dtype=np.int32)
        for position, token_id in enumerate(token_ids):  # the slow way, which knows where it is wrong
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
        if self._tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise InvalidRequestError(
                        f"{name} needs a tokenizer, and the engine has none (skip_tokenizer_init=True): leave it out"
                    )

    def _tokenize_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the beginning of a text and after a space, if that differs."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip(" ")
            at_start = self._tokenize_bad_word(word, bare or word)
            found[at_start] = None
            if bare:
                after_space = self._tokenize_bad_word(word, " " + bare)
                if after_space[-len(at_start) :] != at_start:  # else the first covers it
                    found[after_space] = None
        return tuple(found)

    def _tokenize_bad_word(self, word: str, variant: str) -> tuple[int, ...]:
        assert self._tokenizer is not None
        token_ids = self._tokenizer.encode(variant, add_special_tokens=False)
        unknown = self._tokenizer.unk_token_id in token_ids
        if not token_ids or unknown or max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(f"the bad word {word!r} has no tokens in the vocabulary; leave it out")
        return tuple(token_ids)

    def _seed(self, seed: int | None, default_seed: int | None) -> int:
        """`seed`: the user's. A request that has one is counted all the same."""
        if default_seed is None:
            default_seed = derive_seed(self._engine_seed, next(self._numbers))
        return default_seed if seed is None else derive_seed(seed, 0)


def _open_dict(prompt: Mapping[str, object], cache_salt: str) -> tuple[object, Any]:  # Any: checked by the caller
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
    given = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    return given, prompt.get("cache_salt", cache_salt)


def _make_children(parent: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """n sequences with seeds of their own. The first computes the prompt, and its logprobs, for all."""
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
