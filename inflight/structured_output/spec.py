"""`GrammarSpec`: what a request's output must match. `SchemaPart`: a part of a schema with its own name. `SchemaPlace`: a place
in a schema. `ArgumentTags`: the text around the properties of an object."""

import json
from dataclasses import dataclass
from typing import NamedTuple

from inflight.errors import InvalidRequestError
from inflight.structured_outputs_params import JSON_CONSTRAINTS, StructuredOutputsParams

MAX_WHITESPACE = 64  # characters between two JSON tokens; without this limit some models emit white space forever
DEFAULT_WHITESPACE = rf"[\x20\x09\x0A\x0D]{{1,{MAX_WHITESPACE}}}"

_COMPACT = (",", ":")
RESPONSE_FORMAT = "response_format"  # error messages use it as the name of the schema if `is_lenient`


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a request's output must match (a constraint). It is hashable, because it is the key in the cache of compiled
    grammars.

    Attributes:
        kind: one of `sampling_params.CONSTRAINTS`.
        text: the schema, regex, grammar or structural tag as the user wrote it. For `choice` a JSON list of the choices, and
            for `json_object` "{}".
        whitespace: a regex for the white space that may be between JSON tokens; "" allows none. Kinds without JSON ignore it.
        separators: the text between JSON items, and between key and value. If `whitespace` is not "", these are "," and ":".
        is_lenient: whether keywords of a JSON schema that cannot be enforced are left out instead of refused. In a structural
            tag each schema has its own setting (`SchemaPart.is_strict`).
    """

    kind: str
    text: str
    whitespace: str = DEFAULT_WHITESPACE
    separators: tuple[str, str] = _COMPACT
    is_lenient: bool = False

    @classmethod
    def from_params(cls, params: StructuredOutputsParams) -> "GrammarSpec":
        kind = params.constraint
        if kind == "choice":
            text = json.dumps(list(dict.fromkeys(params.choice or ())), ensure_ascii=False)
        elif kind == "json_object":
            text = "{}"
        else:
            text = getattr(params, kind)
        if params.disable_any_whitespace or params.separators is not None:
            return cls(kind, text, "", params.separators or _COMPACT, params.lenient)
        return cls(kind, text, params.whitespace_pattern or DEFAULT_WHITESPACE, is_lenient=params.lenient)

    @property
    def subject(self) -> str:
        """The constraint's name in messages: "tools" for a structural tag that was made of a request's tools."""
        if self.kind == "structural_tag":
            from inflight.structured_output.structural_tag import parse_structural_tag  # needs msgspec

            if any(tag.parts for tag in parse_structural_tag(self.text).all_tags):
                return "tools"
        return self.kind

    @property
    def is_exact(self) -> bool:
        """Whether white space at the beginning of the text counts. JSON may have any there."""
        return self.kind not in JSON_CONSTRAINTS

    def choices(self) -> list[str]:
        assert self.kind == "choice"
        choices: list[str] = json.loads(self.text)
        return choices


class SchemaPart(NamedTuple):
    """A part of a schema that was written separately from the rest, for example the schema of one tool.

    Attributes:
        pointer: the JSON pointer of the part, such as "#/items/anyOf/0"; "#" for the whole schema.
        param: the parameter of the request that has the part, such as "tools[0]".
        is_strict: whether keywords that cannot be enforced are refused. If false, they are left out.
        function: the name of the tool's function; empty if the part is no tool.
    """

    pointer: str
    param: str
    is_strict: bool
    function: str = ""

    @property
    def name(self) -> str:
        """The name of the part in messages, such as "tools[0] ('f')"."""
        return f"{self.param} ({self.function!r})" if self.function else self.param

    @property
    def takes_malformed(self) -> bool:
        """Whether keywords that JSON Schema does not allow are left out, too: those of a tool that is not strict. A client
        often gets its tools from somewhere else, but it writes the format of an answer itself."""
        return not self.is_strict and self.param != RESPONSE_FORMAT


class SchemaPlace(NamedTuple):
    """A place in a schema, in the words of the schema's author.

    Attributes:
        param: the parameter of the request that has the schema, such as "tools[0]". If `text` names it, then at its beginning.
        text: the name of the part, and the path in the part, such as "tools[0] ('f'): #/properties/a".
    """

    param: str
    text: str

    def __str__(self) -> str:
        return self.text

    def refusal(self, problem: str) -> InvalidRequestError:
        """`problem` follows the place in the message."""
        return InvalidRequestError(f"{self.text}{problem}", self.param)


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The text around each property of an object that is not written as JSON: `before_key`, the name, `after_key`, the value,
    `after_value`. A value that may be a string is written as plain text, without quotes; any other value is JSON.

    Attributes:
        after_value: in it, {key} is the name of the property.
        not_in_value: texts that a string must not contain, because they end it.
        between: the text between two properties.
        is_json: whether every value is JSON, also a string.
    """

    before_key: str
    after_key: str
    after_value: str
    not_in_value: tuple[str, ...] = ()
    between: str = ""
    is_json: bool = False
