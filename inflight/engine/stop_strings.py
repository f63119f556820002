"""`StopStrings`: finds the first of several strings in a growing text, one pass over its characters.

An Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest end of the text that begins one of the
strings: that many characters must be held back from a stream, and nothing else of the past need be kept. The match that
ends first wins; of those that end together, the longest. So what is found does not depend on how the text was cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0  # the state before any text


class StopStrings:
    """Immutable, shared by the completions of a request; each keeps a state, an integer.

    Attributes:
        num_held: state -> characters at the text's end that may begin a stop string.
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
        """Breadth first: a state's fallback is its longest proper suffix that is a state too."""
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
        """Read on from `state`.

        Args:
            search: False reads without looking: no match can end in this text, though one may begin there.

        Returns:
            The new state, how many characters were read, and the stop string that ends there, if one does.
        """
        for i, character in enumerate(text):
            state = self._step(state, character)
            match = self._match[state]
            if match is not None and search:
                return state, i + 1, match
        return state, len(text), None
