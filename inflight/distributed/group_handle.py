"""`GroupHandle`: one rank's hold on a group of torch.distributed, which it can let go of at any time."""

from __future__ import annotations

from typing import Any


class GroupHandle:
    """The only reference to a backend of torch.distributed. If it is dropped, the backend's connections close, and peers that
    wait for this rank stop waiting.

    Attributes:
        is_waiting: whether this rank waits for the others in a collective.
    """

    def __init__(self, backend: Any) -> None:  # Any: torch's stubs leave out the collectives of its backends
        self._backend = backend
        self.is_waiting = False

    @property
    def backend(self) -> Any:
        if self._backend is None:
            raise ConnectionError("this rank has left its groups")
        return self._backend

    def close(self) -> None:
        self._backend = None
