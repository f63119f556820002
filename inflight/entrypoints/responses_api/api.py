"""OpenAI's Responses API, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.responses_api.routes",
    versioned=("/responses",),
    instead={"/responses": ": a stored response is at /v1/responses/ID, with /input_items and /cancel behind it"},
)
