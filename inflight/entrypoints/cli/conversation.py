"""`Conversation`: the messages of `inflight chat` so far, and what answers the next one: an engine or a running server."""

import base64
import http.client
import itertools
import json
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from inflight.entrypoints.cli.terminal import InterruptFlag, TextStream
from inflight.errors import ConfigError, EngineError, InvalidRequestError
from inflight.event_buffer import EventBuffer

if TYPE_CHECKING:
    from inflight.entrypoints.llm_engine import LLMEngine
    from inflight.sampling_params import SamplingParams

LOCAL_SERVER = "http://localhost:8000"
API_KEY_VARIABLE = "OPENAI_API_KEY"  # as for other clients
Message = Mapping[str, Any]  # Any: JSON


def read_image(path: Path) -> dict[str, Any]:  # Any: JSON
    """A part of a message with the image in this file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"image={str(path)!r} cannot be read: {error.strerror}") from error
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(content).decode('ascii')}"}}


class Conversation(ABC):
    def __init__(self, system: str | None, images: Sequence[Mapping[str, Any]] = ()) -> None:
        """`images`: parts that stand before the text of the first question."""
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._images = list(images)

    def reset(self) -> None:
        self._messages = list(self._opening)

    def answer(self, text: str, stream: TextStream) -> bool:
        """Stream the answer to the user's message `text`. Returns False if Ctrl-C has stopped the answer. The part of a stopped
        answer that was shown stays in the conversation.

        Raises:
            InvalidRequestError: the message cannot be answered. It is left out of the conversation.
        """
        is_first = self._messages == self._opening
        content = [*self._images, {"type": "text", "text": text}] if is_first and self._images else text
        messages = [*self._messages, {"role": "user", "content": content}]
        answer = ""
        finished = True
        with closing(self._answers(messages)) as answers, InterruptFlag() as interrupt:
            for answer in answers:
                stream.update(answer)
                if interrupt.is_set:
                    finished = False
                    break
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return finished

    @abstractmethod
    def _answers(self, messages: list[Message]) -> Generator[str, None, None]:
        """The answer so far, again and again; the last one is whole. If the generator is closed, the answer is stopped."""


class EngineConversation(Conversation):
    def __init__(
        self,
        engine: "LLMEngine",
        params: "SamplingParams",
        system: str | None,
        images: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """
        Raises:
            TokenizerError: the model has no chat template.
        """
        super().__init__(system, images)
        self._engine = engine
        self._params = params
        self._request_ids = (f"turn-{turn}" for turn in itertools.count())
        # Raise at once if the model has no chat template.
        engine.render_chat([*self._opening, {"role": "user", "content": "Hello"}])

    def _answers(self, messages: list[Message]) -> Generator[str, None, None]:
        from inflight.engine.request.request_state import RequestOutputKind  # loads numpy

        request_id = next(self._request_ids)
        finished = False
        self._engine.add_request(
            request_id,
            self._engine.chat_prompt(messages),
            self._params,
            kind=RequestOutputKind.CUMULATIVE,
            add_special_tokens=False,
        )
        try:
            while not finished:
                for output in self._engine.step():
                    finished = output.finished
                    yield output.outputs[0].text
        finally:
            self._engine.abort_requests([request_id])


class ServedConversation(Conversation):
    """Asks a server with OpenAI's API."""

    def __init__(
        self, url: str, fields: Mapping[str, Any], system: str | None, images: Sequence[Mapping[str, Any]] = ()
    ) -> None:  # Any: JSON
        """`fields`: of each request, besides its messages.

        Raises:
            ConfigError: the URL is none of a server.
        """
        super().__init__(system, images)
        self._url = address_of(url if "://" in url else f"http://{url}")
        self._fields = dict(fields)

    def _answers(self, messages: list[Message]) -> Generator[str, None, None]:
        https = self._url.scheme == "https"
        connection = (http.client.HTTPSConnection if https else http.client.HTTPConnection)(self._url.netloc)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        base = self._url.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
        path = f"{base}/v1/chat/completions"
        answer = ""
        with closing(connection):
            try:
                body = json.dumps({**self._fields, "messages": messages, "stream": True})
                connection.request("POST", path, body, headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise InvalidRequestError(_message(response.read()) or f"HTTP {response.status} {response.reason}")
                buffer = EventBuffer()
                for data in (data for piece in iter(response.read1, b"") for data in buffer.push(piece)):
                    if data != b"[DONE]":
                        answer += _content(json.loads(data))
                        yield answer
            except ConnectionRefusedError as error:
                raise EngineError(
                    f"no server listens at {self._url.geturl()}: start one with `inflight serve`, or leave --url out; a server "
                    "that has just been started needs some seconds"
                ) from error
            except socket.gaierror as error:
                raise EngineError(f"there is no machine {self._url.hostname!r}: check the address of --url") from error
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{self._url.geturl()} does not answer: {error}") from error


def address_of(url: str) -> SplitResult:
    """The parts of a server's address.

    Raises:
        ConfigError: the text is no such address.
    """
    try:
        address = urlsplit(url)
        is_address = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # the port is no number or is too large, or a bracket is missing
        is_address = False
    if not is_address or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise ConfigError(f"--url {url!r} is no address of a server; give one as {LOCAL_SERVER}")
    return address


def _content(chunk: Mapping[str, Any]) -> str:  # Any: JSON
    if "error" in chunk:
        raise EngineError(str(chunk["error"].get("message")))
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form; "" if the body has another form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return ""
