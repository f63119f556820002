"""`StructuredOutputsParams`: what the text of an answer must look like. The values are checked here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.errors import InvalidRequestError, UnknownParameterError
from inflight.foreign_parameters import FOREIGN_CONSTRAINTS
from inflight.list_checks import as_tuple, check_strings
from inflight.python_schema import is_python_type, json_schema_of
from inflight.setting import names_unknown, unknown_name

MAX_CHOICES = 10_000
MAX_GRAMMAR_LENGTH = 2**20  # characters of a schema, regex, grammar, structural tag, or of all choices together

CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_WHITESPACE_FIELDS = ("disable_any_whitespace", "whitespace_pattern", "separators")
_SEPARATOR = " {0,64}%s {0,64}"
JSON_CONSTRAINTS = ("json", "json_object", "structural_tag")  # the emitted text contains JSON


@names_unknown(UnknownParameterError, FOREIGN_CONSTRAINTS)
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must look like. Exactly one of the fields in `CONSTRAINTS` is given; the names are vLLM's.

    `json` and `structural_tag` are kept as text, because the model must emit the properties in the order of this text.

    Attributes:
        json: a JSON schema, as a dict or as text. Or a Python type that pydantic describes: a model class, a dataclass, a
            TypedDict, an Enum, `list[Model]`.
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

    json: Any = None  # a JSON object, its text, or a Python type; Any, because the codec decodes no union with `type`
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
                f"give exactly one of {', '.join(CONSTRAINTS)}",
                "structured_outputs",
            )
        if is_python_type(self.json):
            object.__setattr__(self, "json", json_schema_of(self.json))
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _json_object_text(name, getattr(self, name)))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_grammar_text(name, getattr(self, name))
        if self.json_object is not None and self.json_object is not True:
            raise InvalidRequestError(
                f"json_object={self.json_object!r} is not True; leave it out for no constraint", "json_object"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", as_tuple("choice", self.choice))
            self._check_choice()
        self._check_whitespace()

    @classmethod
    def from_json(cls, values: object) -> StructuredOutputsParams:
        """
        Raises:
            InvalidRequestError: `values` is no JSON object, or one of its fields is unknown or wrong.
        """
        if not isinstance(values, Mapping):
            raise InvalidRequestError(
                f"structured_outputs is a {type(values).__name__}; give a JSON object", "structured_outputs"
            )
        if unknown := unknown_name(cls, values):
            raise InvalidRequestError(f"structured_outputs has no {unknown}", "structured_outputs")
        return cls(**values)

    @property
    def constraint(self) -> str:
        return next(name for name in CONSTRAINTS if getattr(self, name) is not None)

    def _check_choice(self) -> None:
        choices = tuple(self.choice or ())
        if not choices:
            raise InvalidRequestError("choice is empty: nothing could be emitted; give at least one string", "choice")
        check_strings("choice", choices, MAX_CHOICES, MAX_GRAMMAR_LENGTH)
        _check_grammar_text("choice", "".join(choices))

    def _check_whitespace(self) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise InvalidRequestError(
                f"disable_any_whitespace={self.disable_any_whitespace!r} is not True or False", "disable_any_whitespace"
            )
        if self.whitespace_pattern is not None:
            _check_grammar_text("whitespace_pattern", self.whitespace_pattern)
        if self.separators is not None:
            object.__setattr__(self, "separators", as_tuple("separators", self.separators))
            _check_separators(self.separators)
        given = [name for name in _WHITESPACE_FIELDS if getattr(self, name)]
        if len(given) > 1:
            raise InvalidRequestError(f"{' and '.join(given)} contradict each other; use one", given[0])
        if given and self.constraint not in JSON_CONSTRAINTS:
            raise InvalidRequestError(f"{given[0]} has no meaning for {self.constraint}: it is for JSON only", given[0])


def check_constraint(given: object, *, ignore_eos: bool) -> None:
    """Check the `structured_outputs` of a request."""
    if given is None:
        return
    if not isinstance(given, StructuredOutputsParams):
        raise InvalidRequestError(f"structured_outputs={given!r} is no StructuredOutputsParams", "structured_outputs")
    if ignore_eos:
        raise InvalidRequestError(
            "ignore_eos has no meaning with structured_outputs: no token may follow when the constraint is complete",
            "ignore_eos",
        )


def _json_object_text(name: str, value: object) -> str:
    """Returns the text of a JSON object, which is given as a dict or as text. NaN and lone surrogates are refused, because they
    are not allowed in JSON."""
    try:
        parsed = json.loads(value, parse_constant=_refuse_constant) if isinstance(value, str) else value
        if not isinstance(parsed, Mapping):
            kind = type(parsed).__name__
            advice = f": give the class {kind}" if hasattr(parsed, "model_json_schema") else ""
            raise InvalidRequestError(f"{name} is {kind}, not a JSON object{advice}", name)
        text = value if isinstance(value, str) else json.dumps(dict(parsed), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{name} is not valid JSON: {error}", name) from error
    _check_grammar_text(name, text)
    return text


def _check_separators(values: tuple[object, ...]) -> None:
    marks = (",", ":")
    if len(values) != len(marks) or not all(
        isinstance(value, str) and re.fullmatch(_SEPARATOR % mark, value)
        for value, mark in zip(values, marks, strict=True)
    ):
        raise InvalidRequestError(
            f"separators={values!r} are not two strings, one with a comma and one with a colon, and blanks around them",
            "separators",
        )


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _check_grammar_text(name: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{name}={text!r} is not a string with something in it", name)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed", name)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} holds a lone surrogate at character {error.start}", name) from error
