"""Every error that Inflight raises to a user, as one tree.

    InflightError
    +-- ConfigError (ValueError)             an argument of the engine, or a model folder, is wrong
    |   +-- UnknownArgumentError (TypeError)  the engine has no argument of this name
    |   +-- ModelNotFoundError               no such folder or hub id
    |   +-- UnsupportedModelError            the folder holds a model that Inflight does not support
    |   |   +-- ImpossibleFieldError         a field of config.json has a value that no code can compute
    |   +-- CheckpointError                  weights are missing, unknown, of a wrong shape or truncated
    |   +-- TokenizerError                   the tokenizer or the chat template is missing or broken
    |   +-- OutOfMemoryError                 the device cannot hold the weights or one sequence's KV cache
    +-- InvalidRequestError (ValueError)     one request is wrong; the others are not affected
    |   +-- UnknownParameterError (TypeError) a parameter class has no parameter of this name
    |   +-- ContextLengthExceededError       the prompt leaves no room for a token within the model's context
    +-- UnsupportedMethodError (AttributeError)  other engines have this method, Inflight does not
    +-- OverloadedError                      too many requests or too much text wait: try again later
    +-- RequestTimeoutError (TimeoutError)   a request did not end before its own deadline
    +-- EngineError (RuntimeError)           the engine itself failed
        +-- RankError                        base of the next three: names the rank, the step and its requests
        |   +-- StepError                    a step raised an exception on a rank; has the worker's traceback
        |   +-- StepTimeoutError             a step or a call took longer than its budget
        |   +-- WorkerDiedError              a rank's process has ended
        +-- EngineRecoveringError            the engine recovers from a fault, or has lost the request by a fault
        +-- CodecError                       a value cannot be sent to another process, or a message is damaged
        +-- EngineClosedError                the engine was shut down before or during the call
        +-- EngineDeadError                  the engine has failed for good, or its process has ended

Each message says what was given, what is allowed and what to do.

Ranks also raise subclasses of `PeerError`, which never reach a user: a rank has lost other ranks.
"""

from collections.abc import Sequence
from enum import StrEnum


class InflightError(Exception):
    """Base of all errors that Inflight raises."""


class ConfigError(InflightError, ValueError):
    """An engine argument or a model folder is wrong; raised before the engine exists."""


class UnknownArgumentError(ConfigError, TypeError):
    """The engine has no argument of this name. It is a TypeError, too, as Python's own error for an unknown keyword."""


class ModelNotFoundError(ConfigError):
    """The model is neither a folder nor an id that the hub or its cache has."""


class UnsupportedModelError(ConfigError):
    """The folder holds a model of a family or variant that Inflight does not support."""


class ImpossibleFieldError(UnsupportedModelError):
    """A field of config.json has a value that no code can compute, or one that transformers' code would not notice. So
    `model_impl="auto"` does not choose transformers' code instead."""


class CheckpointError(ConfigError):
    """A weight is missing, unknown or of a wrong shape, or its file is truncated."""


class TokenizerError(ConfigError):
    """The tokenizer or the chat template is missing or cannot be used."""


class OutOfMemoryError(ConfigError):
    """The device has too little memory for the weights or for one sequence's KV cache."""


