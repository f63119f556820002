"""`StopStrings`: finds the first of several strings in a growing text, in one pass over its characters.

It is an Aho-Corasick automaton (Aho and Corasick 1975). The state is the longest suffix of the text that is a prefix of one of
the strings. A stream has to hold back this suffix; the rest of the text is not needed any more. The match that ends first wins;
if several matches end together, the longest one wins. So the result does not depend on how the text is divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0  # the state before any text


class StopStrings:
    """Immutable, and shared by the completions of a request. Each of them keeps its own state, an integer.

    Attributes:
        num_held: state -> how many characters at the end of the text may begin a stop string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        self._fallback = [START]
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
        """Set the fallback of each state, breadth first: its longest proper suffix that is a state."""
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
        """Read `text` from `state` on, at most until a stop string ends.

        Args:
            search: if False, a stop string that ends in this text is ignored; a stop string may still begin there.

        Returns:
            The new state, the number of characters that were read, and the stop string that ended, if any.
        """
        for i, character in enumerate(text):
            state = self._step(state, character)
            match = self._match[state]
            if match is not None and search:
                return state, i + 1, match
        return state, len(text), None
