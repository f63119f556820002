"""The feed of the engine and the end of a request, as a row of the table of APIs. The page uses them."""

from inflight.entrypoints.http.api import Api

API = Api(
    routes="inflight.entrypoints.engine_api.routes", endpoints={"/v1/engine/live": "GET", "/v1/engine/abort": "POST"}
)
