"""`StopStrings`: finds the first of several strings in a growing text, and reads each character only once.

It is an Aho-Corasick automaton (Aho and Corasick 1975). The state is the longest suffix of the text that is a prefix of one of
the strings. A stream must hold this suffix back, because it may become a stop string. Earlier text is not needed any more.
If several strings match, the match that ends first counts. If several matches end at the same character, the longest counts.
So the result does not depend on how the text is divided into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0  # the state before any text


class StopStrings:
    """Immutable, and shared by the completions of a request. Each completion has a state of its own, an integer.

    Attributes:
        num_held: for each state, how many characters at the end of the text may be the beginning of a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]  # state -> character -> the longer state
        self._match: list[str | None] = [None]  # state -> the longest string that ends in it
        self._fallback = [START]  # state -> its longest proper suffix that is a state
        self.num_held = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def _insert(self, string: str) -> None:
        state = START
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._match.append(None)
                self._fallback.append(START)
                self.num_held.append(self.num_held[state] + 1)
            state = following
        self._match[state] = string

    def _link(self) -> None:
        """Set the fallback of each state: the longest proper suffix of the state that is a state itself. Short states are done
        first, because longer states need their fallbacks."""
        queue = deque(self._next[START].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[self._fallback[state]]
            for character, following in self._next[state].items():
                self._fallback[following] = self._step(self._fallback[state], character)
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == START:
                return START
            state = self._fallback[state]
        return following

    def advance(self, state: int, text: str, *, search: bool) -> tuple[int, int, str | None]:
        """Read `text`, starting in `state`, until a stop string ends or the text ends.

        Args:
            search: if False, stop strings that end in `text` are ignored. But a stop string may begin in `text` and end later.

        Returns:
            The new state, the number of characters that were read, and the stop string that ended, if any.
        """
        for i, character in enumerate(text):
            state = self._step(state, character)
            match = self._match[state]
            if match is not None and search:
                return state, i + 1, match
        return state, len(text), None
