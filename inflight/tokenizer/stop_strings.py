"""`StopStrings`: finds the first of several strings in a growing text, and reads each character only once.

It is an Aho-Corasick automaton (Aho and Corasick 1975). The state is the longest suffix of the text that is a prefix of one of
the strings. A stream must hold this suffix back, because it may become a stop string. Earlier text is not needed any more.
If several strings match, the match that ends first counts. If several matches end at the same character, the longest counts.
So the result does not depend on how the text is divided into pieces. `StopSearch` holds back what a stream must not show yet.
"""

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


class StopSearch:
    """Searches for stop strings in one text while it arrives, and holds back what may be the beginning of one.

    Attributes:
        found: the stop string that has ended the text, or None. Later text is dropped.
    """

    def __init__(self, strings: StopStrings, *, includes_stop: bool = False) -> None:
        """`includes_stop`: whether the text ends after the stop string, and not before it."""
        self.found: str | None = None
        self._strings = strings
        self._includes_stop = includes_stop
        self._state = START
        self._held = ""

    def write(self, text: str, *, search: bool = True) -> str:
        """Add text, and return the text that is certain now. With `search=False`, a stop string may begin in `text`, but not
        end there."""
        if self.found is not None:
            return ""
        self._state, num_read, self.found = self._strings.advance(self._state, text, search=search)
        whole = self._held + text[:num_read]
        if self.found is None:
            num_shown = len(whole) - self._strings.num_held[self._state]
        else:
            num_shown = len(whole) if self._includes_stop else len(whole) - len(self.found)
        self._held = whole[num_shown:]
        return whole[:num_shown]

    def release(self) -> str:
        """No more text follows: returns the text that was held back."""
        held, self._held, self._state = self._held if self.found is None else "", "", START
        return held
