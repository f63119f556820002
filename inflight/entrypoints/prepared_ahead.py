"""`PreparedAhead`: the requests of a call or of a file, in their order. The images of the next prompts are processed meanwhile.

requests --> at most MAX_AHEAD prompts whose images are processed --> `take` --> engine --> `ended`

Processed images take much memory, so no request is given out while the images of the requests in the engine have more than
MAX_BYTES. A prompt without images is given out at once, and no further prompt is read before.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from inflight.engine.request.image_support import ImageSupport
from inflight.engine.request.prompt import Prompt
from inflight.errors import InflightError
from inflight.interface.image_prompts import has_images, names_earlier_images
from inflight.pooling_params import Params

# the id of a request, its prompt, its parameters, and the options of `add_request`. Any: options of each engine
Request = tuple[str, Prompt, Params | None, Mapping[str, Any]]

MAX_AHEAD = 8
MAX_BYTES = 2**30


class PreparedAhead:
    """One thread may call the methods. `close` must be called in the end."""

    def __init__(self, images: ImageSupport, requests: Iterator[Request]) -> None:
        self._images = images
        self._requests = requests
        self._ahead: deque[tuple[Request, Future[Prompt] | None]] = deque()  # None: its prompt needs no preparation now
        self._threads = ThreadPoolExecutor(MAX_AHEAD, thread_name_prefix="inflight-prompt-ahead")
        self._num_bytes: dict[str, int] = {}  # id of a request in the engine -> the memory of its images

    def take(self, seconds: float) -> Request | None:
        """Returns the next request, for the engine. None if there is none, if its images are not processed after so many
        seconds, or if the engine has too many images.

        If an image is wrong, its prompt is as it was given, so the engine raises the error.
        """
        self._read_ahead()
        if not self._ahead or sum(self._num_bytes.values()) > MAX_BYTES:
            return None
        request, preparing = self._ahead[0]
        if preparing is not None:
            try:
                request = (request[0], preparing.result(seconds), *request[2:])
            except TimeoutError:
                return None
            except InflightError:
                pass
            else:
                self._num_bytes[request[0]] = _num_bytes(request[1])
        self._ahead.popleft()
        return request

    def ended(self, request_ids: Iterable[str]) -> None:
        """Call this when requests have ended in the engine."""
        for request_id in request_ids:
            self._num_bytes.pop(request_id, None)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read_ahead(self) -> None:
        while not self._ahead or (len(self._ahead) < MAX_AHEAD and self._ahead[-1][1] is not None):
            if (request := next(self._requests, None)) is None:
                return
            self._ahead.append((request, self._preparing(request)))

    def _preparing(self, request: Request) -> Future[Prompt] | None:
        """An image that is only named may be one of an earlier prompt, which must be processed before."""
        _, prompt, _, options = request
        if not has_images(prompt) or names_earlier_images(prompt):
            return None
        return self._threads.submit(self._images.prepared_now, prompt, options.get("cache_salt", ""))


def _num_bytes(prompt: Any) -> int:  # Any: a prompt whose images are prepared
    return sum(image.num_bytes for image in prompt["multi_modal_data"]["image"])
