"""The paths by which operators see how a server is: without a key, by any name of the host, and without a line in the log."""

from __future__ import annotations

PROBES = frozenset({"/health", "/live", "/ping", "/ready"})
