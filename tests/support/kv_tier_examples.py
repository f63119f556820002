"""Tiers as users write them (`module_path`): one that works, and some that do not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from inflight.kv_connector.tier import Tier


class DictTier(Tier):
    """Keeps objects in the dictionary `options["objects"]`."""

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        self.objects: dict[bytes, bytes] = options["objects"]

    def get(self, name: bytes, into: memoryview) -> int | None:
        data = self.objects.get(name)
        if data is None:
            return None
        length = min(len(data), len(into))
        into[:length] = data[:length]
        return len(data)

    def get_range(self, name: bytes, into: memoryview, offset: int) -> int | None:
        data = self.objects.get(name, b"")[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data) if name in self.objects else None

    def put(self, name: bytes, data: memoryview) -> None:
        self.objects.setdefault(name, bytes(data))

    def discard(self, name: bytes) -> None:
        self.objects.pop(name, None)

    def close(self) -> None:
        pass


class LyingTier(DictTier):
    """`get` fills the buffer with `options["garbage"]` and returns `options["answer"]`, whatever that is."""

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        super().__init__({"objects": {}})
        self.options = options

    def get(self, name: bytes, into: memoryview) -> int | None:
        into[:] = self.options["garbage"] * len(into)
        answer: int | None = self.options["answer"]
        return answer


class RaisingTier(DictTier):
    """Every call raises `options["error"]`, `close` too."""

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        super().__init__({"objects": {}})
        self.error: BaseException = options["error"]

    def get(self, name: bytes, into: memoryview) -> int | None:
        raise self.error

    def put(self, name: bytes, data: memoryview) -> None:
        raise self.error

    def close(self) -> None:
        raise self.error


class WaitingTier(DictTier):
    """`get` and `put` wait until `go` is set. `num_entered` counts them."""

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        super().__init__(options)
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)

    def get(self, name: bytes, into: memoryview) -> int | None:
        self.entered.release()
        assert self.go.wait(300)
        return super().get(name, into)

    def get_range(self, name: bytes, into: memoryview, offset: int) -> int | None:
        self.entered.release()
        assert self.go.wait(300)
        return super().get_range(name, into, offset)

    def put(self, name: bytes, data: memoryview) -> None:
        self.entered.release()
        assert self.go.wait(300)
        super().put(name, data)


class NoTier:
    """Has the methods, but is no `Tier`."""


class NeedsOptionsTier(DictTier):
    """Cannot be made."""

    def __init__(self, options: Mapping[str, Any]) -> None:  # Any: as JSON
        raise KeyError(f"no such user: {options['password']}")
