"""The link of drawn tokens: an error of a send is not lost. Order and waits are tested in test_stage_link.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.distributed.channel import Channel
from inflight.distributed.token_link import TokenSender


class BrokenChannel(Channel):
    def send(self, tensor: Tensor) -> None:
        raise ConnectionError("the other end is gone")

    def receive(self, tensor: Tensor) -> None:
        raise AssertionError("the last stage receives no tokens")

    def close(self) -> None:
        pass


def test_the_send_after_a_failed_one_raises() -> None:
    sender = TokenSender(BrokenChannel())
    tokens = torch.zeros(1, 1, dtype=torch.int32)
    sender.send(tokens)  # it fails in its thread
    assert sender._sent is not None
    assert isinstance(sender._sent.exception(timeout=300), ConnectionError)
    with pytest.raises(ConnectionError, match="the other end is gone"):
        sender.send(tokens)
    sender.close()
