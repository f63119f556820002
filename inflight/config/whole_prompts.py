"""What attention in both directions asks of the scheduler: `with_whole_prompts`, `with_room_for_images`."""

from dataclasses import replace

from inflight.config.architecture import ModelArchitecture
from inflight.config.engine import SchedulerConfig
from inflight.config.engine_args import EngineArgs
from inflight.config.speculative import SpeculativeConfig
from inflight.errors import ConfigError


def is_causal(architecture: ModelArchitecture) -> bool:
    """Whether no token sees the tokens behind it. Otherwise all tokens of a sequence are computed in one step."""
    return all(attention.is_causal for attention in architecture.attentions)


def keeps_images_whole(architecture: ModelArchitecture) -> bool:
    """Whether the tokens of an image see each other in both directions, so that one step computes all of them."""
    return architecture.vision is not None and any(each.sees_whole_images for each in architecture.attentions)


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


def with_room_for_images(
    scheduler: SchedulerConfig,
    args: EngineArgs,
    architecture: ModelArchitecture,
    *,
    max_model_len: int,
    speculative: SpeculativeConfig | None,
) -> SchedulerConfig:
    """The same limits; if images are kept whole, with room in a step for the largest image beside the tokens and drafts of all
    other sequences. Otherwise an image might never be computed.

    Raises:
        ConfigError: the limit that the user has chosen has no such room.
    """
    if not keeps_images_whole(architecture) or not scheduler.enable_chunked_prefill:
        return scheduler
    assert architecture.vision is not None
    num_image_tokens = min(architecture.vision.most_tokens, max_model_len)
    num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    needed = num_image_tokens + (scheduler.max_num_seqs - 1) * (1 + num_drafts)
    given = scheduler.max_num_batched_tokens
    if given >= needed:
        return scheduler
    if args.max_num_batched_tokens is None:
        return replace(scheduler, max_num_batched_tokens=needed)
    raise ConfigError(
        f"max_num_batched_tokens={given} has no room for an image of {num_image_tokens} tokens, which {architecture.name} "
        f"computes in one step, beside the {needed - num_image_tokens} tokens of max_num_seqs={scheduler.max_num_seqs} "
        f"sequences; set it to at least {needed}, lower max_num_seqs, or leave the images out with language_model_only=True "
        "(--language-model-only)"
    )
