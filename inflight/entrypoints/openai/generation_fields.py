"""`GenerationFields`: the fields that chats and completions have in common, and how they become `SamplingParams`.

The fields have the bounds of `SamplingParams`, so that the OpenAPI document shows these bounds. The engine's input processor
checks the limits that depend on the model.
"""

from typing import Any

from inflight.entrypoints.fields.constraint_fields import ConstraintFields
from inflight.entrypoints.fields.field_error import FieldError
from inflight.entrypoints.fields.parameters import sampling_params
from inflight.entrypoints.fields.sampling_fields import MAX_INT, MAX_PRIORITY, SamplingFields, sampling_field
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional
from inflight.entrypoints.http.validated import Presentation
from inflight.entrypoints.serve.settings import REQUEST_ID_PATTERN
from inflight.sampling_params import SamplingParams


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


class GenerationFields(ConstraintFields, SamplingFields):
    """The fields that chats and completions have in common."""

    model: str | None = optional("One of the names in /v1/models; the first of them if left out.")
    # how tokens are drawn
    n: int | None = sampling_field("n", "The number of answers to each prompt.")
    repetition_penalty: float | None = sampling_field(
        "repetition_penalty", "Lowers the logits of tokens that are in the prompt or the output."
    )
    # where the answer ends
    include_stop_str_in_output: bool | None = optional("The stop string stays in the text.")
    skip_special_tokens: bool | None = optional("False leaves special tokens in the text.")
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

    def sampling_params(
        self, defaults: SamplingParams, *, max_tokens: int | None, logprobs: int | None, echoed: int | None = None
    ) -> SamplingParams:
        """Returns the model's `defaults` with the values of the fields that the request gives. `echoed`: how many
        log-probabilities of the prompt the answer shows before those of its text; None if it shows none.

        Raises:
            InvalidRequestError: values are out of bounds, or contradict each other.
        """
        of_prompt = echoed if self.prompt_logprobs is None else max(self.prompt_logprobs, echoed or 0)
        transfers = {} if self.kv_transfer_params is None else self.kv_transfer_params.model_dump(exclude_none=True)
        return sampling_params(
            self, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=of_prompt, **transfers
        )

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
            parts=() if self.prompt_logprobs is None else ("prompt_logprobs",),
            return_token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
        )

    def check_stream(self) -> None:
        """Refuse `stream_options` if the answer is not a stream, and `prompt_logprobs` if it is a stream."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs a stream: set stream to true")
        if self.stream and self.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs is not supported in a stream: set stream to false")
