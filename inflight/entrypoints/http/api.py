"""`Api`: what the server knows of an API before it loads the API's code. `entrypoints/apis.py` has the table of all."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# status, message, type, param, code -> the JSON object of the answer
ErrorForm = Callable[[int, str, str, str | None, str | None], Mapping[str, object]]


def plain_error(status: int, message: str, kind: str, param: str | None, code: str | None) -> Mapping[str, object]:
    """The form in which errors are written where no API has another one."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def with_field(message: str, param: str | None) -> str:
    """A message that names the wrong field, for a form of errors that has no member for the field."""
    if param is None or re.split(r"\W", param)[0] in message:
        return message
    return f"{param}: {message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """
    Attributes:
        routes: the module with `add_routes(app, server)`, which adds the endpoints. Only the app loads it, because loading
            takes long, and the server answers health checks before that.
        endpoints: path -> its methods, as in "GET DELETE". In a path `*` stands for a part without a slash, and `**` for any
            text. A path without stars goes before one with stars.
        title: whose API it is, for the page that browsers get. Empty if it is on the page under another name.
        base_path: what clients add to the server's address to get their base URL.
        paths: the paths whose clients read this API's form of errors. One that ends with a slash is the beginning of paths.
        header: a header that only clients of this API send, in lower case. They read its form of errors at all paths.
        error_form: how an error is written.
        takes_any_content_type: whether its clients send JSON with other types than application/json.
        versioned: the paths behind /v1 that some clients ask for without /v1.
        examples: the beginning of paths, which is no path itself -> some paths that begin so.
        instead: the beginning of paths of this API that are not served, without /v1 -> what to use instead, as the end of a
            sentence.
        version: of the program whose API it is, which its clients ask for, and refuse if it is older than they need.
    """

    routes: str
    endpoints: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    base_path: str = ""
    paths: tuple[str, ...] = ()
    header: bytes | None = None
    error_form: ErrorForm = plain_error
    takes_any_content_type: bool = False
    versioned: tuple[str, ...] = ()
    examples: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    def has_path(self, path: str) -> bool:
        return any(path == own or (own.endswith("/") and path.startswith(own)) for own in self.paths)
