"""`with_whole_prompts`: what attention in both directions asks of the scheduler."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine_args import EngineArgs
from inflight.errors import ConfigError


def is_causal(architecture: ModelArchitecture) -> bool:
    """Whether no token sees the tokens behind it. Otherwise all tokens of a sequence are computed in one step."""
    return all(attention.is_causal for attention in architecture.attentions)


def with_whole_prompts(args: EngineArgs, architecture: ModelArchitecture) -> EngineArgs:
    """The same arguments; if tokens see the tokens behind them, without chunked prefill and without a prefix cache. The keys of
    a token then depend on all tokens of its sequence, so no other sequence can use them.

    Raises:
        ConfigError: an argument does not go with this, or the model has no head.
    """
    if not architecture.has_head and architecture.pooler is None:
        raise ConfigError(
            f"{architecture.name} has no head for tokens, so it cannot generate text; use a model whose architecture is for "
            "causal language modelling (...ForCausalLM)"
        )
    if is_causal(architecture):
        return args
    return replace(args, enable_chunked_prefill=False, enable_prefix_caching=False)
