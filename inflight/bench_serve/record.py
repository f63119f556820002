"""`RequestRecord`: when a request was sent, when its pieces came, and the latencies that follow."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times are of `time.perf_counter()`. `error` is empty if the request succeeded.

    Attributes:
        sent: when it was sent.
        token_times: when each piece of text came. A piece may hold several tokens.
        ended: when the last byte, or the failure, came.
        num_prompt_tokens, num_output_tokens: as the server counted them; 0 if a failed request has no count.
        queue_time: seconds for which `--max-concurrency` held it back.
        lag: seconds by which the client itself sent it too late.
    """

    sent: float
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    error: str = ""
    queue_time: float = 0.0
    lag: float = 0.0

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Seconds to the first piece of text; if no text came, the latency."""
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None if there is only one token."""
        return (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None
