"""`ImageCache`: the images that were processed last, within a limit of memory.

An image is found by its key: a digest of its content and of the options of the processor. It is also found by the uuid that a
client has sent with it, as long as it is cached. A uuid is valid only for requests with the same API key, salt and options.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from inflight.multimodal.processed import ProcessedImage

ENTRY_BYTES = 1024  # what an image and each of its uuids need beside the pixels, about


Scope = tuple[str, str]  # `OWNER`, and the cache salt


@dataclass(frozen=True, slots=True)
class ImageName:
    """The uuid of an image, with what it is valid for. `options` is a digest."""

    uuid: str
    scope: Scope
    options: bytes


@dataclass(slots=True)
class _Entry:
    image: ProcessedImage
    names: list[ImageName] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return self.image.num_bytes + ENTRY_BYTES * (1 + len(self.names))


class ImageCache:
    """Any thread may call the methods.

    Attributes:
        max_bytes: the limit.
        num_bytes: the memory that is used now.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the image that was used last is the last one
        self._keys: dict[ImageName, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: bytes, name: ImageName | None = None) -> ProcessedImage | None:
        """Returns the image, which has this name from now on."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            self._give_name(key, entry, name)
            self._evict()
            return entry.image

    def get_named(self, name: ImageName) -> ProcessedImage | None:
        with self._lock:
            key = self._keys.get(name)
            if key is None:
                return None
            self._entries.move_to_end(key)
            return self._entries[key].image

    def put(self, key: bytes, image: ProcessedImage, name: ImageName | None = None) -> None:
        """Add an image, and evict those that were not used for the longest time. An image that is larger than the cache is not
        added."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(image)
                if entry.num_bytes + ENTRY_BYTES > self.max_bytes:
                    return
                self._entries[key] = entry
                self.num_bytes += entry.num_bytes
            self._entries.move_to_end(key)
            self._give_name(key, entry, name)
            self._evict()

    def _give_name(self, key: bytes, entry: _Entry, name: ImageName | None) -> None:
        if name is None or self._keys.get(name) == key:
            return
        if (earlier := self._keys.get(name)) is not None:  # the client has given the name to another image
            self._entries[earlier].names.remove(name)
            self.num_bytes -= ENTRY_BYTES
        self._keys[name] = key
        entry.names.append(name)
        self.num_bytes += ENTRY_BYTES

    def _evict(self) -> None:
        while self.num_bytes > self.max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.num_bytes -= entry.num_bytes
            for name in entry.names:
                del self._keys[name]
