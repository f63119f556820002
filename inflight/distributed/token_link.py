"""`TokenSender` and `TokenReceiver`: send the drawn tokens from the last pipeline stage directly to an earlier stage.

The first stage needs the tokens, because it embeds them. With drafts (speculative decoding) all stages need them, because the
number of accepted drafts determines how many tokens a step has. The tokens have their own link, so that activations, which are
far larger, do not delay them. A message has the tokens of one step, and messages are sent in step order. The number of rows of
a message is in the step's plan, and the width is known from the configuration.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from inflight.distributed.channel import Channel


class _TokenLink:
    """One end of the link. It owns the channel. `width`: how many numbers each row of a message has."""

    def __init__(self, channel: Channel, width: int = 1) -> None:
        self._channel = channel
        self._width = width
        self._pool = ThreadPoolExecutor(1, "inflight-tokens")

    def close(self) -> None:
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class TokenSender(_TokenLink):
    """The end of the link on the last stage."""

    _sent: Future[None] | None = None  # the last message

    def send(self, message: Tensor) -> None:
        """Queue a step's message, int32 [num_sampling_rows, width], with at least one row. After this call the message must not
        be changed.

        Raises:
            OSError: an earlier send failed.
        """
        if self._sent is not None and self._sent.done():
            self._sent.result()
        self._sent = self._pool.submit(self._channel.send, message)


class TokenReceiver(_TokenLink):
    """The end of the link on an earlier stage."""

    def post(self, num_rows: int) -> Future[Tensor]:
        """Begin to receive the message of the next step that draws. The future's result is int32 [num_rows, width]."""
        return self._pool.submit(self._receive, num_rows)

    def _receive(self, num_rows: int) -> Tensor:
        message = torch.empty(num_rows, self._width, dtype=torch.int32, device="cpu")
        self._channel.receive(message)
        return message
