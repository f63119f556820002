"""`RequestIds`: every request has an id, its client's own or a new one, and every response says it."""

from __future__ import annotations

import re
import uuid

from inflight.entrypoints.serve.error_response import ASGIApp, Message, Receive, Scope, Send, header_of

HEADER = b"x-request-id"
# It ends up in logs, in traces and in the response's header: short, and nothing that any of them could take for markup.
_ACCEPTED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Puts the id at scope["state"]["request_id"]. A client's id that is too long or has other characters is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header_of(scope, HEADER)
        accepted = given is not None and _ACCEPTED.fullmatch(given) is not None
        request_id = given if given is not None and accepted else uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message.get("headers", ()) if header[0].lower() != HEADER]
                message = {**message, "headers": [*headers, (HEADER, request_id)]}
            await send(message)

        await self._app(scope, receive, send_with_id)
