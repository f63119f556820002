"""`SamplingParams`: how the tokens of a request are chosen, and when the request ends. The values are checked here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from inflight.errors import InvalidRequestError
from inflight.setting import check_values, parse_json_object, setting, unknown_name

MAX_N = 128
MAX_LOGPROBS = 100
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 1024
MAX_SEED = 2**63 - 1
MAX_CHOICES = 10_000
MAX_GRAMMAR_LENGTH = 2**20  # characters of a schema, regex, grammar, structural tag, or of all choices together

CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_WHITESPACE_FIELDS = ("disable_any_whitespace", "whitespace_pattern", "separators")
_SEPARATOR = " {0,64}%s {0,64}"
JSON_CONSTRAINTS = ("json", "json_object", "structural_tag")  # the emitted text contains JSON


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must look like. Exactly one of the fields in `CONSTRAINTS` is given; the names are vLLM's.

    `json` and `structural_tag` are kept as text, because the model must emit the properties in the order of this text.

    Attributes:
        json: a JSON schema, as a dict or as text.
        json_object: if True, the text is any JSON object.
        regex: the whole text matches it, as in `re.fullmatch` with `re.ASCII`. Look-around and back-references are refused.
        choice: the text is one of these strings.
        grammar: the text matches the rule `start` of a grammar in Lark's notation, or the rule `root` of one in llama.cpp's
            GBNF.
        structural_tag: free text with tags. A tag is the text `begin`, JSON that matches `schema`, and the text `end`. When the
            text contains one of `triggers`, it must go on as a tag whose `begin` begins with this trigger:
            {"type": "structural_tag", "structures": [{"begin": str, "schema": {...}, "end": str}], "triggers": [str]}.
            Further keys: with "stop_after_first": true, the text ends after the first tag. With "separator": str, the text is
            either tags with this separator between them, or free text that does not begin with a trigger. With a separator
            and "at_least_one": true, the text is tags, never free text. With a separator and "otherwise": {"begin", "schema",
            "end"}, the text is either tags, or one text of the form that "otherwise" describes.
        disable_any_whitespace: JSON is written without any white space between its tokens. By default some white space is
            allowed.
        whitespace_pattern: a regex of the white space that is allowed between JSON tokens. It must match white space only.
        separators: the text between two items, and the text between a key and its value, as in `json.dumps`. JSON is written
            with exactly these texts, and no other white space. Most models were trained on (", ", ": ").
        lenient: leave out the parts of the schema in `json` that the grammar library cannot enforce. By default a schema with
            such a part is refused, except for `uniqueItems` and unknown formats.
    """

    json: Mapping[str, Any] | str | None = None  # Any: JSON
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = None  # Any: JSON
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    separators: tuple[str, str] | None = None
    lenient: bool = False

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs names {' and '.join(given) or 'no constraint'}: "
                f"give exactly one of {', '.join(CONSTRAINTS)}"
            )
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _json_object_text(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_grammar_text(name, getattr(self, name))
        if self.json_object is not None and self.json_object is not True:
            raise InvalidRequestError(f"json_object={self.json_object!r} is not True; leave it out for no constraint")
        if self.choice is not None:
            object.__setattr__(self, "choice", _tuple("choice", self.choice))
            self._check_choice()
        self._check_whitespace()

    @classmethod
    def from_json(cls, values: object) -> StructuredOutputsParams:
        """
        Raises:
            InvalidRequestError: `values` is no JSON object, or one of its fields is unknown or wrong.
        """
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"structured_outputs is a {type(values).__name__}; give a JSON object")
        if unknown := unknown_name(cls, values):
            raise InvalidRequestError(f"structured_outputs has no {unknown}")
        return cls(**values)

    @property
    def constraint(self) -> str:
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    def _check_choice(self) -> None:
        choices = tuple(self.choice or ())
        if not choices:
            raise InvalidRequestError("choice is empty: nothing could be emitted; give at least one string")
        _check_strings("choice", choices, MAX_CHOICES, MAX_GRAMMAR_LENGTH)
        _check_grammar_text("choice", "".join(choices))

    def _check_whitespace(self) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidRequestError(f"disable_any_whitespace={self.disable_any_whitespace!r} is not True or False")
        if self.whitespace_pattern is not None:
            _check_grammar_text("whitespace_pattern", self.whitespace_pattern)
        if self.separators is not None:
            object.__setattr__(self, "separators", _tuple("separators", self.separators))
            _check_separators(self.separators)
        given = [name for name in _WHITESPACE_FIELDS if getattr(self, name)]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} contradict each other; use one")
        if given and self.constraint not in JSON_CONSTRAINTS:
            raise InvalidRequestError(f"{given[0]} has no meaning for {self.constraint}: it is for JSON only")


