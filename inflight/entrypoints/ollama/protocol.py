"""The bodies of requests to /api/..., as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from inflight.entrypoints.fields.constraint_fields import ConstraintFields, Constraints
from inflight.entrypoints.fields.messages import MAX_MESSAGES, Calls, Role, ToolName, Tools, result_text
from inflight.entrypoints.fields.sampling_fields import MAX_INT, SamplingFields, sampling_field
from inflight.entrypoints.fields.strict_model import StrictModel, neutral, no_effect, optional

MAX_TEXTS = 2048  # of one request

Images = Annotated[
    Annotated[list[str], Field(fail_fast=True)] | None,
    optional(
        "The images before the text, in base64. If the model takes none: a 400 where the client asks about them now; elsewhere "
        "the model reads that there were images."
    ),
]


class Options(Constraints, SamplingFields):
    """Those options of Ollama that change an answer. The others are about its own engine, such as num_ctx and num_gpu."""

    num_predict: int | None = optional(
        "The most tokens of an answer; 0, -1 and -2 allow the whole context.", ge=-2, le=MAX_INT
    )
    repeat_penalty: float | None = sampling_field(
        "repetition_penalty", "Lowers the logits of tokens that are in the prompt or the output."
    )


class ModelRequest(StrictModel):
    model: str | None = optional("A name in /api/tags, with or without :latest. Default: the first.")


class AnswerRequest(ModelRequest, ConstraintFields):
    options: Options | None = optional("How tokens are drawn, and where the answer ends.")
    stream: bool | None = optional("False: one JSON object. Otherwise a line of JSON for each piece.")
    keep_alive: float | int | str | None = no_effect("The model always stays loaded.")


class OllamaMessage(StrictModel):
    """One message of a chat. A message from this server's answers may be sent back unchanged."""

    role: Role = Field(description="user, assistant, system, tool, or another role of the chat template.")
    content: str | None = None
    thinking: str | None = optional("Reasoning of an earlier answer; some chat templates show it.")
    tool_calls: Calls | None = optional("Calls that were made.")
    tool_name: ToolName | None = optional("The name of the tool whose result this message has.")
    tool_call_id: str | None = optional(
        "The id of the call. Default: the next call of the tool tool_name that has no result, or else the next call."
    )
    images: Images = None

    @model_validator(mode="before")
    @classmethod
    def _read_result(cls, message: Any) -> Any:  # Any: JSON, not checked yet
        if isinstance(message, dict) and message.get("role") == "tool":
            return {**message, "content": result_text(message.get("content"))}
        return message


class ChatRequest(AnswerRequest):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = optional(
        "The conversation. Without messages, the answer only says that the model is loaded."
    )
    tools: Tools | None = optional("Functions the model may call. Tools of other types are left out, and reported.")


class GenerateRequest(AnswerRequest):
    """POST /api/generate"""

    prompt: str | None = optional("The user's message. Without it, the answer only says that the model is loaded.")
    system: str | None = optional("A system message before the prompt.")
    raw: bool | None = optional("True: the prompt is continued as it is, without the chat template.")
    suffix: str | None = optional("The text after the answer; only with a model that has fill-in-the-middle tokens.")
    template: Literal[""] | None = neutral("Not supported: write the prompt, and set raw to true.")
    images: Images = None


class ShowRequest(ModelRequest):
    """POST /api/show"""

    name: str | None = optional("Older name of model.")
    verbose: bool | None = no_effect("The answer has no lists of tokens.")


class PullRequest(ModelRequest):
    """POST /api/pull"""

    name: str | None = optional("Older name of model.")
    stream: bool | None = optional("False: one JSON object. Otherwise a line of JSON for each state.")
    insecure: bool | None = no_effect("Nothing is downloaded.")


class EmbedRequest(ModelRequest):
    """POST /api/embed"""

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)] = Field(
        description="A text or several."
    )
    truncate: bool | None = optional("False: a text that is too long is an error. Otherwise it is cut.")
    dimensions: int | None = optional("Keep the first so many numbers, and normalize them again.", ge=1, le=MAX_INT)
    keep_alive: str | int | float | None = no_effect("The model always stays loaded.")
    options: dict[str, Any] | None = no_effect("Nothing is drawn.")


class EmbeddingsRequest(ModelRequest):
    """POST /api/embeddings"""

    prompt: str = Field(description="A text.")
    keep_alive: str | int | float | None = no_effect("The model always stays loaded.")
    options: dict[str, Any] | None = no_effect("Nothing is drawn.")
