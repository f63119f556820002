"""OpenAI's Responses API, as a row of the table of APIs."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.responses_api.routes",
    versioned=("/responses",),
    instead={"/responses": ": POST the whole conversation to /v1/responses, because no responses are stored"},
)
