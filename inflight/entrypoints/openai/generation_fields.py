"""`GenerationFields`: the fields that chats and completions have in common, and how they become `SamplingParams`.

The fields have the bounds of `SamplingParams`, so that the OpenAPI document shows these bounds. The engine's input processor
checks the limits that depend on the model.
"""

import re
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from inflight.entrypoints.openai.errors import FieldError
from inflight.entrypoints.openai.strict_model import StrictModel, neutral, no_effect, optional
from inflight.entrypoints.openai.validated import Presentation
from inflight.entrypoints.serve.settings import REQUEST_ID_PATTERN
from inflight.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from inflight.setting import settings_of
from inflight.structured_outputs_params import MAX_CHOICES, MAX_GRAMMAR_LENGTH, StructuredOutputsParams

MAX_INT = 2**31 - 1
MAX_PRIORITY = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_LENGTH)]


def _without_empty(stop: object) -> object:
    """Leave empty strings out. They end no text, but a program sends one if its user has left a field empty."""
    if isinstance(stop, list):
        return [each for each in stop if each != ""]
    return None if stop == "" else stop


StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS), BeforeValidator(_without_empty)]
StopStrings = Annotated[StopString | StopList | None, BeforeValidator(_without_empty)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
_TOKEN_ID = re.compile(r"[0-9]{1,10}(\.0)?")  # a key of logit_bias
Schema = dict[str, Any]  # Any: a JSON schema, checked where it is compiled


def sampling_field(name: str, description: str) -> Any:  # Any: as pydantic's own `Field`
    """A field for a number, with the bounds of the field `name` of `SamplingParams`."""
    declared = settings_of(SamplingParams)[name]
    low, high = declared.bounds
    if declared.excludes_low:
        return Field(None, gt=low, le=high, description=description)
    return Field(None, ge=low, le=high, description=description)


class SamplingFields(StrictModel):
    """How tokens are drawn. These fields have the same names in all APIs."""

    temperature: float | None = sampling_field("temperature", "0 is greedy.")
    top_p: float | None = sampling_field(
        "top_p", "Only the smallest set of most probable tokens with this total probability is kept."
    )
    top_k: int | None = sampling_field(
        "top_k", "Only this number of the most probable tokens is kept; 0 and -1 keep all."
    )
    min_p: float | None = sampling_field(
        "min_p", "Tokens with less than this share of the best token's probability are dropped."
    )
    presence_penalty: float | None = sampling_field(
        "presence_penalty", "Subtracted from the logit of each token that was emitted."
    )
    frequency_penalty: float | None = sampling_field(
        "frequency_penalty", "Subtracted from the logit of a token for each time that it was emitted."
    )
    seed: int | None = sampling_field("seed", "Makes the draws repeatable.")


class StreamOptions(StrictModel):
    include_usage: bool | None = optional("The stream ends with a chunk that has the usage and no choices.")
    continuous_usage_stats: bool | None = optional("Every chunk has the usage so far.")
    include_obfuscation: bool | None = no_effect("The server adds no padding to chunks.")


class KVTransferParams(StrictModel):
    max_load_tokens: int | None = sampling_field(
        "max_load_tokens", "Use saved KV blocks for the first so many tokens only."
    )
    max_offload_tokens: int | None = sampling_field(
        "max_offload_tokens", "Save KV blocks of the first so many tokens only."
    )


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


ResponseFormat = Annotated[
    TextFormat
    | JsonObjectFormat
    | JsonSchemaResponseFormat
    | StructuralTagFormat
    | ValueFormat
    | RegexFormat
    | GrammarFormat,
    Field(discriminator="type"),
]


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


class GenerationFields(SamplingFields):
    """The fields that chats and completions have in common."""

    model: str | None = optional("One of the names in /v1/models; the first of them if left out.")
    # how tokens are drawn
    n: int | None = sampling_field("n", "The number of answers to each prompt.")
    repetition_penalty: float | None = sampling_field(
        "repetition_penalty", "Lowers the logits of tokens that are in the prompt or the output."
    )
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = optional(
        "Token id -> added to its logit.", max_length=MAX_LOGIT_BIAS
    )
    bad_words: list[StopString] | None = optional("Texts that the answer never contains.", max_length=MAX_BAD_WORDS)
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = optional(
        "Only these tokens are drawn.", min_length=1
    )
    # where the answer ends
    stop: StopStrings = optional("Strings that end the text. Empty ones are ignored.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = optional(
        "Tokens that end the text.", max_length=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool | None = optional("Go on past the model's own end tokens.")
    min_tokens: int | None = sampling_field("min_tokens", "The answer does not end before this number of tokens.")
    include_stop_str_in_output: bool | None = optional("The stop string stays in the text.")
    skip_special_tokens: bool | None = optional("False leaves special tokens in the text.")
    thinking_token_budget: int | None = sampling_field(
        "thinking_token_budget",
        "The most tokens of the reasoning, which is then closed; -1: no limit. The server's reasoning_budget if left out.",
    )
    # what form the text must have
    response_format: ResponseFormat | None = optional("text, json_object, a json_schema or a structural_tag.")
    structured_outputs: StructuredOutputs | None = optional("A constraint in the form that vLLM defines.")
    guided_json: Schema | GrammarText | None = optional("Older name of structured_outputs.json.")
    guided_regex: GrammarText | None = optional("Older name of structured_outputs.regex.")
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = optional(
        "Older name of structured_outputs.choice.", min_length=1, max_length=MAX_CHOICES
    )
    guided_grammar: GrammarText | None = optional("Older name of structured_outputs.grammar.")
    guided_json_object: bool | None = optional("Older name of structured_outputs.json_object.")
    guided_whitespace_pattern: GrammarText | None = optional(
        "Older name of structured_outputs.whitespace_pattern; beside guided_json."
    )
    json_schema: Schema | GrammarText | None = optional(
        "Name of other engines (llama.cpp, SGLang) for a JSON schema, which is not strict."
    )
    regex: GrammarText | None = optional("SGLang's name of structured_outputs.regex.")
    ebnf: GrammarText | None = optional("SGLang's name of structured_outputs.grammar.")
    grammar: GrammarText | None = optional("llama.cpp's name of structured_outputs.grammar.")
    format: Schema | Literal["json"] | None = optional(
        'Ollama\'s name: "json" for a JSON object, or a JSON schema, which is not strict.'
    )
    # how the request is run
    request_id: str | None = optional(
        "Id of the request in the answer, logs and traces; the header X-Request-Id comes first.",
        pattern=REQUEST_ID_PATTERN,
    )
    cache_salt: str | None = optional("Separates prefix caches of users.", max_length=1024)
    priority: int | None = optional(
        "Lower runs first; needs scheduling_policy='priority'.", ge=-MAX_PRIORITY, le=MAX_PRIORITY
    )
    kv_transfer_params: KVTransferParams | None = optional("Limits of saved KV blocks, for this request.")
    # how the answer is shown
    stream: bool | None = optional("Server-sent events, ended by [DONE].")
    stream_options: StreamOptions | None = optional("Options of a stream; only with stream.")
    return_token_ids: bool | None = optional("prompt_token_ids and token_ids in the answer.")
    return_tokens_as_token_ids: bool | None = optional('Log-probabilities name tokens by their ids, as "token_id:7".')
    truncate_prompt_tokens: int | None = optional(
        "Keep only this number of tokens at the end of the prompt; -1 keeps as many as fit.", ge=-1, le=MAX_INT
    )
    prompt_logprobs: int | None = sampling_field(
        "prompt_logprobs",
        "Log-probabilities of this number of tokens at each place of the prompt; not supported in a stream.",
    )
    # fields that change nothing
    user: str | None = no_effect("Data of the caller; nothing is stored.")
    safety_identifier: str | None = no_effect("Data of the caller; nothing is stored.")
    metadata: dict[str, Any] | None = no_effect("Data of the caller; nothing is stored.")
    prompt_cache_key: str | None = no_effect("Equal prefixes are found without this field.")
    prompt_cache_retention: str | None = no_effect("The least recently used blocks are dropped first.")
    service_tier: str | None = no_effect("There is only one tier.")
    # fields that would change the answer, but are not supported
    use_beam_search: Literal[False] | None = neutral("Not supported: use n, and rank the answers by logprobs.")
    logits_processors: list[Any] | None = neutral("Not supported: the server runs no code for a request.", max_length=0)

    def sampling_params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        """Returns the model's `defaults` with the values of the fields that the request gives.

        Raises:
            InvalidRequestError: values are out of bounds, or contradict each other.
        """
        same = settings_of(SamplingParams).keys() & type(self).model_fields.keys()
        given: dict[str, Any] = {name: value for name in same if (value := getattr(self, name)) is not None}
        given |= {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        given |= {"logit_bias": self._logit_bias(), "structured_outputs": self._structured_outputs()}
        given |= {} if self.kv_transfer_params is None else self.kv_transfer_params.model_dump(exclude_none=True)
        return replace(defaults, **given)

    def presentation(self, model: str, *, force_usage: bool) -> Presentation:
        """How the answer is written, according to these fields. `model` is the name that the client used. With `force_usage` a
        stream ends with the usage, whatever the client asked for."""
        options = self.stream_options
        return Presentation(
            model=model,
            request_id=self.request_id,
            stream=bool(self.stream),
            include_usage=force_usage or bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            prompt_logprobs=self.prompt_logprobs is not None,
            return_token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
        )

    def truncate_prompt(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Returns the part of the prompt that `truncate_prompt_tokens` keeps, which is its end."""
        wanted = self.truncate_prompt_tokens
        if wanted is None:
            return token_ids
        if wanted == 0:
            raise FieldError(
                "truncate_prompt_tokens", "truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1"
            )
        return token_ids[-(max_model_len - 1 if wanted == -1 else wanted) :]

    def check_stream(self) -> None:
        """Refuse `stream_options` if the answer is not a stream, and `prompt_logprobs` if it is a stream."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs a stream: set stream to true")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs is not supported in a stream: set stream to false")

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not _TOKEN_ID.fullmatch(key):
                raise FieldError("logit_bias", f"logit_bias has the key {key!r}; keys are token ids in decimal")
        biases = {int(key.partition(".")[0]): value for key, value in self.logit_bias.items()}
        if len(biases) < len(self.logit_bias):
            raise FieldError("logit_bias", "logit_bias has two keys for one token id, such as '1' and '01'; give one")
        return biases

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """The constraint of the text, or None. Several fields can express a constraint. If a request has more than one of these
        fields, they must say the same: some clients send the names of several servers."""
        found: dict[str, StructuredOutputsParams] = {}
        given: dict[str, Any]
        if isinstance(self.response_format, JsonObjectFormat):
            schema = self.response_format.schema_
            given = {"json_object": True} if schema is None else {"json": schema, "lenient": True}
            found["response_format"] = StructuredOutputsParams(**given)
        elif isinstance(self.response_format, JsonSchemaResponseFormat):
            wanted = self.response_format.json_schema
            if wanted.schema_ is None:
                raise FieldError(
                    "response_format.json_schema.schema", "response_format.json_schema has no schema; add one"
                )
            found["response_format"] = StructuredOutputsParams(json=wanted.schema_, lenient=not wanted.strict)
        elif isinstance(self.response_format, StructuralTagFormat):
            found["response_format"] = StructuredOutputsParams(structural_tag=self.response_format.document())
        elif isinstance(self.response_format, ValueFormat):
            found["response_format"] = StructuredOutputsParams(json=self.response_format.value, lenient=True)
        elif isinstance(self.response_format, RegexFormat):
            wanted_regex = self.response_format.pattern or self.response_format.value
            if wanted_regex is None:
                raise FieldError("response_format.pattern", "response_format has no pattern; add one")
            found["response_format"] = StructuredOutputsParams(regex=wanted_regex)
        elif isinstance(self.response_format, GrammarFormat):
            found["response_format"] = StructuredOutputsParams(grammar=self.response_format.grammar)
        if self.structured_outputs is not None:
            given = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            if isinstance(tag := given.get("structural_tag"), dict) and "format" in tag:
                given["structural_tag"] = StructuralTagFormat.model_validate(
                    {"type": "structural_tag", **tag}
                ).document()
            found["structured_outputs"] = StructuredOutputsParams(**given)
        found |= self._older_and_foreign()
        if len(found) > 1 and any(each != next(iter(found.values())) for each in found.values()):
            names = list(found)
            raise FieldError(names[1], f"{' and '.join(names)} each constrain the text; give one of them")
        return next(iter(found.values()), None)

    def _older_and_foreign(self) -> dict[str, StructuredOutputsParams]:
        """Constraints in the words of older versions and of other engines."""
        pattern = self.guided_whitespace_pattern
        blanks = {} if pattern is None else {"whitespace_pattern": pattern}
        values: dict[str, dict[str, Any]] = {
            "guided_json": {"json": self.guided_json, **blanks},
            "guided_regex": {"regex": self.guided_regex},
            "guided_choice": {"choice": self.guided_choice},
            "guided_grammar": {"grammar": self.guided_grammar},
            "guided_json_object": {"json_object": self.guided_json_object or None},
            "regex": {"regex": self.regex},
            "ebnf": {"grammar": self.ebnf},
            "grammar": {"grammar": self.grammar},
            "json_schema": {"json": self.json_schema, "lenient": True},
            "format": {"json_object": True} if self.format == "json" else {"json": self.format, "lenient": True},
        }
        given = {name: each for name, each in values.items() if None not in each.values()}
        return {name: StructuredOutputsParams(**each) for name, each in given.items()}
