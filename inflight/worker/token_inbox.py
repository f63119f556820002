"""`TokenInbox`: on an earlier pipeline stage, receives the tokens that the last stage draws, in step order."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from inflight.device.long_calls import LONG_CALLS
from inflight.distributed.token_link import TokenReceiver
from inflight.interface.request import Int32Array


class TokenInbox:
    """A message has the tokens of one step. Only the compute thread uses the inbox. There is one exception: the thread that
    prepares steps calls `post`.

    Args:
        receiver: None on stages that get no drawn tokens.
        apply: called for each message, with the slots and positions that were given to `expect`.
    """

    def __init__(self, receiver: TokenReceiver | None, apply: Callable[[Int32Array, Int32Array, Tensor], None]) -> None:
        self._receiver = receiver
        self._apply = apply
        self._expected: deque[tuple[int, Int32Array, Int32Array, Future[Tensor]]] = deque()

    def post(self, num_rows: int) -> Future[Tensor]:
        """Begin to receive the message of the next step. `num_rows`: how many rows of the step draw, at least one."""
        assert self._receiver is not None
        return self._receiver.post(num_rows)

    def expect(self, step_id: int, slots: Int32Array, positions: Int32Array, message: Future[Tensor]) -> None:
        """Add a step that draws tokens. `positions[i]` is the position of the first token that it draws for `slots[i]`. Call
        this when the step's forward begins."""
        self._expected.append((step_id, slots, positions, message))

    def receive(self, step_id: int) -> None:
        """Wait for the messages of all steps up to `step_id`, and apply them. Then also apply messages of later steps that
        have arrived already."""
        expected = self._expected
        LONG_CALLS.before()
        while expected and (expected[0][0] <= step_id or expected[0][3].done()):
            _, slots, positions, message = expected.popleft()
            self._apply(slots, positions, message.result())
