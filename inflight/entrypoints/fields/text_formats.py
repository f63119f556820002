"""The objects with which requests say what form the text must have, in the words of all APIs, and the constraints they mean."""

from typing import Annotated, Literal

from pydantic import Field

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.sampling_fields import GrammarText, Schema
from inflight.entrypoints.fields.strict_model import StrictModel, neutral, no_effect, optional
from inflight.entrypoints.fields.thinking_fields import ReasoningEffort
from inflight.structured_outputs_params import MAX_CHOICES, StructuredOutputsParams


class JsonSchemaFormat(StrictModel):
    name: str | None = no_effect("A name for the schema.", max_length=64)
    description: str | None = no_effect("What the schema is for. The model does not see it.")
    schema_: Schema | None = optional("The JSON schema that the text satisfies.", alias="schema")
    strict: bool | None = optional("Refuse a schema if a part of it cannot be enforced.")


class TextFormat(StrictModel):
    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    type: Literal["json_object"]
    schema_: Schema | None = optional(
        "Like json_schema.schema, but parts that cannot be enforced are left out.", alias="schema"
    )


class JsonSchemaResponseFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


class Structure(StrictModel):
    begin: str
    schema_: Schema = Field(alias="schema", description="The JSON schema of the text between begin and end.")
    end: str


class TagContent(StrictModel):
    type: Literal["json_schema"]
    json_schema: Schema


class FormatTag(StrictModel):
    type: Literal["tag"] | None = None
    begin: str
    content: TagContent
    end: str


class TriggeredTags(StrictModel):
    """The only format of the newer structural tags (of xgrammar) that is supported."""

    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: Annotated[list[FormatTag], Field(min_length=1, fail_fast=True)]
    at_least_one: Literal[False] | None = neutral("Not supported: the text may be without a tag.")
    stop_after_first: bool | None = optional("The text ends after the first tag.")


class StructuralTagFormat(StrictModel):
    """Free text with tags. If the text contains a trigger, it must continue as one of the tags that begin with this trigger.
    The request has either both `structures` and `triggers`, or `format`."""

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], Field(min_length=1, fail_fast=True)] | None = None
    triggers: list[str] | None = None
    format: TriggeredTags | None = None

    def document(self) -> Schema:
        tags = self.format
        if (tags is None) == (self.structures is None) or (tags is None) == (self.triggers is None):
            raise FieldError(
                "response_format", "a structural_tag needs either structures and triggers, or format alone"
            )
        if tags is None:
            return self.model_dump(by_alias=True, include={"type", "structures", "triggers"})
        structures = [{"begin": tag.begin, "schema": tag.content.json_schema, "end": tag.end} for tag in tags.tags]
        stops = {"stop_after_first": True} if tags.stop_after_first else {}
        return {"type": self.type, "structures": structures, "triggers": tags.triggers, **stops}


class ValueFormat(StrictModel):
    """TGI's form of a JSON schema."""

    type: Literal["json"]
    value: Schema | GrammarText = Field(description="The JSON schema that the text satisfies. It is not strict.")


class RegexFormat(StrictModel):
    type: Literal["regex"]
    pattern: GrammarText | None = optional("A regular expression, of which the whole text is a match.")
    value: GrammarText | None = optional("TGI's name of pattern.")


class GrammarFormat(StrictModel):
    type: Literal["grammar"]
    grammar: GrammarText


_FormatOfChats = (
    TextFormat
    | JsonObjectFormat
    | JsonSchemaResponseFormat
    | StructuralTagFormat
    | ValueFormat
    | RegexFormat
    | GrammarFormat
)
ResponseFormat = Annotated[_FormatOfChats, Field(discriminator="type")]


class StructuredOutputs(StrictModel):
    """Exactly one of json, json_object, regex, choice, grammar and structural_tag; see docs/structured-output.md."""

    json_: Schema | GrammarText | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: GrammarText | None = None
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=MAX_CHOICES)] = None
    grammar: GrammarText | None = None
    structural_tag: Schema | GrammarText | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: GrammarText | None = None
    separators: Annotated[list[str] | None, Field(min_length=2, max_length=2)] = None


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictModel):
    type: Literal["json_schema"]
    name: str | None = no_effect("A name for the schema.", max_length=64)
    schema_: Schema = Field(alias="schema", description="The JSON schema that the text satisfies.")
    description: str | None = no_effect("What the schema is for. The model does not see it.")
    strict: bool | None = optional("Refuse a schema if a part of it cannot be enforced.")


class TextFormats(StrictModel):
    """`text` of OpenAI's Responses API."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="The JSON schema that the text satisfies. It is not strict.")


class OutputFormats(StrictModel):
    """`output_config` of Anthropic's API."""

    format: OutputFormat | None = None
    effort: ReasoningEffort | None = optional("The same as reasoning_effort.")


AnyFormat = _FormatOfChats | PlainFormat | SchemaFormat | OutputFormat


def constraint_of(wanted: AnyFormat, where: str) -> StructuredOutputsParams:
    """
    Args:
        wanted: not of the type text, which constrains nothing.
        where: the field that has the format.

    Raises:
        FieldError: the format is not complete.
        InvalidRequestError: a value is out of bounds.
    """
    match wanted:
        case JsonObjectFormat(schema_=dict() as schema) | ValueFormat(value=schema) | OutputFormat(schema_=schema):
            return StructuredOutputsParams(json=schema, lenient=True)
        case SchemaFormat():
            return StructuredOutputsParams(json=wanted.schema_, lenient=not wanted.strict)
        case JsonSchemaResponseFormat(json_schema=described):
            if described.schema_ is None:
                raise FieldError(f"{where}.json_schema.schema", f"{where}.json_schema has no schema; add one")
            return StructuredOutputsParams(json=described.schema_, lenient=not described.strict)
        case StructuralTagFormat():
            return StructuredOutputsParams(structural_tag=wanted.document())
        case RegexFormat():
            regex = wanted.pattern or wanted.value
            if regex is None:
                raise FieldError(f"{where}.pattern", f"{where} has no pattern; add one")
            return StructuredOutputsParams(regex=regex)
        case GrammarFormat():
            return StructuredOutputsParams(grammar=wanted.grammar)
        case _:
            return StructuredOutputsParams(json_object=True)
