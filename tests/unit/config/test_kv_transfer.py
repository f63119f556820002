"""`kv_transfer_config` and `kv_offloading_size`: vLLM's names, and what is wrong with their values."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config.engine_args import EngineArgs
from inflight.config.kv_tiers import KVTierConfig
from inflight.config.kv_transfer import KVTransferConfig, resolve_kv_transfer
from inflight.errors import ConfigError

GIB = 1 << 30
FS = {"type": "fs", "path": "/mnt/kv"}


def resolved(given: Any = None, **arguments: Any) -> KVTransferConfig | None:
    return resolve_kv_transfer(EngineArgs(model="/nowhere", kv_transfer_config=given, **arguments))


def with_extra(**extra: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": extra}


def test_the_largest_object_of_a_tier() -> None:
    tiers = tuple(KVTierConfig(type="custom", blocks_per_chunk=count) for count in (2, 8, 4))
    assert KVTransferConfig(cpu_bytes=GIB, tiers=tiers).blocks_per_chunk == 8
    assert KVTransferConfig(cpu_bytes=GIB).blocks_per_chunk == 1


def test_without_options_there_are_no_transfers() -> None:
    assert resolved() is None
    assert resolved(kv_offloading_backend="native") is None


def test_host_memory_needs_its_size_alone() -> None:
    plain = KVTransferConfig(cpu_bytes=8 * GIB)
    assert resolved(kv_offloading_size=8) == plain
    assert resolved({}, kv_offloading_size=8.0) == resolved(with_extra(), kv_offloading_size=8) == plain
    assert resolved({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, kv_offloading_size=8) == plain
    assert resolved(with_extra(cpu_bytes_to_use=8 * GIB)) == plain
    assert resolved(kv_offloading_size=0.5) == KVTransferConfig(cpu_bytes=GIB // 2)
    assert (plain.loads, plain.saves, plain.offload_prompt_only, plain.fails_if_not_loaded) == (
        True,
        True,
        False,
        False,
    )


def test_bytes_go_before_gibibytes() -> None:
    config = resolved(with_extra(cpu_bytes_to_use=3e9), kv_offloading_size=8)
    assert config == KVTransferConfig(cpu_bytes=3_000_000_000)
    assert resolved(with_extra(cpu_bytes_to_use=0), kv_offloading_size=8) == KVTransferConfig(cpu_bytes=8 * GIB)


@pytest.mark.parametrize(
    ("role", "loads", "saves"), [("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)]
)
def test_a_role_says_which_way_blocks_go(role: str, loads: bool, saves: bool) -> None:
    config = resolved({"kv_role": role}, kv_offloading_size=1)
    assert config is not None
    assert (config.loads, config.saves) == (loads, saves)


def test_the_other_options() -> None:
    given = {
        "kv_load_failure_policy": "fail",
        **with_extra(cpu_bytes_to_use=GIB, offload_prompt_only=True, eviction_policy="lru", secondary_tiers=[FS]),
    }
    config = resolved(given)
    assert config is not None
    assert not config.uses_arc
    assert resolved(with_extra(cpu_bytes_to_use=1, eviction_policy="arc")) == KVTransferConfig(
        cpu_bytes=1, uses_arc=True
    )
    assert config.fails_if_not_loaded and config.offload_prompt_only and config.ignored == ()
    assert [(tier.type, tier.path) for tier in config.tiers] == [("fs", "/mnt/kv")]


def test_what_has_no_meaning_here_is_named() -> None:
    given = {
        "engine_id": "e1",
        "kv_ip": "127.0.0.1",
        "kv_port": 14579,
        **with_extra(cpu_bytes_to_use=GIB, block_size=256, spec_name="CPUOffloadingSpec", secondary_tiers=[]),
    }
    config = resolved(given)
    assert config is not None
    assert set(config.ignored) == {"engine_id", "kv_ip", "kv_port", "block_size", "spec_name"}
    assert config.tiers == ()


EXTRA = r"kv_transfer_config\.kv_connector_extra_config"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lru", "kv_transfer_config is not a dictionary; give one"),
        ({"kv_conector": "x"}, "kv_transfer_config has no 'kv_conector'; did you mean 'kv_connector'"),
        (
            {"kv_connector": "LMCacheConnectorV1"},
            "kv_connector='LMCacheConnectorV1'.*'OffloadingConnector'.*; give one",
        ),
        ({"kv_role": "both"}, "kv_role='both'.*'kv_both'.*'kv_producer'.*'kv_consumer'.*; give one"),
        ({"kv_load_failure_policy": "retry"}, "kv_load_failure_policy='retry'.*'recompute'.*'fail'.*; give one"),
        ({"kv_connector_extra_config": [1]}, rf"{EXTRA} is a list, not a dictionary; give one"),
        (with_extra(cpu_bytes=1), rf"{EXTRA} has no 'cpu_bytes'; did you mean 'cpu_bytes_to_use'.*; correct it"),
        (with_extra(cpu_bytes_to_use=-1), rf"{EXTRA}: cpu_bytes_to_use=-1.*; give one"),
        (with_extra(cpu_bytes_to_use="8GB"), rf"{EXTRA}: cpu_bytes_to_use='8GB'.*; give one"),
        (with_extra(cpu_bytes_to_use=float("nan")), rf"{EXTRA}: cpu_bytes_to_use=nan.*; give one"),
        (with_extra(eviction_policy="random"), rf"{EXTRA}: eviction_policy='random'.*'lru'.*; give one"),
        (with_extra(offload_prompt_only="yes"), rf"{EXTRA}: offload_prompt_only='yes'.*; give one"),
        (with_extra(secondary_tiers={"type": "fs"}), rf"{EXTRA}\.secondary_tiers is a dict, no list; give a list"),
        (with_extra(secondary_tiers=[FS, "fs"]), rf"{EXTRA}\.secondary_tiers\[1\] is a str, no dictionary; give one"),
        (with_extra(secondary_tiers=[{"type": "fs"}]), rf"{EXTRA}\.secondary_tiers\[0\]: its path is missing"),
        ({}, "kv_transfer_config: no host memory is given; give kv_offloading_size in GiB, or cpu_bytes_to_use"),
        (with_extra(cpu_bytes_to_use=0.5), "kv_transfer_config: no host memory is given; give"),
    ],
)
def test_what_is_wrong(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(given)


@pytest.mark.parametrize("given", [{"kv_offloading_size": 1}, {"kv_transfer_config": with_extra(cpu_bytes_to_use=GIB)}])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"enable_prefix_caching": False},
            "with enable_prefix_caching=False: nothing is cached; leave one of them out",
        ),
        (
            {"distributed_executor_backend": "external_launcher"},
            "with distributed_executor_backend='external_launcher': .*; leave one of them out, or use 'mp'",
        ),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], other: dict[str, Any], message: str) -> None:
    (option,) = given
    with pytest.raises(ConfigError, match=f"^{option} {message}"):
        resolve_kv_transfer(EngineArgs(model="/nowhere", **given, **other))
