"""`LeftOut`: the places of a schema at which something was left out, as they are reported."""

# More places, and longer ones, would only fill the memory, the log and the answer's header: a schema may have 50,000 places of
# 2,000 characters.
MAX_PLACES = 100
MAX_CHARACTERS = 300


class LeftOut:
    def __init__(self) -> None:
        self._places: list[str] = []
        self._num_more = 0

    def add(self, place: str) -> None:
        if len(self._places) >= MAX_PLACES:
            self._num_more += 1
        else:
            self._places.append(place if len(place) <= MAX_CHARACTERS else f"{place[:MAX_CHARACTERS]}...")

    def places(self) -> list[str]:
        """The first `MAX_PLACES`, the end of a long one cut off, and then how many more there are."""
        return [*self._places, f"{self._num_more} more places"] if self._num_more else self._places
