"""`ConstraintFields`: the fields that constrain an answer, in the words of all APIs and engines. The requests of all APIs have
them, so that no constraint is lost because a client uses the word of another API: it is enforced, or the request is refused.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.sampling_fields import (
    GrammarText,
    Schema,
    StopList,
    StopString,
    StopStrings,
    TokenId,
    sampling_field,
)
from inflight.entrypoints.fields.strict_model import neutral, optional
from inflight.entrypoints.fields.text_formats import (
    AnyFormat,
    OutputFormat,
    OutputFormats,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormats,
    constraint_of,
)
from inflight.entrypoints.fields.thinking_fields import ThinkingFields, Wishes, wishes_of_variables
from inflight.errors import InvalidRequestError
from inflight.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from inflight.structured_outputs_params import MAX_CHOICES, StructuredOutputsParams

_TOKEN_ID = re.compile(r"[0-9]{1,10}(\.0)?")  # a key of logit_bias


class Constraints(ThinkingFields):
    # which tokens are drawn
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = optional(
        "Token id -> added to its logit.", max_length=MAX_LOGIT_BIAS
    )
    bad_words: list[StopString] | None = optional("Texts that the answer never contains.", max_length=MAX_BAD_WORDS)
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = optional(
        "Only these tokens are drawn.", min_length=1
    )
    # where the answer ends
    stop: StopStrings = optional("Strings that end the text. Empty ones are ignored.")
    stop_sequences: StopList | None = optional("Anthropic's name of stop.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = optional(
        "Tokens that end the text.", max_length=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool | None = optional("Go on past the model's own end tokens.")
    min_tokens: int | None = sampling_field("min_tokens", "The answer does not end before this number of tokens.")
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
    format: Schema | Literal["", "json"] | None = optional(
        'Ollama\'s name: "json" for a JSON object, or a JSON schema, which is not strict.'
    )
    text: TextFormats | None = optional("Its member format: text, json_object or a json_schema, as in /v1/responses.")
    output_config: OutputFormats | None = optional("Its members format and effort, as in /v1/messages.")
    output_format: OutputFormat | None = optional("Older name of output_config.format.")
    # fields that would change the answer, but are not supported
    use_beam_search: Literal[False] | None = neutral("Not supported: use n, and rank the answers by logprobs.")
    logits_processors: list[Any] | None = neutral("Not supported: the server runs no code for a request.", max_length=0)

    def wishes(self) -> Wishes:
        found = super().wishes()
        if self.output_config is not None:
            found.efforts["output_config.effort"] = self.output_config.effort
        return found

    def stop_strings(self) -> list[str]:
        """`stop` and `stop_sequences`, each string once."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return list(dict.fromkeys([*stop, *(self.stop_sequences or ())]))

    def token_biases(self) -> dict[int, float] | None:
        """`logit_bias` with numbers as keys.

        Raises:
            FieldError: a key is no token id.
        """
        if self.logit_bias is None:
            return None
        for key in self.logit_bias:
            if not _TOKEN_ID.fullmatch(key):
                raise FieldError("logit_bias", f"logit_bias has the key {key!r}; keys are token ids in decimal")
        biases = {int(key.partition(".")[0]): value for key, value in self.logit_bias.items()}
        if len(biases) < len(self.logit_bias):
            raise FieldError("logit_bias", "logit_bias has two keys for one token id, such as '1' and '01'; give one")
        return biases

    def constraints_of_text(self) -> Iterator[tuple[str, Callable[[], StructuredOutputsParams]]]:
        """What form the text must have: the names of the fields that say it, and functions that read them. The functions may
        raise an InvalidRequestError."""
        formats: dict[str, AnyFormat | None] = {
            "response_format": self.response_format,
            "text.format": None if self.text is None else self.text.format,
            "output_config.format": None if self.output_config is None else self.output_config.format,
            "output_format": self.output_format,
        }
        for name, wanted in formats.items():
            if wanted is not None and wanted.type != "text":
                yield name, partial(constraint_of, wanted, name)
        if self.structured_outputs is not None:
            yield "structured_outputs", partial(_params_of, self.structured_outputs)
        for name, given in self._older_and_foreign().items():
            if None not in given.values():
                yield name, partial(StructuredOutputsParams, **given)

    def _older_and_foreign(self) -> dict[str, dict[str, Any]]:
        """Constraints in the words of older versions and of other engines, by field: the arguments of
        `StructuredOutputsParams`, of which one is None if the request does not have the field."""
        pattern = self.guided_whitespace_pattern
        blanks = {} if pattern is None else {"whitespace_pattern": pattern}
        schema = None if self.format == "" else self.format
        return {
            "guided_json": {"json": self.guided_json, **blanks},
            "guided_regex": {"regex": self.guided_regex},
            "guided_choice": {"choice": self.guided_choice},
            "guided_grammar": {"grammar": self.guided_grammar},
            "guided_json_object": {"json_object": self.guided_json_object or None},
            "regex": {"regex": self.regex},
            "ebnf": {"grammar": self.ebnf},
            "grammar": {"grammar": self.grammar},
            "json_schema": {"json": self.json_schema, "lenient": True},
            "format": {"json_object": True} if self.format == "json" else {"json": schema, "lenient": True},
        }


