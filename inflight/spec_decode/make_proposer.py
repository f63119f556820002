"""`make_proposer`: the proposer of the configured method."""

from inflight.config.engine import EngineConfig
from inflight.spec_decode.adaptive import AdaptiveProposer
from inflight.spec_decode.ngram import NgramProposer
from inflight.spec_decode.suffix import SuffixProposer

# method of `SpeculativeConfig` -> its proposer. The other methods have a `DraftModel`.
PROPOSERS: dict[str, type[AdaptiveProposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


def make_proposer(config: EngineConfig) -> AdaptiveProposer | None:
    """Returns a new proposer; None if the drafts of the configured method do not come from tokens only."""
    speculative = config.speculative
    if speculative is None or speculative.method not in PROPOSERS:
        return None
    return PROPOSERS[speculative.method](speculative, config.device.kind)
