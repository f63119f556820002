"""`WeightCache`: finds the packed file of a model, or has it written while the engine serves."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from inflight.config.architecture import TRANSFORMERS
from inflight.config.engine import ModelConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.kernels.cpu.layer_ops import CpuLayerOps
from inflight.kernels.cpu.recording import KernelLibrary
from inflight.layers.context import LayerContext
from inflight.models.causal_lm import CausalLM
from inflight.weight_cache.background import BackgroundWork
from inflight.weight_cache.folder import CacheFolder, UnusableFolderError
from inflight.weight_cache.huge_pages import use_huge_pages
from inflight.weight_cache.identity import ModelFiles, key_of, read_identities
from inflight.weight_cache.loading import Fill, Loading, MappedLoading, NotedLoading
from inflight.weight_cache.packed_file import PackedFileError, has_codec, open_packed
from inflight.weight_cache.place import cache_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where the packed file of a rank's part of a model is, or will be, and what it is made from."""

    folder: CacheFolder
    key: str
    paths: tuple[Path, ...]
    files: ModelFiles
    limit_bytes: int


class WeightCache:
    """The cache for one rank's part of a model.

    Args:
        files: the files that have the weights.
        later: runs work while the engine serves. None: nothing is cached.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        files: Iterable[Path],
        *,
        context: LayerContext,
        tp: TensorParallelGroup,
        stage: PipelineStage,
        later: BackgroundWork | None,
    ) -> None:
        self._later = later
        self._name = f"{model_config.folder} (rank {tp.rank} of {tp.size})" if tp.size > 1 else str(model_config.folder)
        self._kernels = context.ops.kernels if isinstance(context.ops, CpuLayerOps) else None
        self._entry: _Entry | None = None
        # All ranks measure together. If only some of them had kept what they measured, the others would wait for them for ever.
        self._computes_with_others = tp.size > 1 or context.ep is not None
        self._loading = Loading()
        is_of_transformers = (
            model_config.architecture.implementation == TRANSFORMERS
        )  # its weights are stored elsewhere
        if later is None or self._kernels is None or is_of_transformers or not model_config.weight_cache_bytes:
            return
        of_experts = () if context.ep is None else (context.ep.size, context.ep.rank)
        ranks = (tp.size, tp.rank, *of_experts)
        self._entry = _find_entry(model_config, sorted(set(files)), self._kernels, ranks, stage)
        self._loading = self._mapped_loading() or self._fresh_loading()

    def wrap(self, context: LayerContext) -> LayerContext:
        """The context with which the model is made."""
        return self._loading.wrap(context)

    def load(self, model: CausalLM, fill: Fill, make_again: Callable[[], CausalLM]) -> CausalLM:
        """Loads all units: from the packed file if there is one, else with `fill`. Returns the model. If the packed file turns
        out to be unusable while the units are loaded, a new model is returned."""
        try:
            self._loading.load(model, fill)
        except PackedFileError as error:
            self._refuse(error)
            self._loading = self._fresh_loading()
            model = make_again()
            self._loading.load(model, fill)
        if isinstance(self._loading, MappedLoading) and self._entry is not None and not self._computes_with_others:
            model.packed_key = self._entry.key
        return model

    @property
    def notes(self) -> tuple[str, ...]:
        """The messages of the loader about these weights, from when it read the checkpoint."""
        return self._loading.notes

    def keep(self, notes: tuple[str, ...]) -> None:
        """While the engine serves: has the packed file written if there is none, or its pages made huge if it is mapped."""
        if self._entry is None or self._later is None:
            return
        if isinstance(self._loading, NotedLoading):
            write = partial(_write, self._loading, self._entry, self._name, notes)
            self._later.add(write, is_for_later_starts=True)
        elif isinstance(self._loading, MappedLoading):
            self._later.add(partial(use_huge_pages, self._loading.file.content), is_for_later_starts=False)

    def _mapped_loading(self) -> Loading | None:
        if self._entry is None or self._kernels is None:
            return None
        try:
            file = open_packed(self._entry.folder, self._entry.key)
        except PackedFileError as error:
            self._refuse(error)
            return None
        if file is None:
            return None
        logger.info("%s: the packed weights are mapped from %s", self._name, self._entry.folder.path)
        return MappedLoading(file, self._kernels)

    def _fresh_loading(self) -> Loading:
        return Loading() if self._entry is None or not self._entry.files.are_settled else NotedLoading()

    def _refuse(self, error: PackedFileError) -> None:
        assert self._entry is not None, "it was opened"
        logger.warning("%s: the packed weights are made again: %s", self._name, error)
        self._entry.folder.remove(self._entry.key)


def _find_entry(
    model_config: ModelConfig, paths: list[Path], kernels: KernelLibrary, ranks: tuple[int, ...], stage: PipelineStage
) -> _Entry | None:
    if not paths or not has_codec() or (path := cache_path()) is None:
        return None
    folder = CacheFolder(path)
    try:
        folder.check()
        files = read_identities(paths)
    except UnusableFolderError as error:
        logger.warning("weights are not cached: %s, or use --no-weight-cache", error)
        return None
    except OSError as error:
        logger.warning("weights are not cached: %s", error)
        return None
    made_by = (
        model_config.architecture,
        model_config.dtype,
        model_config.load_format,
        model_config.quantization,
        model_config.pooler,
        kernels.instruction_set,
        kernels.inflight_source_hash(),
        ranks,
        stage,
    )
    return _Entry(
        folder=folder,
        key=key_of(files, *made_by),
        paths=tuple(paths),
        files=files,
        limit_bytes=model_config.weight_cache_bytes,
    )


def _write(
    loading: NotedLoading, entry: _Entry, name: str, notes: tuple[str, ...], is_stopped: Callable[[], bool]
) -> None:
    """The task of `BackgroundWork` that writes a packed file. A failure is logged in one line: the engine needs no file."""
    try:
        if read_identities(entry.paths).identities != entry.files.identities:
            logger.info("%s: the packed weights are not kept, because the model's files have changed", name)
        elif loading.write(entry.folder, entry.key, notes, limit_bytes=entry.limit_bytes, is_stopped=is_stopped):
            logger.info("%s: the packed weights were written to %s", name, entry.folder.path)
    except (OSError, PackedFileError) as error:
        logger.warning("%s: the packed weights are not kept for the next start: %s", name, error)
