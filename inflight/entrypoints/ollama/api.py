"""Ollama's API, as a row of the table of APIs, and its form of errors."""

from collections.abc import Mapping

from inflight.entrypoints.http.api import Api, with_field

# Clients ask for the version of Ollama, and refuse one that is older than they need. Ollama has had all the endpoints of
# routes.py since this version or earlier.
API_VERSION = "0.13.5"


def error_form(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    return {"error": with_field(message, param)}


API = Api(
    routes="inflight.entrypoints.ollama.routes",
    endpoints={
        **dict.fromkeys("/api/chat /api/generate /api/embed /api/embeddings /api/show /api/pull".split(), "POST"),
        **dict.fromkeys("/ /api/version /api/tags /api/ps".split(), "GET"),
    },
    title="Ollama",
    paths=("/api/",),
    error_form=error_form,
    takes_any_content_type=True,
    examples={"/api": "/api/chat, /api/tags"},
    instead={"/api": ": the server has one model, which cannot be changed"},
    version=API_VERSION,
)