class ConstraintFields(Constraints):
    """The fields of `Constraints`, also where Ollama's API has them."""

    options: Constraints | None = optional("Ollama's options. Only those that constrain the answer are read.")
    chat_template_kwargs: dict[str, Any] | None = optional("Further variables of the template.")

    def wishes(self) -> Wishes:
        """What the request says about thoughts: in its fields, in `options` and in the variables for the chat template.

        Raises:
            FieldError: a variable has a wrong value.
        """
        found = super().wishes()
        found.add(wishes_of_variables(self.chat_template_kwargs))
        if self.options is not None:
            found.add(self.options.wishes(), "options.")
        return found

    def constraint(self) -> StructuredOutputsParams | None:
        """What form the text must have. Several fields can say this. If a request has more than one of them, they must say the
        same: some clients send the names of several servers.

        Raises:
            InvalidRequestError: they say different things, or a value is wrong.
        """
        self._check_blanks()
        found = {name: _read(name, read) for name, read in self._texts()}
        if len(found) > 1 and any(each != next(iter(found.values())) for each in found.values()):
            names = list(found)
            raise FieldError(names[1], f"{' and '.join(names)} each constrain the text; give one of them")
        return next(iter(found.values()), None)

    def constraint_name(self) -> str | None:
        """The field that says what form the text must have, as a path such as text.format."""
        return next((name for name, _ in self._texts()), None)

    def given_constraints(self) -> dict[str, Any]:
        """The values for `SamplingParams` that this request gives: constraints of the tokens and of the text.

        Raises:
            InvalidRequestError: a value is wrong, or differs from the one in `options`.
        """
        both: list[Constraints] = [self] if self.options is None else [self, self.options]
        stops = list(dict.fromkeys(text for each in both for text in each.stop_strings()))
        given: dict[str, Any] = {
            name: self._one_value(name, attrgetter(name))
            for name in ("bad_words", "allowed_token_ids", "stop_token_ids", "ignore_eos", "min_tokens")
        }
        given["logit_bias"] = self._one_value("logit_bias", Constraints.token_biases)
        given |= {"stop": stops or None, "structured_outputs": self.constraint()}
        return {name: value for name, value in given.items() if value is not None}

    def _one_value(self, name: str, read: Callable[[Constraints], Any]) -> Any:
        own = read(self)
        other = None if self.options is None else read(self.options)
        if own is not None and other is not None and own != other:
            raise FieldError(f"options.{name}", f"options.{name} and {name} have different values: give one of them")
        return other if own is None else own

    def _texts(self) -> Iterator[tuple[str, Callable[[], StructuredOutputsParams]]]:
        yield from self.constraints_of_text()
        if self.options is not None:
            for name, read in self.options.constraints_of_text():
                yield f"options.{name}", read

    def _check_blanks(self) -> None:
        for where, each in (("", self), ("options.", self.options)):
            if each is not None and each.guided_whitespace_pattern is not None and each.guided_json is None:
                name = f"{where}guided_whitespace_pattern"
                raise FieldError(name, f"{name} needs guided_json: add it, or leave the pattern out")


def _read(name: str, read: Callable[[], StructuredOutputsParams]) -> StructuredOutputsParams:
    """
    Raises:
        FieldError: the field has a wrong value.
    """
    try:
        return read()
    except FieldError:
        raise
    except InvalidRequestError as error:
        # the errors of some APIs have no member for the field, so the message names it
        message = str(error) if name in str(error) else f"{name}: {error}"
        raise FieldError(name, message) from error


def _params_of(wanted: StructuredOutputs) -> StructuredOutputsParams:
    given = wanted.model_dump(by_alias=True, exclude_none=True)
    if isinstance(tag := given.get("structural_tag"), dict) and "format" in tag:
        given["structural_tag"] = StructuralTagFormat.model_validate({"type": "structural_tag", **tag}).document()
    return StructuredOutputsParams(**given)
