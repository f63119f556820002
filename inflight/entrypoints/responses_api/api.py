"""OpenAI's Responses API, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.responses_api.routes",
    endpoints={
        **dict.fromkeys("/v1/responses /v1/responses/input_tokens /v1/responses/*/cancel".split(), "POST"),
        "/v1/responses/*": "GET DELETE",
        "/v1/responses/*/input_items": "GET",
    },
    versioned=("/responses",),
    instead={"/responses": ": a stored response is at /v1/responses/ID, with /input_items and /cancel behind it"},
)
