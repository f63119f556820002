"""`TwoMachines`: an engine on two machines, which are network namespaces of this one, joined by a pair of veth devices.

    this process ── 10.77.N.1 ══ 10.77.N.2 ── machine "a": inflight serve, node 0
                                              10.78.0.1 ══ 10.78.0.2 ── machine "b": inflight worker, node 1

Or machine "b" runs another replica: inflight serve --headless.

HTTP goes over the first pair of devices, and the ranks talk over the second pair. So a broken link between the machines does
not touch the clients. Only root can make network namespaces.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.robustness.fault_server import END_SECONDS, FaultServer

MASTER_ADDRESS, WORKER_ADDRESS = "10.78.0.1", "10.78.0.2"
_WRONG_HARDWARE_ADDRESS = "02:00:00:00:77:77"
_COMMAND = "from inflight.entrypoints.cli.main import main; main()"
_TOKEN = {"INFLIGHT_CLUSTER_TOKEN": "a token of this test"}


def why_not() -> str:
    """Returns why this machine cannot run these tests, or "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"inflight-try-{os.getpid()}"
    try:
        added = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
        device = ["ip", "-n", name, "link", "add", "try0", "type", "veth", "peer", "name", "try1"]
        made = subprocess.run(device, capture_output=True, text=True) if added.returncode == 0 else added
    except FileNotFoundError:
        return "the command ip (iproute2) is not installed"
    if added.returncode == 0:
        _ip("netns", "delete", name)
    return "" if made.returncode == 0 else f"network namespaces cannot be made: {made.stderr.strip()}"


@dataclass(frozen=True)
class TwoMachines:
    """Both machines run, and the server is ready.

    Attributes:
        suffix: of the names of both namespaces and of all devices.
    """

    server: FaultServer
    worker: subprocess.Popen[bytes]
    suffix: str

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """Meanwhile the device of machine "b" is down, as if its cable were cut."""
        _ip("-n", f"b{self.suffix}", "link", "set", f"ab1{self.suffix}", "down")
        try:
            yield
        finally:
            _ip("-n", f"b{self.suffix}", "link", "set", f"ab1{self.suffix}", "up")

    @contextlib.contextmanager
    def blackhole(self, sender: str) -> Iterator[None]:
        """Meanwhile all packets from machine `sender` ("a" or "b") to the other one are lost, and those to it arrive.

        The packets are sent to a hardware address that nobody has, so no sender gets an error, and no kernel module is needed.
        """
        device = f"ab{'ab'.index(sender)}{self.suffix}"
        other = WORKER_ADDRESS if sender == "a" else MASTER_ADDRESS
        neighbour = ["neighbour", "replace", other, "dev", device, "nud", "permanent", "lladdr"]
        _ip("-n", f"{sender}{self.suffix}", *neighbour, _WRONG_HARDWARE_ADDRESS)
        try:
            yield
        finally:
            _ip("-n", f"{sender}{self.suffix}", "neighbour", "delete", other, "dev", device)


_NUMBERS = itertools.count()


@contextlib.contextmanager
def two_machines(*options: str, replicas: bool = False) -> Iterator[TwoMachines]:
    """Args:
    options: further options of `inflight serve`; the ranks are two tensor-parallel ones, one on each machine.
    replicas: instead of the ranks, each machine has a replica.
    """
    number = next(_NUMBERS) % 8  # the pairs of other modules may still be there
    suffix = str((8 * os.getpid() + number) % 100_000)
    client_address, server_address = (f"10.{77 + number}.{os.getpid() % 256}.{host}" for host in (1, 2))
    with contextlib.ExitStack() as stack:
        for machine in "ab":
            _ip("netns", "add", f"{machine}{suffix}")
            stack.callback(_ip, "netns", "delete", f"{machine}{suffix}")
            _ip("-n", f"{machine}{suffix}", "link", "set", "lo", "up")
        _ip("link", "add", f"http0{suffix}", "type", "veth", "peer", "name", f"http1{suffix}", "netns", f"a{suffix}")
        _ip("address", "add", f"{client_address}/24", "dev", f"http0{suffix}")
        _ip("link", "set", f"http0{suffix}", "up")
        _ip(
            "-n",
            f"a{suffix}",
            "link",
            "add",
            f"ab0{suffix}",
            "type",
            "veth",
            "peer",
            f"ab1{suffix}",
            "netns",
            f"b{suffix}",
        )
        places = {f"http1{suffix}": ("a", server_address), f"ab0{suffix}": ("a", MASTER_ADDRESS)}
        for device, (machine, address) in {**places, f"ab1{suffix}": ("b", WORKER_ADDRESS)}.items():
            _ip("-n", f"{machine}{suffix}", "address", "add", f"{address}/24", "dev", device)
            _ip("-n", f"{machine}{suffix}", "link", "set", device, "up")
        sizes = ["-tp", "2", "--nnodes", "2", "--master-address", MASTER_ADDRESS]
        command = ["worker", "--node-rank", "1", *sizes]
        if replicas:
            sizes = ["-dp", "2", "-dpl", "1", "--data-parallel-address", MASTER_ADDRESS]
            command = ["serve", "--headless", "--dtype", "float32", "-dpr", "1", *sizes, *options]
        inside = ["ip", "netns", "exec"]
        worker = subprocess.Popen(
            [*inside, f"b{suffix}", sys.executable, "-c", _COMMAND, *command],
            env={**os.environ, **_TOKEN, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        stack.callback(_end, worker)
        prefix = [*inside, f"a{suffix}"]
        arguments = [*sizes, "--allowed-hosts", "*", *options]
        server = FaultServer({"dtype": "float32"}, _TOKEN, arguments=arguments, prefix=prefix, host=server_address)
        stack.enter_context(server)
        yield TwoMachines(server, worker, suffix)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
