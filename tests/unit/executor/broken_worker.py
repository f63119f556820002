"""A worker whose module cannot be imported, as with a missing shared library."""

raise ImportError("libnothing.so is missing")
