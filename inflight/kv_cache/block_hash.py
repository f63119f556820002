"""Names of full KV blocks: the SHA-256 of everything that determines the content of a block.

    root   = SHA-256(model fingerprint, cache_salt)
    key(i) = SHA-256(key(i - 1), tokens of block i)         key(-1) = root

The digest is not shortened, so two different contents never have the same name.
"""

from __future__ import annotations

import hashlib

from inflight.interface.request import Int32Array


class BlockHasher:
    """Computes the names of a sequence's blocks, for one model and one block size."""

    def __init__(self, fingerprint: str, block_size: int) -> None:
        self._fingerprint = fingerprint.encode()
        self.block_size = block_size

    def root(self, cache_salt: str) -> bytes:
        salt = cache_salt.encode()
        return hashlib.sha256(len(self._fingerprint).to_bytes(8, "little") + self._fingerprint + salt).digest()

    def extend(self, root: bytes, hashes: list[bytes], token_ids: Int32Array, num_blocks: int) -> None:
        """Append names to `hashes` until it has `num_blocks` names. `token_ids` must contain at least that many full blocks."""
        size = self.block_size
        assert len(token_ids) >= num_blocks * size, (len(token_ids), num_blocks)
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else root
            hashes.append(hashlib.sha256(parent + token_ids[i * size : (i + 1) * size].tobytes()).digest())
