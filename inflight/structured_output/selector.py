"""Chooses a grammar backend by its name. The library of a backend is imported only when it is needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from inflight.errors import ConfigError
from inflight.structured_output.backend import GrammarBackend
from inflight.tokenizer.tokenizer import Tokenizer

BACKENDS = ("llguidance", "xgrammar")


def backend_class(name: str) -> type[GrammarBackend]:
    """The class of one of `BACKENDS`.

    Raises:
        ConfigError: there is no backend of this name, or its package is not installed.
    """
    if name not in BACKENDS:
        raise ConfigError(f"structured_outputs_backend={name!r} is none of {', '.join(BACKENDS)}")
    with _needing_packages(name):
        if name == "llguidance":
            from inflight.structured_output.llguidance_backend import LLGuidanceBackend

            return LLGuidanceBackend
        from inflight.structured_output.xgrammar_backend import XGrammarBackend

        return XGrammarBackend


def create_backend(name: str, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarBackend:
    """Make one of `BACKENDS`. For a large vocabulary this needs up to a second.

    Raises:
        ConfigError: the backend is unknown or not installed, there is no EOS token, or the library cannot use the tokenizer.
    """
    cls = backend_class(name)
    if not eos_token_ids:
        raise ConfigError("structured outputs need a model with an EOS token, because it ends the text of a grammar")
    with _needing_packages(name):
        return cls(tokenizer, vocab_size, eos_token_ids)


@contextmanager
def _needing_packages(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = "inflight-llm[xgrammar]" if name == "xgrammar" else name
        raise ConfigError(f"structured outputs need the package {error.name!r}: pip install '{package}'") from error
