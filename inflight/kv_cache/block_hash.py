"""Names of full KV blocks: the SHA-256 of everything that determines the content of a block.

    root   = SHA-256(model fingerprint, cache_salt)
    key(i) = SHA-256(key(i - 1), tokens of block i, contents of block i)         key(-1) = root

Contents are what some tokens stand for, such as images. Of each one that has tokens in the block, the name tells the digest,
and where it begins, counted from the block's first token. Most blocks have none.

The digest is not shortened, so two different contents never have the same name.
"""

import hashlib
from typing import NamedTuple

from inflight.interface.parts import Content, contents_of_block
from inflight.interface.request import Int32Array

NAME_BYTES = 32


class Root(NamedTuple):
    """What the names of all blocks of a sequence depend on, beside its tokens. `name`: the root of the chain."""

    name: bytes
    contents: tuple[Content, ...] = ()


class BlockHasher:
    """Computes the names of a sequence's blocks, for one model and one block size."""

    def __init__(self, fingerprint: str, block_size: int) -> None:
        self._fingerprint = fingerprint.encode()
        self.block_size = block_size

    def root(self, cache_salt: str, contents: tuple[Content, ...] = ()) -> Root:
        salt = cache_salt.encode()
        name = hashlib.sha256(len(self._fingerprint).to_bytes(8, "little") + self._fingerprint + salt).digest()
        return Root(name, contents)

    def names(self, cache_salt: str, token_ids: Int32Array, contents: tuple[Content, ...] = ()) -> bytes:
        """Returns the names, one after another, of all blocks of a prompt that a request can take from a cache. The block with
        the last token is not one of them, because the last token is always computed."""
        hashes: list[bytes] = []
        self.extend(self.root(cache_salt, contents), hashes, token_ids, max(0, len(token_ids) - 1) // self.block_size)
        return b"".join(hashes)

    def extend(
        self, root: Root, hashes: list[bytes], token_ids: Int32Array, num_blocks: int, *, first_token: int = 0
    ) -> None:
        """Append names to `hashes` until it has `num_blocks` names. `token_ids` are the tokens from position `first_token` on,
        at least all those of blocks without names."""
        if num_blocks <= len(hashes):
            return
        size = self.block_size
        start, end = len(hashes) * size - first_token, num_blocks * size - first_token
        assert start >= 0 and end <= len(token_ids), (first_token, len(token_ids), num_blocks)
        name = hashes[-1] if hashes else root.name
        data, num_bytes = token_ids[start:end].tobytes(), size * token_ids.itemsize
        for first in range(0, len(data), num_bytes):
            told = contents_of_block(root.contents, len(hashes) * size, size) if root.contents else b""
            name = hashlib.sha256(name + data[first : first + num_bytes] + told).digest()
            hashes.append(name)
