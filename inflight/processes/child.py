"""The first thing that each process of ours runs: `python -m inflight.processes.child PARENT_PID MODULE ARGUMENT ...`

It asks the kernel to kill this process when the thread that started it ends. This is done before the imports of `MODULE`, which
may take seconds, and it holds for a stopped process, too. So no process is left without the one that owns it, whatever it does
at that moment. With 0 in place of the parent's id the process outlives its parent. Then `MODULE` runs as by `python -m`.
"""

import runpy
import sys

from inflight.processes.parent import die_with_parent, outlive_parent


def main() -> None:
    _, parent, module, *arguments = sys.argv
    if parent == "0":
        outlive_parent()
    else:
        die_with_parent(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
