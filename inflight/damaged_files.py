"""`named_errors`: whatever Python or a library raises because of a damaged file becomes an error that names the file.

Anybody can have made a model's folder. Each reader checks what it reads, and says what is wrong. `named_errors` catches what
these checks miss, so that no user sees a traceback because of a number in a file.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from inflight.errors import ConfigError, InflightError

_MAX_SHOWN = 300  # characters of the library's message


@contextlib.contextmanager
def named_errors(kind: type[ConfigError], path: Path, what: str) -> Iterator[None]:
    """Raise `kind` for any error within the context that is not one of Inflight's own. `what`: what is read from `path`.

    A panic of a library in Rust is one of them, although it is no `Exception`.
    """
    try:
        yield
    except InflightError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # such as KeyboardInterrupt
        if isinstance(error, (ConnectionError, TimeoutError)):  # another rank is lost
            raise
        reason = f"{type(error).__name__}: {error}"[:_MAX_SHOWN]
        raise kind(f"{path}: {what} cannot be read ({reason}); the file is damaged, or has an unknown form") from error


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust has panicked. Each such library has a class of its own for it, which it does not export."""
    return type(error).__name__ == "PanicException"
