"""`RepairBudget`: bounds the work of all repairs in one answer.

A repair tries many readings of a damaged text, so it may take thousands of times as long as reading the text once. A text
may also look like a damaged call in thousands of places. While one answer is repaired, no other answer of the process goes
on. So all repairs of an answer share one bound. It is counted in steps and not in seconds: thus the same text always becomes
the same call.
"""

MAX_STEPS = 60_000  # one search for the only reading of a call of 250 characters took 41,000 at most
_CHARS_PER_STEP = 256  # reading or copying this many characters takes about as long as one step


class TooMuchWorkError(Exception):
    """No steps are left. Only this package catches the error: the damaged text is passed on as the model wrote it."""


class RepairBudget:
    """
    Args:
        num_steps: how many steps all repairs of the answer may take. A step reads one token of JSON: 3 to 6 microseconds.
    """

    def __init__(self, num_steps: int = MAX_STEPS) -> None:
        self._num_left = num_steps

    @property
    def is_left(self) -> bool:
        """Whether another repair may begin."""
        return self._num_left > 0

    def spend(self, num_steps: int = 0, *, num_chars: int = 0) -> None:
        """Take `num_steps` steps, and those for reading or copying `num_chars` characters.

        Raises:
            TooMuchWorkError: more was spent than there was.
        """
        self._num_left -= num_steps + num_chars // _CHARS_PER_STEP
        if self._num_left < 0:
            raise TooMuchWorkError
