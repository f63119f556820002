"""`RequestRecord`: when one request was sent, when the pieces of its answer came, and the latencies that follow from them."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times are values of `time.perf_counter()`. `error` is "" if the request succeeded.

    Attributes:
        sent: when the request was sent.
        token_times: when each piece of text came. A piece may have several tokens.
        ended: when the last byte came, or when the request failed.
        num_prompt_tokens: the server's count. Before the server has sent it, this is the client's own count, or 0 if unknown.
        num_output_tokens: the server's count. It is 0 if the request failed before the server sent it.
        queue_time: seconds for which `--max-concurrency` held the request back.
        lag: seconds from the planned time until the client was ready to send the request.
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
        """Seconds until the first piece of text came. If no text came, this is the latency."""
        return (self.token_times[0] if self.token_times else self.ended) - self.sent

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first token. None if there is at most one token."""
        return (self.latency - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None
