"""`replica_conflicts`: which options about replicas contradict each other."""

from collections.abc import Iterator

MAX_LOCAL_REPLICAS = 64


def replica_conflicts(
    *,
    size: int,
    rank: int | None,
    local: int | None,
    start: int,
    is_hybrid: bool,
    is_external: bool,
    replicas: range,
    served: range,
) -> Iterator[str]:
    """What contradicts each other in the options `data_parallel_*`. `replicas`, `served`: see `EngineArgs`."""
    place = f"data_parallel_start_rank={start}" if start else f"data_parallel_size_local={local}"
    if rank is not None and (is_hybrid or start or local not in (None, 1)):
        other = "data_parallel_hybrid_lb=True" if is_hybrid else place
        yield f"data_parallel_rank={rank} with {other}: a server with a rank has one replica; leave one of them out"
    elif is_external and is_hybrid:
        yield (
            "data_parallel_external_lb=True with data_parallel_hybrid_lb=True: each server has one replica, or several; "
            "leave one of them out"
        )
    elif rank is None and is_external:
        yield "data_parallel_external_lb=True: give data_parallel_rank, the number of this server's replica"
    elif is_hybrid and local is None:
        yield "data_parallel_hybrid_lb=True: give data_parallel_size_local, how many replicas this server has"
    elif replicas.stop > size:
        given = place if rank is None else f"data_parallel_rank={rank}"
        yield (
            f"{given}: this machine's last replica would have number {replicas.stop - 1}, but "
            f"data_parallel_size={size} allows 0 to {size - 1}; lower it, or raise data_parallel_size"
        )
    elif rank is None and not is_hybrid and served != range(size):
        yield (
            f"{place} without data_parallel_hybrid_lb: no other server has the remaining replicas; give "
            f"data_parallel_hybrid_lb or data_parallel_address, or leave {place.partition('=')[0]} out"
        )
    elif len(served) > MAX_LOCAL_REPLICAS:
        yield f"data_parallel_size={size}: one server has at most {MAX_LOCAL_REPLICAS} replicas; lower it"
