"""The commands behind docs/benchmarks.md. Each is `python -m benchmarks.NAME`, prints JSON lines and a small table.

A room is a folder for one question, which its `__init__.py` asks. Three rooms are commands: `compare`, `gpu`, `kv_tiers`.
"""

ROOMS = ("overhead", "overlap", "quality", "robustness", "serving", "shared", "speed")

# A command keeps its short name in whichever room its file is: `python -m benchmarks.latency` runs serving/latency.py. Imports
# and strings take the full name (`benchmarks.serving.latency`), or a file would be loaded twice, with two of each class.
__path__.extend([f"{__path__[0]}/{room}" for room in ROOMS])
