"""`SamplingOptions`: how tokens are chosen, named after `SamplingParams`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from inflight.entrypoints.cli.engine_options import parse_json_object
from inflight.errors import InvalidRequestError
from inflight.sampling_params import SamplingParams, StructuredOutputsParams

SAMPLING = "Sampling (default: the model's generation_config.json)"


def _sampling(help: str, *names: str, **more: Any) -> Any:  # Any: typer's own type of an option
    return typer.Option(*names, help=help, rich_help_panel=SAMPLING, **more)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields have the names of `SamplingParams`; None, or an empty list, is an option that was not given."""

    max_tokens: Annotated[
        int | None, _sampling("Most tokens to emit. Default: 256, in a chat the rest of the context.", metavar="N")
    ] = None
    min_tokens: Annotated[int | None, _sampling("Do not end before so many.", metavar="N")] = None
    temperature: Annotated[float | None, _sampling("0 is greedy: always the most probable token.", metavar="X")] = None
    top_p: Annotated[float | None, _sampling("Draw from the smallest set that has this probability.", metavar="X")] = (
        None
    )
    top_k: Annotated[int | None, _sampling("Draw from the k most probable tokens; 0 is all.", metavar="N")] = None
    min_p: Annotated[
        float | None, _sampling("Drop tokens below this share of the best one's probability.", metavar="X")
    ] = None
    presence_penalty: Annotated[float | None, _sampling("Against tokens emitted before.", metavar="X")] = None
    frequency_penalty: Annotated[float | None, _sampling("The same, once for each time.", metavar="X")] = None
    repetition_penalty: Annotated[
        float | None, _sampling("Above 1: against tokens of prompt and output.", metavar="X")
    ] = None
    seed: Annotated[
        int | None,
        _sampling("One seed for every prompt. Default: each draws its own from its row number.", metavar="N"),
    ] = None
    n: Annotated[int | None, _sampling("Completions per prompt.", "--n", "-n", metavar="N")] = None
    stop: Annotated[list[str] | None, _sampling("End before this text. May be repeated.", metavar="TEXT")] = None
    stop_token_ids: Annotated[
        list[int] | None, _sampling("End at this token. May be repeated.", "--stop-token-id", metavar="N")
    ] = None
    ignore_eos: Annotated[
        bool | None, _sampling("Go on past the model's own end tokens.", "--ignore-eos/--no-ignore-eos")
    ] = None
    bad_words: Annotated[
        list[str] | None, _sampling("Never emit this text. May be repeated.", "--bad-word", metavar="TEXT")
    ] = None
    logprobs: Annotated[
        int | None, _sampling("With each token, the k best ones' log-probabilities (JSON only).", metavar="N")
    ] = None
    prompt_logprobs: Annotated[int | None, _sampling("The same for the prompt's tokens (JSON only).", metavar="N")] = (
        None
    )
    skip_special_tokens: Annotated[
        bool | None,
        _sampling("Whether special tokens appear in the text.", "--skip-special-tokens/--show-special-tokens"),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,  # Any: JSON
        _sampling(
            'What the text must look like: \'{"json": {...}}\', \'{"regex": "..."}\', ... or a file that says it.',
            metavar="JSON",
            parser=parse_json_object,
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, _sampling("Leave the stop text in.", "--include-stop/--cut-stop")
    ] = None

    def given(self) -> dict[str, Any]:  # Any: SamplingParams checks every value
        """The options that were given, by the name in `SamplingParams`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        found = {name: value for name, value in values.items() if value not in (None, [], ())}
        if self.structured_outputs is not None:
            found["structured_outputs"] = structured_outputs_from_json(self.structured_outputs)
        return found

    def check(self) -> None:
        """What can be checked without the model, so before it is loaded.

        Raises:
            InvalidRequestError: an option is out of bounds, or contradicts another.
        """
        SamplingParams(**{"max_tokens": None, **self.given()})


def structured_outputs_from_json(values: object) -> StructuredOutputsParams:
    """
    Raises:
        InvalidRequestError: it is no JSON object, or one of its fields is unknown or wrong.
    """
    known = [field.name for field in fields(StructuredOutputsParams)]
    if not isinstance(values, Mapping) or (unknown := [name for name in values if name not in known]):
        what = f"has no {unknown[0]!r}" if isinstance(values, Mapping) else f"is a {type(values).__name__}"
        raise InvalidRequestError(f"structured_outputs {what}; give an object with one or more of {', '.join(known)}")
    return StructuredOutputsParams(**values)


def params_from_json(base: SamplingParams, values: object) -> SamplingParams:
    """`base` with the fields that a row's "params" names.

    Raises:
        InvalidRequestError: it is no JSON object, or one of its fields is unknown or wrong.
    """
    if not isinstance(values, Mapping):
        raise InvalidRequestError(f"params is a {type(values).__name__}; give an object of sampling parameters")
    known = [field.name for field in fields(SamplingParams)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise InvalidRequestError(f"unknown sampling parameter {name!r}; {hint}")
    changes = dict(values)
    if isinstance(bias := changes.get("logit_bias"), Mapping):  # JSON has no integer keys
        changes["logit_bias"] = {int(key) if str(key).isdigit() else key: value for key, value in bias.items()}
    if changes.get("structured_outputs") is not None:
        changes["structured_outputs"] = structured_outputs_from_json(changes["structured_outputs"])
    try:
        return dataclasses.replace(base, **changes)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, AttributeError) as error:  # a number where a list belongs, and the like
        raise InvalidRequestError(f"params cannot be read: {error}") from error
