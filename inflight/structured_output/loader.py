"""`load_backend`: imports the grammar backend and its library when they are first needed."""

from inflight.errors import ConfigError
from inflight.structured_output.backend import GrammarBackend


def load_backend() -> type[GrammarBackend]:
    """
    Raises:
        ConfigError: a package that the backend needs is not installed.
    """
    try:
        from inflight.structured_output.llguidance_backend import LLGuidanceBackend
    except ModuleNotFoundError as error:
        raise ConfigError(f"structured outputs need the package {error.name!r}: pip install '{error.name}'") from error
    return LLGuidanceBackend
