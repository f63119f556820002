"""`RequestBlocks`: the block tables of one request."""

from dataclasses import dataclass, field

from inflight.kv_cache.block_hash import Root


@dataclass(slots=True)
class RequestBlocks:
    """The block tables of one request (one per KV group, equally long), and the names of its full blocks."""

    tables: tuple[list[int], ...]
    root: Root
    num_prompt_blocks: int = 0  # full blocks of the prompt without its last token
    hashes: list[bytes] = field(default_factory=list)  # names of the first blocks; more are computed when needed
    num_committed: int = 0  # blocks [0, num_committed) are full, computed, and processed by `commit`
    may_be_named: bool = True  # False: the blocks depend on tokens from before `reset_prefix_cache`
    num_found: int = 0  # the tables began with this many blocks from the cache or from a leader
    # after so many blocks there is one snapshot more: `name_last_state` made it, or a fetch wants it
    num_before_last_state: int = 0
    num_shared: int = -1  # the prompt parts from earlier ones after so many blocks (`Partings`); -1: not looked for
    were_sought: bool = False  # whether `KVTransfers` has looked for them since the request last began to wait
