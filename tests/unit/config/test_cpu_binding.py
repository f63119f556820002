"""`cpu_binding`: which core each compute thread gets, and what is refused."""

from __future__ import annotations

import pytest

from inflight.config.cpu_binding import cores_of_rank, parse_core_lists
from inflight.errors import ConfigError


def cores(setting: str, usable: list[int], num_threads: int, num_local_ranks: int = 1) -> list[tuple[int, ...] | None]:
    return [
        cores_of_rank(setting, usable=usable, num_threads=num_threads, local_rank=rank, num_local_ranks=num_local_ranks)
        for rank in range(num_local_ranks)
    ]


def test_auto_binds_what_fills_the_cores() -> None:
    assert cores("auto", [2, 3, 5, 7], 4) == [(2, 3, 5, 7)]
    assert cores("auto", [2, 3, 5, 7], 2, 2) == [(2, 3), (5, 7)]
    assert cores("auto", [2, 3, 5], 1, 2) == [(2,), (3,)]  # three cores cannot be split
    assert cores("auto", [2, 3, 5, 7], 3) == cores("auto", [2, 3, 5, 7], 5) == [None]
    assert cores("auto", [2, 3, 5, 7], 1, 2) == [None, None]
    assert cores("auto", [3], 1) == [None]
    assert cores("auto", [2, 3], 1, 3) == [None, None, None]
    assert cores("off", [2, 3], 2) == [None]


def test_lists() -> None:
    assert parse_core_lists("0-3,8", 1) == [(0, 1, 2, 3, 8)]
    assert parse_core_lists("0-3", 2) == [(0, 1), (2, 3)]
    assert parse_core_lists(" 4 , 2 | 0-1 ", 2) == [(4, 2), (0, 1)]
    assert cores("8,3", [3, 8, 9], 2) == [(8, 3)]
    assert parse_core_lists("32767", 1) == [(32767,)]


@pytest.mark.parametrize("setting", ["", "x", "0-", "3-1", "0,,1", "-1", "0-32768", "0-99999", "1-2-3", "0|x"])
def test_what_is_no_list(setting: str) -> None:
    with pytest.raises(ConfigError, match="'auto' nor 'off'"):
        parse_core_lists(setting, 1)


@pytest.mark.parametrize(
    ("setting", "num_threads", "num_ranks", "message"),
    [
        ("0-2", 1, 2, "does not give each of the 2 ranks"),
        ("0-1|2", 2, 2, "does not give each of the 2 ranks"),
        ("0|1", 1, 1, "does not give each of the 1 ranks"),
        ("0,0", 2, 1, "names a core twice"),
        ("0-1|1-2", 2, 2, "names a core twice"),  # two ranks would share it
        ("0-1", 1, 1, "gives a rank 2 cores, but num_threads=1"),
        ("0,6", 2, 1, r"names core 6, where this process may not run; it may run on cores 0, 1, 2, 3$"),
    ],
)
def test_what_does_not_fit(setting: str, num_threads: int, num_ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cores(setting, [0, 1, 2, 3], num_threads, num_ranks)