_sampling = partial(setting, group="Sampling (default: the model's generation_config.json)")
_COUNT = {"bounds": (0, 2**31 - 1)}
_LOGPROBS = {"bounds": (0, MAX_LOGPROBS)}


@dataclass(kw_only=True)
class SamplingParams:
    """How to sample. The names are those of the OpenAI API and vLLM. Most fields are also options of `inflight generate`.

    Fields may be changed later. A request gets a copy, whose values are checked again.

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
    n: int = _sampling(
        1, "Completions per prompt; they share the prompt's KV blocks.", flags=("--n", "-n"), bounds=(1, MAX_N)
    )
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
    include_stop_str_in_output: bool = _sampling(
        False, "Leave the stop text in the output.", flags=("--include-stop/--cut-stop",)
    )
    logit_bias: Mapping[int, float] | None = setting(None, "Token id -> number in [-100, 100] to add to its logit.")
    allowed_token_ids: Sequence[int] | None = setting(None, "The only tokens that can be drawn.")
    detokenize: bool = setting(True, "False: the text stays empty, and stop texts cannot be used.")

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _tuple("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.logit_bias, Mapping | None):
            raise InvalidRequestError(f"logit_bias={self.logit_bias!r} is not a mapping of token ids to numbers")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        for problem in check_values(SamplingParams, vars(self)).values():
            raise InvalidRequestError(problem)
        self._check_lists()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequestError(f"structured_outputs={self.structured_outputs!r} is no StructuredOutputsParams")
        self._check_contradictions()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def _check_lists(self) -> None:
        _check_strings("stop", self.stop_strings, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH)
        _check_strings("bad_words", self.bad_words or (), MAX_BAD_WORDS, MAX_STOP_STRING_LENGTH)
        _check_token_ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    "allowed_token_ids is empty: nothing could be drawn; leave it out to allow all"
                )
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, 2**31)
        bias = self.logit_bias or {}
        _check_token_ids("logit_bias", bias.keys(), MAX_LOGIT_BIAS)
        for token_id, value in bias.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
                raise InvalidRequestError(f"logit_bias[{token_id}]={value!r} is not a number in [-100, 100]")

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError("stop strings need the text: leave out stop, or do not set detokenize to false")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos has no meaning with structured_outputs: no token may follow when the constraint is complete"
            )


def _tuple(name: str, values: object) -> tuple[object, ...]:
    """Returns the values as a tuple; () for None. A string is refused, because it would become a tuple of its letters."""
    if values is None:
        return ()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name}={values!r} is not a list")
    return tuple(values)


def _json_object_text(name: str, value: object) -> str:
    """Returns the text of a JSON object, which is given as a dict or as text. NaN and lone surrogates are refused, because they
    are not allowed in JSON."""
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant) if isinstance(value, str) else value
        if not isinstance(parsed, Mapping):
            raise InvalidRequestError(f"{name} is {type(parsed).__name__}, not a JSON object")
        text = value if isinstance(value, str) else json.dumps(dict(parsed), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{name} is not valid JSON: {error}") from error
    _check_grammar_text(name, text)
    return text


def _check_separators(values: tuple[object, ...]) -> None:
    marks = (",", ":")
    if len(values) != len(marks) or not all(
        isinstance(value, str) and re.fullmatch(_SEPARATOR % mark, value)
        for value, mark in zip(values, marks, strict=True)
    ):
        raise InvalidRequestError(
            f"separators={values!r} are not two strings, one with a comma and one with a colon, and blanks around them"
        )


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _check_grammar_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{name}={text!r} is not a string with something in it")
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} holds a lone surrogate at character {error.start}") from error


def _check_strings(name: str, values: Iterable[object], max_count: int, max_length: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} strings; at most {max_count} are allowed")
    for value in values:
        if not isinstance(value, str) or not value or len(value) > max_length:
            raise InvalidRequestError(f"{name} holds {value!r}: each must be a string of 1 to {max_length} characters")


def _check_token_ids(name: str, values: Iterable[object], max_count: int) -> None:
    values = list(values)
    if len(values) > max_count:
        raise InvalidRequestError(f"{name} has {len(values)} token ids; at most {max_count} are allowed")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} holds {value!r}: each must be a token id, an integer of 0 or more")
