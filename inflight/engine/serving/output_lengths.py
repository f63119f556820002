"""`OutputLengths`: how many tokens a sequence is expected to have, from the sequences that have ended.

A sequence that decodes takes part in as many steps as it has tokens, and in each of them it costs about what a token of a
prompt costs. So this number makes the work of sequences comparable with that of prompts.
"""

from inflight.engine.request.processed import ProcessedRequest

FIRST_LENGTH = 256  # before a sequence has ended
WEIGHT = 1 / 32  # of the newest sequence in the mean


class OutputLengths:
    """
    Attributes:
        mean: the mean length of the last sequences.
    """

    def __init__(self) -> None:
        self.mean = float(FIRST_LENGTH)

    def ended(self, num_tokens: int) -> None:
        """Count a sequence that has ended."""
        self.mean += WEIGHT * (num_tokens - self.mean)

    def work_of(self, request: ProcessedRequest) -> int:
        """Returns how many tokens all sequences of the request together are expected to have. At least one for each."""
        params = request.params
        total = 0.0
        for sequence in request.sequences:
            most = sequence.sampling.max_tokens
            expected = most if params.ignore_eos else min(most, max(self.mean, params.min_tokens))
            total += max(expected - len(sequence.emitted_token_ids), 1)
        return int(total)
