"""`LeftOut`: the places of a schema at which something was left out, as they are reported."""

from inflight.structured_output.spec import SchemaPlace

# More places, and longer ones, would only fill the memory, the log and the answer's header: a schema may have 50,000 places of
# 2,000 characters.
MAX_PLACES = 100
MAX_CHARACTERS = 300


class LeftOut:
    def __init__(self) -> None:
        self._places: list[SchemaPlace] = []
        self._num_more = 0

    def add(self, place: SchemaPlace) -> None:
        if len(self._places) >= MAX_PLACES:
            self._num_more += 1
        else:
            is_long = len(place.text) > MAX_CHARACTERS
            self._places.append(place._replace(text=f"{place.text[:MAX_CHARACTERS]}...") if is_long else place)

    def places(self) -> list[SchemaPlace]:
        """The first `MAX_PLACES`, the end of a long one cut off, and then how many more there are."""
        more = [SchemaPlace("", f"{self._num_more} more places")] if self._num_more else []
        return self._places + more
