"""Reads environment variables. Each variable has a function that reads it at every call, so later changes take effect."""

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from inflight.errors import ConfigError

# Variables that hold API keys: the first one with a value is read. They are not passed on to the processes that the server
# starts.
API_KEY_VARIABLES = ("INFLIGHT_SERVE_API_KEY", "INFLIGHT_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "INFLIGHT_SERVE_ADMIN_API_KEY"

# All variables except the options of `inflight serve`, whose names begin with INFLIGHT_SERVE_.
NAMES = frozenset(
    """
    INFLIGHT_API_KEY INFLIGHT_CLUSTER_TOKEN INFLIGHT_CPU_KERNELS INFLIGHT_CPU_THREADS_BIND
    INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS INFLIGHT_LOG_FORMAT INFLIGHT_LOG_LEVEL
    INFLIGHT_REQUIRE_KERNELS INFLIGHT_WEIGHT_CACHE
    """.split()
)
_PREFIX = "INFLIGHT_"
_OF_TESTS = "INFLIGHT_TEST_"
# If a Kubernetes Service is named "inflight", Kubernetes sets variables such as INFLIGHT_SERVICE_HOST in each pod. This matches
# their names after INFLIGHT_: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_KUBERNETES = re.compile(r"PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?|SERVICE_(HOST|PORT(_\w+)?)")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://\S+")


def kubernetes_variables(environment: Mapping[str, str], prefix: str = _PREFIX) -> list[str]:
    """Returns the variables in `environment` that begin with `prefix` and were set by Kubernetes, not by the user."""
    return [
        name
        for name, value in environment.items()
        if name.startswith(prefix)
        and _KUBERNETES.fullmatch(name.removeprefix(prefix))
        and (name != f"{prefix}PORT" or _KUBERNETES_PORT.fullmatch(value))
    ]


def unknown_variables(environment: Mapping[str, str], known: Collection[str], prefix: str = _PREFIX) -> Iterator[str]:
    """Yields a warning for each variable in `environment` that begins with `prefix` and is not in `known`. Its name may be
    misspelt. Variables of Kubernetes and of tests are left out."""
    # Names are compared without the prefix, because the prefix makes all names similar.
    rests = {name.removeprefix(prefix): name for name in known}
    for name in sorted(environment.keys() - set(known) - set(kubernetes_variables(environment, prefix))):
        if name.startswith(prefix) and not name.startswith(_OF_TESTS):
            near = difflib.get_close_matches(name.removeprefix(prefix), rests, n=1)
            hint = f"; did you mean {rests[near[0]]}?" if near else ""
            yield f"{name} is not a variable of Inflight; it is ignored{hint}"


def execute_model_timeout_seconds() -> float:
    """How many seconds one step may take: `INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS`. If it is not set, vLLM's variable of the
    same meaning; if that is not set either, 60."""
    return _seconds("INFLIGHT_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", default=60.0)


def image_fetch_timeout_seconds() -> float:
    """How many seconds the fetch of an image may take: `INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS`; by default 5."""
    return _seconds("INFLIGHT_IMAGE_FETCH_TIMEOUT_SECONDS", default=5.0)


def _seconds(*names: str, default: float) -> float:
    """The value of the first variable that is set."""
    for name in names:
        text = os.environ.get(name)
        if text is None:
            continue
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ConfigError(f"{name}={text!r} is not a positive number of seconds")
        return seconds
    return default


def cluster_token() -> str:
    """`INFLIGHT_CLUSTER_TOKEN`: the secret that the nodes of one engine share.

    Raises:
        ConfigError: the variable is not set. There is no default, because whoever knows the token can run code on the nodes.
    """
    token = os.environ.get("INFLIGHT_CLUSTER_TOKEN", "")
    if not token:
        raise ConfigError(
            "several nodes need a shared secret: set INFLIGHT_CLUSTER_TOKEN to the same long random text on every node"
        )
    return token


class LaunchedRank(NamedTuple):
    """What torchrun tells a process about its own rank and the other ranks."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    attempt: str  # how many times torchrun has restarted all ranks
    agent_serves_store: bool  # whether torchrun itself listens at the master address; otherwise rank 0 does
    local_ranks: range  # the ranks on this machine; only this rank if torchrun does not tell which others there are


def launched_rank() -> LaunchedRank:
    """Reads the variables that torchrun sets: `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and others.

    Raises:
        ConfigError: one of the four named variables is missing or wrong.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(
            f"distributed_executor_backend='external_launcher' needs a launcher that sets {', '.join(missing)}: "
            "start the script as `torchrun --nproc-per-node N script.py`"
        )
    rank, world_size, port = _integer("RANK"), _integer("WORLD_SIZE"), _integer("MASTER_PORT")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not in [0, WORLD_SIZE={world_size})")
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port} is not a port")
    tells_machine = bool(os.environ.get("LOCAL_RANK") and os.environ.get("LOCAL_WORLD_SIZE"))
    first = rank - (_integer("LOCAL_RANK") if tells_machine else 0)
    return LaunchedRank(
        rank=rank,
        world_size=world_size,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=port,
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        agent_serves_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        local_ranks=range(first, first + (_integer("LOCAL_WORLD_SIZE") if tells_machine else 1)),
    )


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not an integer") from None


def log_level(default: str = "WARNING") -> str:
    """`INFLIGHT_LOG_LEVEL`: DEBUG, INFO, WARNING or ERROR."""
    level = os.environ.get("INFLIGHT_LOG_LEVEL", default).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"INFLIGHT_LOG_LEVEL={level!r} is not one of DEBUG, INFO, WARNING, ERROR")
    return level


def log_format() -> str:
    """`INFLIGHT_LOG_FORMAT`: "text" (the default), or "json" for a JSON object on each line of the log."""
    name = os.environ.get("INFLIGHT_LOG_FORMAT") or "text"
    if name not in ("text", "json"):
        raise ConfigError(f"INFLIGHT_LOG_FORMAT={name!r} is not one of text, json")
    return name


def cpu_kernels() -> str:
    """`INFLIGHT_CPU_KERNELS`: "auto" (the default), "off" for plain torch, or the instruction set of the C++ kernels."""
    return os.environ.get("INFLIGHT_CPU_KERNELS", "auto")


def weight_cache() -> bool:
    """`INFLIGHT_WEIGHT_CACHE`: "off" if packed weights are neither read from the disk nor written to it; "on" by default."""
    name = os.environ.get("INFLIGHT_WEIGHT_CACHE") or "on"
    if name not in ("on", "off"):
        raise ConfigError(f"INFLIGHT_WEIGHT_CACHE={name!r} is not one of on, off")
    return name == "on"


def cpu_threads_bind() -> str:
    """`INFLIGHT_CPU_THREADS_BIND`: the cores of the compute threads, for an engine without the option `cpu_threads_bind`.
    If the variable is not set, "auto"."""
    return os.environ.get("INFLIGHT_CPU_THREADS_BIND") or "auto"


def require_kernels() -> bool:
    """`INFLIGHT_REQUIRE_KERNELS=1`: it is an error if the C++ kernels cannot be built (in an install) or used (at run time)."""
    return os.environ.get("INFLIGHT_REQUIRE_KERNELS") == "1"
