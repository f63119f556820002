"""The bodies of requests for vectors and scores, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import Field

from inflight.entrypoints.fields.messages import MAX_MESSAGES, ChatMessage
from inflight.entrypoints.fields.sampling_fields import MAX_INT, TokenId
from inflight.entrypoints.fields.strict_model import StrictModel, no_effect, optional

_INSTRUCTION = "What a document has to do for the query. Only for models whose template has a place for it."
MAX_INPUTS = 2048  # of one request, as in OpenAI's API
MAX_PRIORITY = 2**31 - 1

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Input = str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Pair = str | Texts
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class PoolingFields(StrictModel):
    """What all requests have."""

    model: str | None = None
    truncate_prompt_tokens: int | None = optional(
        "Cut longer texts to so many tokens; -1: to as many as the model takes.", ge=-1, le=MAX_INT
    )
    priority: int | None = optional(
        "Lower runs first; needs scheduling_policy='priority'.", ge=-MAX_PRIORITY, le=MAX_PRIORITY
    )
    use_activation: bool | None = optional("False: vectors are not normalized, and scores do not become probabilities.")
    user: str | None = no_effect("Data of the caller; nothing is stored.")


class TextFields(PoolingFields):
    """Requests about single texts, or about one conversation."""

    input: Input | None = optional("Text or token ids, or a list of them.")
    messages: Messages | None = optional("Instead of input: a conversation, which the chat template makes one text.")
    add_generation_prompt: bool | None = optional("Begin a message of the assistant; false if left out.")
    continue_final_message: bool | None = optional("Leave out the end of the last message.")
    chat_template_kwargs: dict[str, Any] | None = optional("Further variables of the chat template.")
    add_special_tokens: bool | None = optional(
        "The tokenizer adds its special tokens; if left out, true for input and false for messages."
    )
    cache_salt: str | None = optional("Separates prefix caches of users.", max_length=1024)


class EmbeddingRequest(TextFields):
    """POST /v1/embeddings"""

    encoding_format: Literal["float", "base64"] | None = optional(
        "float: a list of numbers. base64: float32 in the order of little endian."
    )
    dimensions: int | None = optional("Keep the first so many numbers, and normalize them again.", ge=1, le=MAX_INT)
    input_type: str | None = optional("The name of one of the model's prompts, which is put before each text.")


class PoolingRequest(EmbeddingRequest):
    """POST /pooling"""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = optional(
        "What the answer has. If it is left out, what the model makes."
    )


class ClassificationRequest(TextFields):
    """POST /classify"""


class ScoreRequest(PoolingFields):
    """POST /score: text_1 with each of text_2, or pair by pair."""

    text_1: Pair | None = optional("A text, or as many as text_2 has.")
    text_2: Pair | None = optional("A text or several.")
    queries: Pair | None = optional("Another name of text_1.")
    documents: Pair | None = optional("Another name of text_2.")
    data_1: Pair | None = optional("Another name of text_1.")
    data_2: Pair | None = optional("Another name of text_2.")
    items: Pair | None = optional("Another name of text_2.")
    instruction: str | None = optional(_INSTRUCTION)


class RerankDocument(StrictModel):
    text: str


class RerankRequest(PoolingFields):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] = (
        Field(description="Texts, or objects with text.")
    )
    top_n: int | None = optional("The answer has the best so many. All, if left out.", ge=1, le=MAX_INT)
    return_documents: bool | None = optional("False: the results have no texts. True, if left out.")
    max_tokens_per_doc: int | None = optional("Cut longer documents to so many tokens.", ge=1, le=MAX_INT)
    max_tokens_per_query: int | None = optional("Cut a longer query to so many tokens.", ge=1, le=MAX_INT)
    instruction: str | None = optional(_INSTRUCTION)
    instruct: str | None = optional("Another name of instruction, as SGLang has it.")


class CohereEmbedRequest(StrictModel):
    """POST /v2/embed"""

    model: str | None = None
    texts: Texts = Field(description="The texts.")
    input_type: str | None = optional(
        "The name of one of the model's prompts; search_query and search_document also name query and document."
    )
    embedding_types: list[Literal["float", "base64"]] | None = optional("The forms of vectors in the answer.")
    output_dimension: int | None = optional(
        "Keep the first so many numbers, and normalize them again.", ge=1, le=MAX_INT
    )
    truncate: Literal["NONE", "END"] | None = optional(
        "NONE: longer texts are an error. END, if left out: they are cut."
    )
    max_tokens: int | None = optional("Cut longer texts to so many tokens.", ge=1, le=MAX_INT)
    priority: int | None = optional(
        "Lower runs first; needs scheduling_policy='priority'.", ge=-MAX_PRIORITY, le=MAX_PRIORITY
    )
