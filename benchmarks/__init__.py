"""The commands behind docs/benchmarks.md. Each is `python -m benchmarks.NAME`, prints JSON lines and a small table."""
