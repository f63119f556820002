"""`ObjectStoreTier`: objects in S3, in a store with S3's protocol, or in Google's or Azure's store."""

import errno
import re
import threading
import time
from datetime import timedelta
from typing import Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from inflight.config.kv_tiers import KVTierConfig
from inflight.errors import ConfigError
from inflight.kv_connector.tier import Tier

LOOK_SECONDS, LOOKS = 600.0, 100_000  # each look costs a request to the store
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url")  # obstore gives them to its HTTP client
# what stores and obstore say if a range begins behind the end of an object
_OUTSIDE = re.compile(r"416 Range Not Satisfiable|InvalidRange|Invalid range|Requested range was invalid")


class ObjectStoreTier(Tier):
    """
    Raises:
        ConfigError: the library refuses the address or an option.
    """

    @classmethod
    def open(cls, config: KVTierConfig, shard: str, num_shards: int) -> Self:
        return cls(config)

    def __init__(self, config: KVTierConfig) -> None:
        assert config.url is not None
        options = dict(config.options or {})
        arguments: dict[str, object] = {"mkdir": True} if config.url.startswith("file:") else {}
        if config.url.startswith(("s3:", "gs:", "az:")):
            client = {name: options.pop(name) for name in _CLIENT_OPTIONS if name in options}
            time = timedelta(seconds=0.9 * config.timeout_seconds)  # it fails before `GuardedTier` gives it up
            arguments = {
                "config": options,
                "client_options": {"timeout": time, "connect_timeout": time, **client},
                "retry_config": {"max_retries": 2, "retry_timeout": time},
            }
        elif options:
            raise ConfigError(f"secondary_tiers: an obj tier at {config.url!r} takes no options; leave them out")
        self._lock = threading.Lock()
        self._looked = dict[bytes, float]()  # object -> when it was looked for; the last one at the end
        try:
            self._store = from_url(config.url, **arguments)  # type: ignore[call-overload]  # arguments by the kind of store
        except BaseException as error:  # a panic of the library is no Exception
            text = str(error)
            for value in map(str, (config.options or {}).values()):  # keys among them
                text = text.replace(value, "…") if value else text
            raise ConfigError(
                f"secondary_tiers: an obj tier's url or options cannot be used: {text}; correct them"
            ) from None

    def get(self, name: bytes, into: memoryview) -> int | None:
        return self._get(name, into, None)

    def get_range(self, name: bytes, into: memoryview, offset: int) -> int | None:
        return self._get(name, into, (offset, offset + len(into)))

    def _get(self, name: bytes, into: memoryview, span: tuple[int, int] | None) -> int | None:
        try:
            found = obstore.get(self._store, name.hex(), options={"range": span} if span else {})
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise OSError(errno.ENOTDIR, "no such bucket") from None
            return None
        except BaseError as error:
            if span and _OUTSIDE.search(str(error)):
                return 0  # the object was cut short
            raise
        start, end = found.range
        if end - start <= len(into):
            data = memoryview(found.bytes())
            into[: len(data)] = data
            return len(data)
        return end - start

    def put(self, name: bytes, data: memoryview) -> None:
        try:
            obstore.put(self._store, name.hex(), data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return  # another writer was faster

    def touch(self, name: bytes) -> bool:
        """A store does not know of use: rules of its bucket go by age. So this looks whether the object is still there, at most
        every LOOK_SECONDS for each of the last LOOKS objects."""
        now = time.monotonic()
        with self._lock:
            looked = self._looked.pop(name, now - LOOK_SECONDS)
            is_due = now - looked >= LOOK_SECONDS
            self._looked[name] = now if is_due else looked
            if len(self._looked) > LOOKS:
                del self._looked[next(iter(self._looked))]
        if not is_due:
            return True
        try:
            obstore.head(self._store, name.hex())
        except FileNotFoundError as error:
            with self._lock:
                self._looked.pop(name, None)
            return "NoSuchBucket" in str(error)
        return True

    def discard(self, name: bytes) -> None:
        obstore.delete(self._store, name.hex())

    def close(self) -> None:
        """Does nothing: operations end by their own time limits."""
