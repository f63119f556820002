"""Inflight beside other engines, in turns: `python -m benchmarks.compare`."""
