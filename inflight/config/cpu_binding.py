"""Reads the option `cpu_threads_bind`: which cores the compute threads of each rank are bound to."""

import re
from collections.abc import Sequence

from inflight.errors import ConfigError

AUTO = "auto"
OFF = "off"
_MAX_CORE = 2**15


def parse_core_lists(setting: str, num_ranks: int) -> list[tuple[int, ...]]:
    """Read a text such as "0-3,8|4-7,9": one list of cores for each of the `num_ranks` ranks of a node.

    If the text has only one list, its cores are split among the ranks.

    Raises:
        ConfigError: the text is malformed, names a core twice, or does not give every rank equally many cores.
    """
    lists = [_parse_cores(setting, text) for text in setting.split("|")]
    if len(lists) == 1 and len(lists[0]) % num_ranks == 0:
        size = len(lists[0]) // num_ranks
        lists = [lists[0][rank * size : (rank + 1) * size] for rank in range(num_ranks)]
    if len(lists) != num_ranks or len({len(cores) for cores in lists}) > 1:
        raise ConfigError(
            f"cpu_threads_bind={setting!r} does not give each of the {num_ranks} ranks of a node equally many cores; "
            "give each rank a list of the same length, with '|' between the lists, or give 'auto'"
        )
    cores = [core for found in lists for core in found]
    if len(set(cores)) < len(cores):
        raise ConfigError(f"cpu_threads_bind={setting!r} names a core twice: each compute thread needs its own core")
    return lists


def cores_of_rank(
    setting: str, *, usable: Sequence[int], num_threads: int, local_rank: int, num_local_ranks: int
) -> tuple[int, ...] | None:
    """The core of each of the rank's `num_threads` threads; None if the threads are not bound.

    "auto" binds the threads if there are at least two usable cores, and each rank's even share of them, rounded down, is
    exactly `num_threads`. If there are fewer threads, other programs probably use the remaining cores, and the operating system
    knows better which cores are free.

    Args:
        setting: "auto", "off" or lists of cores for `parse_core_lists`.
        usable: the cores that this process may run on, ascending.

    Raises:
        ConfigError: a core is not usable, or the number of cores is not the number of threads.
    """
    if setting == OFF:
        return None
    if setting == AUTO:
        if len(usable) == 1 or len(usable) // num_local_ranks != num_threads:
            return None
        return tuple(usable[local_rank * num_threads : (local_rank + 1) * num_threads])
    cores = parse_core_lists(setting, num_local_ranks)[local_rank]
    if len(cores) != num_threads:
        raise ConfigError(
            f"cpu_threads_bind={setting!r} gives a rank {len(cores)} cores, but num_threads={num_threads}; leave num_threads "
            "out, or make the two numbers equal"
        )
    if missing := [core for core in cores if core not in usable]:
        raise ConfigError(
            f"cpu_threads_bind={setting!r} names {_list(missing)}, where this process may not run; it may run on "
            f"{_list(usable)}"
        )
    return cores


def _parse_cores(setting: str, text: str) -> tuple[int, ...]:
    cores: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < _MAX_CORE:
            raise ConfigError(
                f"cpu_threads_bind={setting!r} is neither 'auto' nor 'off' nor a list of cores like '0-3,8', "
                "with '|' between the lists of several ranks"
            )
        cores += range(first, last + 1)
    return tuple(cores)


def _list(cores: Sequence[int]) -> str:
    return f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, cores))}"
