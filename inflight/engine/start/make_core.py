"""`make_core`: makes an engine core. Allocates the KV cache, and measures how long the model's steps take."""

import logging
from dataclasses import replace

from inflight.config.engine import EngineConfig
from inflight.config.vision import max_image_tokens
from inflight.config.whole_prompts import keeps_images_whole
from inflight.engine.core.engine_core import EngineCore
from inflight.engine.core.rank_calls import RankCalls
from inflight.engine.core.step_loop import CoreListener
from inflight.engine.start.kv_cache_sizing import allocate_kv_cache
from inflight.engine.start.pipeline_tuning import tuned
from inflight.engine.start.step_times import measured_step_times
from inflight.executor.executor import Executor
from inflight.kv_cache.manager import KVCacheManager
from inflight.scheduler.encoder_inputs import EncoderInputs
from inflight.scheduler.scheduler import Scheduler
from inflight.scheduler.transfers import TransferSetup
from inflight.structured_output.manager import StructuredOutputManager

logger = logging.getLogger(__name__)


def make_core(
    config: EngineConfig,
    executor: Executor,
    grammars: StructuredOutputManager | None = None,
    listener: CoreListener | None = None,
) -> EngineCore:
    """Returns a core that owns `executor` and `grammars`. If this fails, the caller still owns them. `listener`: who runs the
    core; None if nobody wants to be called.

    Raises:
        OutOfMemoryError: one sequence of `max_model_len` tokens does not fit.
        EngineError: a rank failed.
    """
    if (transfer := config.cache.transfer) is not None and transfer.ignored:
        logger.warning("kv_transfer_config: %s has no meaning here, and is ignored", ", ".join(transfer.ignored))
    kv_cache_config = allocate_kv_cache(config, executor)
    kv_cache = KVCacheManager(
        kv_cache_config,
        fingerprint=config.model.fingerprint,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        checkpoint_tokens=config.cache.state_checkpoint_tokens,
    )
    scheduler_config, first_step_id = tuned(config, executor, kv_cache_config)
    step_times, first_step_id = measured_step_times(config, executor, kv_cache_config, first_step_id)
    listener = listener or CoreListener()
    transfers = None
    if transfer is not None:
        transfers = TransferSetup(
            config=transfer,
            num_slots=kv_cache_config.num_slots,
            block_bytes=kv_cache_config.block_bytes * config.parallel.world_size,
            calls=RankCalls(executor),
            on_news=listener.wake,
        )
    scheduler = Scheduler(
        scheduler_config,
        kv_cache,
        max_model_len=config.model.max_model_len,
        grammars=grammars,
        num_speculative_tokens=config.speculative.num_speculative_tokens if config.speculative is not None else 0,
        first_step_id=first_step_id,
        step_times=step_times,
        transfers=transfers,
    )
    if (vision := config.model.architecture.vision) is not None:
        max_tokens = max_image_tokens(config.model.max_model_len)
        is_whole = not scheduler_config.enable_chunked_prefill
        gates, sharing = scheduler.gates, scheduler.sharing
        scheduler.encoder = EncoderInputs(
            vision,
            max_tokens,
            gates,
            sharing,
            scheduler.fail,
            is_whole=is_whole,
            keeps_images_whole=keeps_images_whole(config.model.architecture),
        )
    config = replace(config, scheduler=scheduler_config)
    core_class = EngineCore
    if config.parallel.is_in_lockstep:
        from inflight.engine.lockstep.core import LockstepCore  # which few engines need

        core_class = LockstepCore
    return core_class(config, executor, scheduler, kv_cache, kv_cache_config, grammars, listener)
