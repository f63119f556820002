"""`GrammarPace`: keeps grammars that need much time for each token from slowing all other requests down.

Most grammars need microseconds for a token. An ambiguous one, such as `s ::= s s | "a"`, needs ever more as its text grows:
tenths of a second after some hundred tokens. The engine makes no step meanwhile.

1. A request is slow if its grammar needed more than `SLOW_SECONDS` in one call.
2. After each token of slow requests, all of them are left out of the plans for `REST` times as long as the token took, if
   other requests run. So the others keep most of the time.
3. A plan has only so many slow requests that they need `MAX_TOKEN_SECONDS` together, but one in any case. Those that have
   waited longest come first.
4. A slow request fails if `MAX_SLOW_TOKENS` of its tokens, one after the other, need more than `MAX_TOKEN_SECONDS` of processor
   time each, or its slow tokens together need more than `MAX_TOTAL_SECONDS`. A single token may take long, such as the first
   of a large grammar, for which the library builds its states.

A busy machine can make a request slow for a token, because only the processor time of slow requests is measured, which
takes a microsecond. It cannot make a request fail.
"""

import math
import time
from collections.abc import Collection

SLOW_SECONDS = 0.005
REST = 6.0
MAX_TOKEN_SECONDS = 0.15
MAX_SLOW_TOKENS = 4
MAX_TOTAL_SECONDS = 10.0
TOO_SLOW = "it needs too much time for each token: make it less ambiguous, so that a text can be read in fewer ways"


class _Slow:
    """A slow request.

    Attributes:
        seconds: what its last token took, as far as it was measured.
        token_seconds: what the present token has taken so far.
        total_seconds: what all its tokens have taken since the request is slow.
        num_too_slow: how many of its last tokens took more than `MAX_TOKEN_SECONDS`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self.token_seconds = self.total_seconds = seconds
        self.num_too_slow = 0


class GrammarPace:
    """Used on the engine's thread.

    Args:
        is_on: False if other engines must make the same plans. Then no request is slow.

    Attributes:
        slow_seconds: how many seconds a call may take, or the request is slow.
        slow: the slow requests by their ids. The one that has waited longest for a token comes first.
        watched: requests of which some were slow together, so that each has to be measured alone.
    """

    def __init__(self, *, is_on: bool = True) -> None:
        self.slow_seconds = SLOW_SECONDS if is_on else math.inf
        self.slow: dict[str, _Slow] = {}
        self.watched: Collection[str] = ()
        self._free_at = 0.0  # a time of `time.monotonic()`

    def add(self, request_id: str, seconds: float) -> None:
        """A call of the request's grammar took this long."""
        if request_id not in self.slow and seconds > self.slow_seconds:
            self.slow[request_id] = _Slow(seconds)
            self._rest(seconds)

    def spend(self, request_id: str, seconds: float) -> None:
        """A call of a slow request's grammar took this much processor time."""
        slow = self.slow[request_id]
        slow.token_seconds += seconds
        slow.total_seconds += seconds
        self._rest(seconds)

    def next_token(self, request_id: str) -> bool:
        """A slow request has its next token. Returns whether it must fail."""
        slow = self.slow.pop(request_id)
        slow.seconds, slow.token_seconds = slow.token_seconds, 0.0
        if slow.seconds > self.slow_seconds:
            self.slow[request_id] = slow  # behind the others
        slow.num_too_slow = slow.num_too_slow + 1 if slow.seconds > MAX_TOKEN_SECONDS else 0
        return slow.num_too_slow >= MAX_SLOW_TOKENS or slow.total_seconds > MAX_TOTAL_SECONDS

    def late(self, running: Collection[str]) -> Collection[str]:
        """Which of the running requests the next plan leaves out."""
        slow = [request_id for request_id in self.slow if request_id in running]
        if len(slow) < len(running) and time.monotonic() < self._free_at:
            return slow
        left = MAX_TOKEN_SECONDS
        late = list[str]()
        for request_id in slow:
            left -= self.slow[request_id].seconds
            if left < 0 and request_id != slow[0]:
                late.append(request_id)
        return late

    def drop(self, request_id: str) -> None:
        self.slow.pop(request_id, None)

    def _rest(self, seconds: float) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + REST * seconds
