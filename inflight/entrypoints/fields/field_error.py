"""`FieldError`: one field of a request's body is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

from inflight.errors import InvalidRequestError


class FieldError(InvalidRequestError):
    """One field of a request's body is wrong. `param` is the field's path in the words of its API."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param)


@contextmanager
def prompt_of_list(index: int, num_prompts: int) -> Iterator[None]:
    """An error about a prompt has the prompt's place in `param`, if the request has several."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "prompt" and num_prompts > 1:
            error.param = f"prompt[{index}]"
        raise
