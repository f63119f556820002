"""The name of a process, by which all processes of the machine can see whether it still runs."""

import os
from pathlib import Path

_STATE, _START_TIME = 0, 19  # proc(5): places in /proc/PID/stat, behind the process's own name
_ENDED = ("Z", "X")  # states of a process that has ended


def own_name() -> str:
    """The name of this process: no other one has it, not even after a restart of the machine."""
    return _name(os.getpid())


def is_running(name: str) -> bool:
    """Whether the process with this name runs. False for processes of other machines and containers."""
    pid = name.rpartition(":")[2].partition("-")[0]
    try:
        return pid.isdigit() and _name(int(pid)) == name
    except OSError:
        return False


def _name(pid: int) -> str:
    """
    Raises:
        OSError: there is no such process, or it has ended, and only its parent has not asked for its exit code yet.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    if fields[_STATE] in _ENDED:
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{boot}:{namespace}:{pid}-{fields[_START_TIME]}"
