"""OpenAI's API of chats, completions and models, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

_ONLY_TEXT = ": models take and write text here (/v1/chat/completions, /v1/completions, /v1/embeddings)"
# those of other engines are here, too: llama.cpp (/infill, /completion), TGI and SGLang (/generate, /generate_stream), and
# /complete of an older API of Anthropic's
_INSTEAD = {
    "/v1": ": /v1 comes twice, use it once in the base URL",
    "/models": ": /v1/models lists the models",
    "/infill": ": use /v1/completions with suffix",
    "/generate_stream": ": use /v1/completions with stream",
    **dict.fromkeys("/completions /complete /engines /completion /generate".split(), ": use /v1/completions"),
    **dict.fromkeys("/chat/completions /threads /assistants".split(), ": use /v1/chat/completions"),
    **dict.fromkeys("/moderations /images /audio /realtime /videos".split(), _ONLY_TEXT),
    **dict.fromkeys("/files /batches /fine_tuning /uploads /vector_stores".split(), ": nothing is stored here"),
}

API = Api(
    routes="inflight.entrypoints.openai.routes",
    endpoints={
        **dict.fromkeys("/v1/chat/completions /v1/completions /tokenize /detokenize".split(), "POST"),
        **dict.fromkeys("/v1/models /v1/models/** /tokenizer_info".split(), "GET"),
    },
    title="OpenAI",
    base_path="/v1",
    versioned=("/chat/completions", "/completions", "/models"),
    examples={"/v1": "/v1/chat/completions, /v1/models", "/v1/chat": "/v1/chat/completions"},
    instead=_INSTEAD,
)
