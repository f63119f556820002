"""Makes the proposer that a configuration asks for."""

from __future__ import annotations

from inflight.config.engine import SpeculativeConfig
from inflight.spec_decode.ngram import NgramProposer
from inflight.spec_decode.proposer import Proposer


def make_proposer(config: SpeculativeConfig) -> Proposer:
    assert config.method == "ngram", f"there is no proposer for the method {config.method!r}"
    return NgramProposer(config)
