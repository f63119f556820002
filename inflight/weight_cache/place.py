"""`cache_path`: where packed weights are kept."""

import os
from pathlib import Path


def cache_path() -> Path | None:
    """`inflight/weights` in the user's cache folder; None for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base, "inflight", "weights") if os.path.isabs(base) else None