class InvalidRequestError(InflightError, ValueError):
    """One request is wrong. It is refused; every other request goes on.

    Attributes:
        param: the path of the parameter that is wrong, such as "messages[1]['tool_calls']"; empty if there is no single one. An
            API may have another name for the parameter. If the message names it, then at its beginning.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class UnknownParameterError(InvalidRequestError, TypeError):
    """`SamplingParams` or `StructuredOutputsParams` has no parameter of this name. It is a TypeError, too, as Python's own
    error for an unknown keyword."""


class ContextLengthExceededError(InvalidRequestError):
    """The prompt has so many tokens that the context has no room for another one.

    Clients recognise this error by its message: "This model's maximum context length is N tokens. However, the prompt is too
    long: ".

    Attributes:
        num_tokens: how many tokens the prompt has; at least so many if it was not tokenised.
    """

    def __init__(self, message: str, num_tokens: int = 0, param: str = "prompt") -> None:
        super().__init__(message, param)
        self.num_tokens = num_tokens


class UnsupportedMethodError(InflightError, AttributeError):
    """Other engines have this method, Inflight does not. It is an AttributeError, too, so that `hasattr` is False."""


class OverloadedError(InflightError):
    """Too many requests or too much text wait, so the request has not been started.

    Attributes:
        retry_after_seconds: how long to wait before another try.
    """

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RequestTimeoutError(InflightError, TimeoutError):
    """A request did not end before its own deadline, and has been aborted."""


class EngineError(InflightError, RuntimeError):
    """The engine failed; the request or argument was right."""


class EngineRecoveringError(EngineError):
    """The engine recovers from a fault, or a request was lost with the engine. A client may see the message."""


class RankError(EngineError):
    """An `EngineError` of one rank, in one step or call.

    Attributes:
        rank: the global rank that failed or did not answer.
        step_id: the id of the step; None if the error belongs to another call, such as `collective_rpc`.
        request_ids: the requests in this step.
        worker_traceback: the traceback on the worker, as text; empty if there is none.
        type_name: the class of the worker's exception; empty if there is none.
        is_echo: whether the rank failed only because another rank had failed.
        lost_ranks: the ranks that the rank could not reach any more, if that is why it failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        step_id: int | None = None,
        request_ids: Sequence[str] = (),
        worker_traceback: str = "",
        type_name: str = "",
        is_echo: bool = False,
        lost_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(f"{message}\n{worker_traceback}" if worker_traceback else message)
        self.rank = rank
        self.step_id = step_id
        self.request_ids = tuple(request_ids)
        self.worker_traceback = worker_traceback
        self.type_name = type_name
        self.is_echo = is_echo
        self.lost_ranks = tuple(lost_ranks)

    @property
    def summary(self) -> str:
        """The error as clients see it. It contains no request ids, and no text of the exception, because such a text may
        contain file paths."""
        return f"rank {self.rank} failed"


class StepError(RankError):
    """A step, or a `collective_rpc`, raised an exception on a rank."""

    @property
    def summary(self) -> str:
        return f"a step failed on rank {self.rank}{f' ({self.type_name})' if self.type_name else ''}"


class StepTimeoutError(RankError, TimeoutError):
    """A rank did not answer within the budget of a step or call."""

    @property
    def summary(self) -> str:
        return f"rank {self.rank} did not answer in time"


class WorkerDiedError(RankError):
    """A rank's process has ended."""

    @property
    def summary(self) -> str:
        return f"rank {self.rank} has died"


class CodecError(EngineError):
    """A value is not plain data, so it cannot be sent to another process. Or received bytes are not a valid message."""


class EngineClosedError(EngineError):
    """The engine was closed before or during the call."""


class EngineDeadError(EngineError):
    """The engine has failed for good, or its process has ended: its requests get no more tokens.

    Attributes:
        summary: the reason as clients may see it; empty if it is not known.
    """

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary


class PeerError(OSError):
    """A rank has lost other ranks.

    Attributes:
        ranks: the global ranks that it has lost.
    """

    def __init__(self, message: str, *ranks: int) -> None:
        super().__init__(message)
        self.ranks = ranks


class LostPeerError(PeerError, ConnectionError):
    """The other rank has left or died, or it cannot be reached."""


class SilentPeerError(PeerError, TimeoutError):
    """Nothing came from the other ranks for too long."""


def put_place_before(error: InflightError, place: str) -> None:
    """Let the message of `error` begin with a place, such as "prompts[7]". Class and attributes of the error stay."""
    error.args = (f"{place}: {error}", *error.args[1:])


def error_by_name(name: str, message: str) -> InflightError | None:
    """Makes the exception that another process has raised, from its class name and message. Returns None if this module has no
    such class, or if the constructor of the class needs more than a message."""
    kind = globals().get(name)
    if (
        isinstance(kind, type)
        and issubclass(kind, InflightError)
        and not issubclass(kind, (RankError, OverloadedError))
    ):
        return kind(message)
    return None


class ErrorKind(StrEnum):
    """What the cause of a request's error is, and so what its caller can do.

    REQUEST: the request itself, for example a grammar that cannot be compiled. It fails again if it is sent again.
    ENGINE: the engine, for example a step that failed, or logits that are not finite.
    OVERLOAD: too much waits. The same request can succeed later.
    """

    REQUEST = "request"
    ENGINE = "engine"
    OVERLOAD = "overload"
