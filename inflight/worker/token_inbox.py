"""`TokenInbox`: receives, on an earlier pipeline stage, the drawn tokens of the steps under way, in step order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from inflight.distributed.token_link import TokenReceiver
from inflight.interface.request import Int32Array


class TokenInbox:
    """Owned by the thread that computes; only `post` is called by the thread that prepares.

    Args:
        receiver: None on stages that get no drawn tokens.
        apply: takes the slots and positions given to `expect`, and the message.
    """

    def __init__(self, receiver: TokenReceiver | None, apply: Callable[[Int32Array, Int32Array, Tensor], None]) -> None:
        self._receiver, self._apply = receiver, apply
        self._expected: deque[tuple[int, Int32Array, Int32Array, Future[Tensor]]] = deque()

    def post(self, num_rows: int) -> Future[Tensor] | None:
        """Begin to receive the next sampling step's message. None without a receiver, or if the step draws nothing."""
        return self._receiver.post(num_rows) if self._receiver is not None and num_rows else None

    def expect(self, step_id: int, slots: Int32Array, positions: Int32Array, message: Future[Tensor]) -> None:
        """Add a step that draws for `slots`, the first tokens at `positions`. The step's forward calls this."""
        self._expected.append((step_id, slots, positions, message))

    def receive(self, step_id: int) -> None:
        """Wait for all messages up to the message of `step_id` and apply them; also apply later ones that have
        arrived."""
        expected = self._expected
        while expected and (expected[0][0] <= step_id or expected[0][3].done()):
            _, slots, positions, message = expected.popleft()
            self._apply(slots, positions, message.result())
