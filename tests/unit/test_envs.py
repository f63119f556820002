"""Environment variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight import envs
from inflight.errors import ConfigError


def test_the_step_budget_and_its_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, alias = "INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    for name in (ours, alias):
        monkeypatch.delenv(name, raising=False)
    assert envs.execute_model_timeout_seconds() == 60.0
    monkeypatch.setenv(alias, "7")
    assert envs.execute_model_timeout_seconds() == 7.0
    monkeypatch.setenv(ours, "2.5")
    assert envs.execute_model_timeout_seconds() == 2.5
    for bad in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv(ours, bad)
        with pytest.raises(ConfigError, match=ours):
            envs.execute_model_timeout_seconds()


def test_the_cluster_token_has_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "secret")
    assert envs.cluster_token() == "secret"
    monkeypatch.setenv("INFLIGHT_CLUSTER_TOKEN", "")
    with pytest.raises(ConfigError, match="set INFLIGHT_CLUSTER_TOKEN"):
        envs.cluster_token()
    monkeypatch.delenv("INFLIGHT_CLUSTER_TOKEN")
    with pytest.raises(ConfigError, match="set INFLIGHT_CLUSTER_TOKEN"):
        envs.cluster_token()


def test_what_a_launcher_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    me = envs.LaunchedRank(1, 4, "node0", 29500, "0", agent_serves_store=False, local_ranks=range(1, 2))
    assert envs.launched_rank() == me
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "3")
        patch.setenv("LOCAL_RANK", "1")
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert envs.launched_rank().local_ranks == range(2, 4)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert envs.launched_rank().agent_serves_store
    for name, least, most in (("RANK", "0", "3"), ("MASTER_PORT", "1", "65535")):
        for text in (least, most):
            with monkeypatch.context() as patch:
                patch.setenv(name, text)
                me = envs.launched_rank()
                assert text == str(me.rank if name == "RANK" else me.master_port)
    wrong = [("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "65536"), ("MASTER_PORT", "0")]
    for name, bad in wrong:
        with monkeypatch.context() as patch:
            patch.setenv(name, bad)
            with pytest.raises(ConfigError, match=name):
                envs.launched_rank()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .*torchrun"):
        envs.launched_rank()


def test_the_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_LOG_LEVEL", "debug")
    assert envs.log_level() == "DEBUG"
    monkeypatch.setenv("INFLIGHT_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOUD"):
        envs.log_level()


def test_every_variable_that_is_read_is_known() -> None:
    source = Path(envs.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r"environ(?:\.get)?[\[(]\"(INFLIGHT_\w+)", source)) | {
        "INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS"
    }
    assert {"INFLIGHT_LOG_LEVEL", "INFLIGHT_CPU_KERNELS"} <= read
    assert read <= envs.NAMES


def test_variables_that_nothing_reads_are_told_with_the_nearest_name() -> None:
    given = {
        "INFLIGHT_LOG_LEVL": "",
        "INFLIGHT_ZZZ": "",
        "INFLIGHT_LOG_LEVEL": "",
        "INFLIGHT_TEST_FULL": "",
        "INFLIGHT_TEST_FULL_GPU": "",
        "PATH": "",
    }
    kubernetes = {
        "INFLIGHT_PORT": "tcp://10.0.0.1:80",
        "INFLIGHT_SERVICE_HOST": "x",
        "INFLIGHT_PORT_80_TCP_PROTO": "tcp",
    }
    near, far = envs.unknown_variables({**given, **kubernetes}, envs.NAMES)
    assert near.startswith("INFLIGHT_LOG_LEVL is not a variable")
    assert near.endswith("did you mean INFLIGHT_LOG_LEVEL?")
    assert far == "INFLIGHT_ZZZ is not a variable of Inflight; it is ignored"
    assert envs.kubernetes_variables({**given, **kubernetes}) == list(kubernetes)
    assert envs.kubernetes_variables({"INFLIGHT_PORT": "80"}) == [], "this is a user's"


def test_what_holds_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.NAMES:
        monkeypatch.delenv(name, raising=False)
    assert (envs.log_level(), envs.log_level("info")) == ("WARNING", "INFO")
    assert (envs.cpu_kernels(), envs.cpu_threads_bind(), envs.require_kernels()) == ("auto", "auto", False)
    monkeypatch.setenv("INFLIGHT_CPU_THREADS_BIND", "")
    assert envs.cpu_threads_bind() == "auto"


def test_variables_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFLIGHT_CPU_THREADS_BIND", "0-3")
    monkeypatch.setenv("INFLIGHT_CPU_KERNELS", "avx2")
    assert (envs.cpu_threads_bind(), envs.cpu_kernels()) == ("0-3", "avx2")
    for text, is_required in (("1", True), ("0", False), ("yes", False)):
        monkeypatch.setenv("INFLIGHT_REQUIRE_KERNELS", text)
        assert envs.require_kernels() == is_required


def test_a_wrong_budget_names_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS", raising=False)
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ConfigError, match=r"^VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS='soon'"):
        envs.execute_model_timeout_seconds()


def test_a_launcher_that_tells_only_half_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "LOCAL_RANK": "1"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    me = envs.launched_rank()
    assert (me.local_ranks, me.attempt) == (range(2, 3), "3")


@pytest.mark.parametrize(
    ("name", "value", "is_of_kubernetes"),
    [
        ("SERVICE_PORT", "80", True),
        ("SERVICE_PORT_HTTP", "80", True),
        ("PORT_80_TCP", "tcp://10.0.0.1:80", True),
        ("PORT_80_UDP_ADDR", "10.0.0.1", True),
        ("PORT", "udp://10.0.0.1:80", True),
        ("PORT", "80", False),
        ("PORT_80", "x", False),
        ("SERVICE_NAME", "x", False),
        ("XPORT", "tcp://10.0.0.1:80", False),
    ],
)
def test_variables_of_a_service_of_this_name(name: str, value: str, is_of_kubernetes: bool) -> None:
    of_ours, of_others = f"INFLIGHT_{name}", f"OTHER_{name}"
    found = envs.kubernetes_variables({of_ours: value, of_others: value})
    assert found == ([of_ours] if is_of_kubernetes else [])
    assert envs.kubernetes_variables({of_others: value}, "OTHER_") == ([of_others] if is_of_kubernetes else [])
