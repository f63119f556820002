"""The socket that is listened on: whose file it is, and what is said when it cannot be had."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from inflight.entrypoints.serve.listener import Listener
from inflight.entrypoints.serve.settings import ServerSettings
from inflight.errors import ConfigError


def listen(**settings: object) -> Listener:
    return Listener(ServerSettings(max_connections=1, **settings))  # type: ignore[arg-type]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(os.fspath(path)) == 0


def test_the_file_of_a_socket_goes_with_its_listener(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = listen(uds=str(path))
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert listener.port is None
    assert answers(path)
    listener.close()
    assert not path.exists()
    listener.close()


def test_the_file_of_another_server_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = listen(uds=str(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(os.fspath(path))
        other.listen()
        listener.close()
        assert answers(path), "another server has put its own there"


def test_a_file_that_nobody_listens_on_is_replaced_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    listener = listen(uds=str(path))
    with pytest.raises(ConfigError, match=r"uds=.*in use"):
        listen(uds=str(path))
    assert answers(path), "the first one goes on"
    listener.close()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="uds="):
        listen(uds=str(path))
    assert path.read_text() == "mine"


def test_the_kernel_chooses_a_port_and_a_taken_one_is_told() -> None:
    listener = listen(port=0)
    try:
        assert listener.port is not None
        assert listener.socket.proto == socket.IPPROTO_TCP, "else asyncio delays the last bytes of answers by 40 ms"
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{listener.port}: .*in use"):
            listen(port=listener.port)
    finally:
        listener.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_this_machines_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {host}:0"):
        listen(host=host, port=0)


def test_ipv6_is_listened_on() -> None:
    try:
        listener = listen(host="::1", port=0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert listener.socket.family is socket.AF_INET6
    listener.close()
