"""`FieldError`: one field of a request is wrong."""

from inflight.errors import InvalidRequestError


class FieldError(InvalidRequestError):
    """One field of a request is wrong."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param
