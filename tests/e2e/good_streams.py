"""Eight streams that run in a loop beside whatever a test does to the server, and say what they should each time."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx

NUM_STREAMS = 8
# Pause between two rounds of a stream. Without a pause the streams would take most of the processor time.
PAUSE_SECONDS = 3.0
PATH = "/v1/completions"


def _body(index: int) -> dict[str, Any]:
    prompt = f"Tell me a story about {index} foxes."
    sampling = {"temperature": 0.8 if index % 2 else 0.0, "seed": index, "logprobs": 1}
    return {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "stream": True, **sampling}


def read_stream(client: httpx.Client, index: int) -> str:
    """The text of one good stream, to its end."""
    text, finish = "", None
    with client.stream("POST", PATH, json=_body(index)) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text, finish = text + choice["text"], choice["finish_reason"]
    assert finish == "length", finish
    return text


class GoodStreams:
    """Attributes:
    rounds: how often each stream has run to its end so far, and said what it should.
    """

    def __init__(self, url: str) -> None:
        self.rounds = [0] * NUM_STREAMS
        self._url = url
        self._stop = threading.Event()
        self._errors: list[str] = []
        with httpx.Client(base_url=url, timeout=300) as client:  # one after the other: nothing else runs
            self._texts = [read_stream(client, index) for index in range(NUM_STREAMS)]
        assert len(set(self._texts)) == NUM_STREAMS

    def _run(self, index: int) -> None:
        with httpx.Client(base_url=self._url, timeout=300) as client:
            while not self._stop.is_set():
                try:
                    text = read_stream(client, index)
                except Exception as error:
                    self._errors.append(f"stream {index}: {error!r}")
                    return
                if text != self._texts[index]:
                    self._errors.append(f"stream {index} said {text!r} instead of {self._texts[index]!r}")
                    return
                self.rounds[index] += 1
                self._stop.wait(PAUSE_SECONDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Afterwards each has run to its end at least once, and none has said anything else."""
        threads = [threading.Thread(target=self._run, args=(index,)) for index in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self._errors, self._errors
        assert all(self.rounds), self.rounds
