"""`SamplingParams`: how the tokens of a request are chosen, and when the request ends. The values are checked here."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from inflight.errors import InvalidRequestError, UnknownParameterError
from inflight.foreign_parameters import FOREIGN_SAMPLING
from inflight.list_checks import as_biases, as_tuple, check_allowed_ids, check_biases, check_strings, check_token_ids
from inflight.setting import check_values, names_unknown, setting
from inflight.setting_text import parse_json_object
from inflight.structured_outputs_params import StructuredOutputsParams, check_constraint

MAX_N = 128
MAX_LOGPROBS = 100
# how many log-probabilities a request wants: of its outputs, and of its prompt
LOGPROBS_PARAMETERS = ("logprobs", "prompt_logprobs")
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_SEED = 2**63 - 1

_sampling = partial(setting, group="Sampling (default: the model's generation_config.json)")
_COUNT = {"bounds": (0, 2**31 - 1)}
_LOGPROBS = {"bounds": (0, MAX_LOGPROBS)}


class _CheckedValues:
    """The values of the fields when they were checked. They are in a slot, so they are no field and not in `vars`."""

    __slots__ = ("_checked_values",)

    _checked_values: tuple[object, ...]


@names_unknown(UnknownParameterError, FOREIGN_SAMPLING)
@dataclass(kw_only=True)
class SamplingParams(_CheckedValues):
    """How to sample. The names are those of the OpenAI API and vLLM. Most fields are also options of `inflight generate`.

    Fields may be changed later. A request gets a copy (`checked_copy`), whose values are right.

    Raises:
        InvalidRequestError: a value is out of bounds, or contradicts another value.
    """

    max_tokens: int | None = _sampling(
        16,
        "Largest number of tokens to emit. A request also ends when its context is full. Default: 256; in a chat: no limit.",
        bounds=(1, 2**31 - 1),
    )
    min_tokens: int = _sampling(0, "Until so many tokens are emitted, ignore end tokens and stop texts.", **_COUNT)
    temperature: float = _sampling(1.0, "0 is greedy: always the most probable token.", bounds=(0.0, 1e4))
    top_p: float = _sampling(
        1.0, "Draw from the fewest tokens that together have this probability.", bounds=(0.0, 1.0), excludes_low=True
    )
    top_k: int = _sampling(0, "Draw from the k most probable tokens; 0 or -1 is all.", bounds=(-1, 2**31 - 1))
    min_p: float = _sampling(
        0.0, "Drop tokens with less than this share of the top token's probability.", bounds=(0.0, 1.0)
    )
    presence_penalty: float = _sampling(
        0.0, "Subtracted once from the logit of each token emitted before.", bounds=(-2.0, 2.0)
    )
    frequency_penalty: float = _sampling(
        0.0, "Subtracted from the logit of a token for each time that it was emitted before.", bounds=(-2.0, 2.0)
    )
    repetition_penalty: float = _sampling(
        1.0,
        "Divides positive and multiplies negative logits of tokens that are in the prompt or were emitted before.",
        bounds=(0.0, 1e4),
        excludes_low=True,
    )
    seed: int | None = _sampling(
        None,
        "Makes draws repeatable: they depend only on the seed and the position. Default: derived from the input's row number.",
        bounds=(-MAX_SEED - 1, MAX_SEED),
    )
    n: int = _sampling(1, "Completions per prompt; they share the prompt's KV blocks.", short="-n", bounds=(1, MAX_N))
    stop: str | Sequence[str] | None = _sampling((), "End before this text. May be repeated.")
    stop_token_ids: Sequence[int] | None = _sampling(
        (), "End at this token, in addition to the model's own end tokens. May be repeated.", flags=("--stop-token-id",)
    )
    ignore_eos: bool = _sampling(False, "Go on past the model's own end tokens.")
    bad_words: Sequence[str] | None = _sampling((), "Never emit this text. May be repeated.", flags=("--bad-word",))
    logprobs: int | None = _sampling(
        None, "Return log-probabilities of each token and of the k most probable ones (JSON output only).", **_LOGPROBS
    )
    prompt_logprobs: int | None = _sampling(
        None, "Return log-probabilities of the prompt's tokens, like --logprobs (JSON output only).", **_LOGPROBS
    )
    skip_special_tokens: bool = _sampling(
        True, "Leave special tokens out of the text.", flags=("--skip-special-tokens/--show-special-tokens",)
    )
    structured_outputs: StructuredOutputsParams | None = _sampling(  # noqa: RUF009  a field, as the others
        None,
        'What the text must look like: \'{"json": {...}}\', \'{"regex": "..."}\', ... or a file that holds this.',
        metavar="JSON",
        parse=lambda text: StructuredOutputsParams.from_json(parse_json_object(text)),
    )
    thinking_token_budget: int | None = _sampling(
        None,
        "Largest number of tokens of the reasoning, which is then closed (docs/reasoning.md); -1: no limit. Default: the "
        "engine's reasoning_budget.",
        bounds=(-1, 2**31 - 1),
    )
    include_stop_str_in_output: bool = _sampling(
        False, "Leave the stop text in the output.", flags=("--include-stop/--cut-stop",)
    )
    logit_bias: Mapping[int, float] | None = setting(None, "Token id -> number in [-100, 100] to add to its logit.")
    allowed_token_ids: Sequence[int] | None = setting(None, "The only tokens that can be drawn.")
    max_load_tokens: int | None = setting(
        None, "Use saved KV blocks (docs/kv-cache-tiers.md) for the first so many tokens only.", **_COUNT
    )
    max_offload_tokens: int | None = setting(None, "Save KV blocks of the first so many tokens only.", **_COUNT)
    detokenize: bool = setting(True, "False: the text stays empty, and stop texts cannot be used.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", as_tuple("allowed_token_ids", self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", as_biases("logit_bias", self.logit_bias) or None)
        for name, problem in check_values(SamplingParams, vars(self)).items():
            raise InvalidRequestError(problem, name)
        self._check_lists()
        check_constraint(self.structured_outputs, ignore_eos=self.ignore_eos)
        self._check_contradictions()
        self._checked_values = tuple(vars(self).values())

    def checked_copy(self) -> SamplingParams:
        """Returns a copy, which later changes of this object do not change. If a field was changed, the values are
        checked again.

        Raises:
            InvalidRequestError: as the constructor.
        """
        is_checked = all(map(operator.is_, vars(self).values(), self._checked_values))
        # a dictionary can be changed in place; all other values cannot
        return copy.copy(self) if is_checked and self.logit_bias is None else replace(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def _check_lists(self) -> None:
        check_strings("stop", self.stop_strings, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
        check_strings("bad_words", self.bad_words or (), MAX_BAD_WORDS, MAX_STOP_STRING_LENGTH)
        check_token_ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            check_allowed_ids("allowed_token_ids", self.allowed_token_ids)
        check_biases("logit_bias", self.logit_bias or {}, MAX_LOGIT_BIAS)

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}", "min_tokens"
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need the text: leave out stop, or do not set detokenize to false", "stop"
            )
