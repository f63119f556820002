"""The level of reasoning effort that a chat template takes. Some templates refuse all levels but their own."""

from collections.abc import Callable

# from the least to the most; names of one level stand together
_LEVELS = (("none", "no_think"), ("minimal",), ("low",), ("medium",), ("high",), ("xhigh",), ("max",))


class ReasoningEffort:
    """`takes` says whether the template takes a level; None stands for no level."""

    def __init__(self, takes: Callable[[str | None], bool]) -> None:
        self._takes = takes
        self._found: dict[str, str | None] = {}

    def nearest(self, effort: str) -> str | None:
        """Returns `effort` if the template takes it, otherwise the nearest level that it takes; of two equally near ones,
        the lower. None: the template takes no level. An unknown level is returned unchanged, so the template can refuse it."""
        if effort not in self._found:
            self._found[effort] = self._find(effort)
        return self._found[effort]

    def _find(self, effort: str) -> str | None:
        at = next((i for i, names in enumerate(_LEVELS) if effort in names), None)
        if at is None or self._takes(effort) or not self._takes(None):
            return effort
        by_distance = sorted(range(len(_LEVELS)), key=lambda i: (abs(i - at), i))
        return next((name for i in by_distance for name in _LEVELS[i] if self._takes(name)), None)
