"""The JSON objects of Ollama's answers, as typed dicts, for /openapi.json."""

from typing import Any, Literal, NotRequired

from inflight.entrypoints.http.bodies import Body


class ModelDetails(Body):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(Body):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class RunningModel(ModelEntry):
    expires_at: str
    size_vram: int
    context_length: int


class Models(Body):
    models: list[ModelEntry]


class RunningModels(Body):
    models: list[RunningModel]


class ShownModel(Body):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class CalledFunction(Body):
    name: str
    arguments: dict[str, Any]  # Any: JSON


class AnsweredCall(Body):
    id: str
    function: CalledFunction


class Message(Body):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[AnsweredCall]]


class Line(Body):
    """The members of both answers. The last line of a stream and a whole answer have `done_reason` and the counts. Durations
    are nanoseconds: `load_duration` is the time before the request ran."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    thinking_eval_count: NotRequired[
        int
    ]  # how many of the tokens of `eval_count` are thoughts; Ollama has no such count


class ChatAnswer(Line):
    message: Message


class GeneratedText(Line):
    response: str
    thinking: NotRequired[str]


class EmbedAnswer(Body):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OlderEmbedAnswer(Body):
    embedding: list[float]
