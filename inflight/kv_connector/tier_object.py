"""`TierObject`: how a payload is stored in a tier, and how what a tier returns is verified.

    0         8            40         48           80
    | magic   | name       | length   | digest     | payload ...            | zeros to a multiple of 4096
      version   32 bytes     of payload, little-endian

The digest covers magic, name, length and payload. It is XXH3-128 (against accidents), or with a key BLAKE2b-256 (against
writers who do not have the key). The zeros are not verified.
"""

import struct
from hashlib import blake2b, sha256

PAGE = 4096
MAGIC = b"InflKV\x00\x01"  # the last byte is the version of the format
HEADER = struct.Struct("<8s32sQ32s")
_DIGESTED = 48  # the leading bytes of the header that the digest covers


def padded(payload_bytes: int) -> int:
    """The length of the object with a payload of so many bytes."""
    return -(-(HEADER.size + payload_bytes) // PAGE) * PAGE


class TierObject:
    """
    Args:
        root: 32 bytes that stand for all that the payloads have in common: weights, numerics, layout, rank.
        checksum_key: a secret, or None.
    """

    def __init__(self, root: bytes, checksum_key: str | None) -> None:
        assert len(root) == 32
        self._key = b"" if checksum_key is None else blake2b(checksum_key.encode()).digest()
        # Every name depends on the format and the key: engines that differ in these never see each other's objects.
        self._prefix = MAGIC + root + self._digest(b"name")

    def name(self, key: bytes) -> bytes:
        """The object's name, 32 bytes."""
        return sha256(self._prefix + key).digest()

    def seal(self, buffer: memoryview, name: bytes, payload_bytes: int) -> memoryview:
        """Writes the header in front of the payload, which is at `buffer[HEADER.size:]`, and zeros behind it. Returns the
        object."""
        end = HEADER.size + payload_bytes
        length = padded(payload_bytes)
        HEADER.pack_into(buffer, 0, MAGIC, name, payload_bytes, b"")
        HEADER.pack_into(
            buffer, 0, MAGIC, name, payload_bytes, self._digest(buffer[:_DIGESTED], buffer[HEADER.size : end])
        )
        buffer[end:length] = bytes(length - end)
        return buffer[:length]

    def payload(self, buffer: memoryview, name: bytes, length: object) -> memoryview | None:
        """Returns the payload of the object at the beginning of `buffer`, or None if it is not the object `name`, whole and
        undamaged. `length`: the object's length as the tier has returned it."""
        magic, found, payload_bytes, digest = HEADER.unpack_from(buffer)
        if magic != MAGIC or found != name or padded(payload_bytes) != length or padded(payload_bytes) > len(buffer):
            return None
        end = HEADER.size + payload_bytes
        payload = buffer[HEADER.size : end]
        if digest == self._digest(buffer[:_DIGESTED], payload):
            return payload
        return None

    def _digest(self, *parts: bytes | memoryview) -> bytes:
        import xxhash  # optional: a server without tiers has no need of it

        state = blake2b(key=self._key, digest_size=32) if self._key else xxhash.xxh3_128()
        for part in parts:
            state.update(part)
        return state.digest().ljust(32, b"\0")
