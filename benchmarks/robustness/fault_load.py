"""`Load`: clients that send requests over HTTP, each one request at a time, and record what became of each request."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.robustness.fault_requests import BadAnswer, Choice, LoadRequest, read_answer

MAX_SILENCE_SECONDS = 120.0  # a request whose connection is silent for longer is lost
MAX_SENDS = 5
RETRY_SECONDS = 0.2


@dataclass
class Outcome:
    """What became of one request. Times are of `time.monotonic()`.

    Attributes:
        choices: the answer; None if the request was lost.
        error: why the request was lost.
        longest_silence: most seconds from the request to the first event of the stream, or from one event to the next; 0 if the
            answer comes in one piece.
        num_sends: 1, or more if its connection broke and the client sent it again.
    """

    request: LoadRequest
    choices: list[Choice] | None = None
    error: str = ""
    sent: float = 0.0
    ended: float = 0.0
    longest_silence: float = 0.0
    num_sends: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices or [])


@dataclass
class Load:
    """
    Args:
        address: host and port of the server.
        requests: of each client.
        sends_again: send a request again if its connection breaks, as OpenAI's clients do. Only for faults of a front end: a
            connection ends with the process that holds it.
        max_sends: with `sends_again`, how often a request is sent at most.
        is_over: whether the server has ended, so that no request is sent again.
    """

    address: tuple[str, int]
    requests: Sequence[Sequence[LoadRequest]]
    sends_again: bool = False
    max_sends: int = MAX_SENDS
    is_over: Callable[[], bool] = lambda: False
    outcomes: list[Outcome] = field(default_factory=list)  # in the order in which the requests ended

    def run(self) -> list[Outcome]:
        """Send all requests. Returns when all of them have ended."""
        threads = [threading.Thread(target=self._run_client, args=(client,)) for client in range(len(self.requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.outcomes

    def _run_client(self, client: int) -> None:
        for request in self.requests[client]:
            outcome = Outcome(request, sent=time.monotonic())
            while outcome.choices is None and outcome.num_sends < (self.max_sends if self.sends_again else 1):
                if outcome.num_sends:
                    if self.is_over():
                        break
                    time.sleep(RETRY_SECONDS)
                outcome.num_sends += 1
                try:
                    outcome.choices = self._send(outcome)
                except BadAnswer as error:  # the server has answered, so the client does not send the request again
                    outcome.error = str(error)
                    break
                except (OSError, http.client.HTTPException) as error:
                    outcome.error = f"the connection broke: {error!r}"
            outcome.ended = time.monotonic()
            self.outcomes.append(outcome)

    def _send(self, outcome: Outcome) -> list[Choice]:
        request = outcome.request
        connection = http.client.HTTPConnection(*self.address, timeout=MAX_SILENCE_SECONDS)
        with contextlib.closing(connection):
            last = time.monotonic()
            connection.request("POST", request.path, json.dumps(request.body), {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BadAnswer(f"status {response.status}: {response.read().decode()[:300]}")
            if not request.is_stream:
                return read_answer([json.loads(response.read())])
            events: list[dict[str, Any]] = []  # Any: JSON
            is_done = False
            for line in response:
                if not line.startswith(b"data: "):
                    continue  # an empty line, or a comment that keeps the connection alive
                now = time.monotonic()
                outcome.longest_silence, last = max(outcome.longest_silence, now - last), now
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                else:
                    events.append(json.loads(line[6:]))
            if not is_done and not any("error" in event for event in events):
                raise http.client.IncompleteRead(b"")
            return read_answer(events)


def steady_tokens_per_second(address: tuple[str, int], num_streams: int, num_tokens: int, salt: str) -> float:
    """Output tokens per second of greedy requests that start together and have `num_tokens` tokens each.

    Raises:
        SystemExit: a request was lost.
    """
    body = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0, "stream": False, "return_token_ids": True}
    requests = [
        [LoadRequest(f"steady {index}", "/v1/completions", {**body, "prompt": f"Story {index}:", "cache_salt": salt})]
        for index in range(num_streams)
    ]
    outcomes = Load(address, requests).run()
    for outcome in outcomes:
        if outcome.choices is None:
            raise SystemExit(f"{outcome.request.name} was lost: {outcome.error}")
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    return sum(outcome.num_tokens for outcome in outcomes) / seconds
