"""Starts a process that outlives its parent: `python -m inflight.processes.detached MODULE ARGUMENT ...`

The new process has a session of its own, and init as its parent. So it ends only by itself, for example when its stream has
ended. This program prints the id of the new process, and ends. `MODULE` runs in the new process as by `python -m`.
"""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    _, module, *arguments = sys.argv
    if pid := os.fork():
        os.write(1, str(pid).encode())
        os._exit(0)
    os.setsid()
    os.dup2(2, 1)  # the reader of the id reads until nobody has this pipe open
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
