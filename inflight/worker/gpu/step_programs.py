"""`StepPrograms`: the kernel launches of a step on a GPU, over memory that never moves, so that CUDA graphs can record them.

    decode(n)   forward and LM head of n rows with one token each        -> logits [n]
    mixed(n)    forward of rows with n tokens in total                   -> hidden [n]
    head(n)     LM head of n of the hidden states that `mixed` made      -> logits [n]
    eager(...)  forward and LM head of rows with any number of tokens    -> logits
    draw(n)     draw n tokens, one from each row of logits               -> tokens [n]

`draw` also advances the `DeviceState` (the inputs of a step, on the GPU) to the next decode step.

Only the last pipeline stage has an LM head and draws. On the other stages the forward writes the activations for the next stage
to `sent`.
"""

import torch
from torch import Tensor

from inflight.attention.metadata import AttentionMetadata
from inflight.attention.triton_paged import TritonPagedMetadata
from inflight.config.engine import EngineConfig
from inflight.config.pipeline_stage import PipelineStage
from inflight.distributed.intermediate_tensors import IntermediateTensors
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.interface.kv_cache import KVCacheConfig
from inflight.kernels.triton.step_state import advance
from inflight.models.causal_lm import CausalLM, ModelStep
from inflight.sample.device_sampler import DeviceSampler
from inflight.sample.logprobs import gather_logprobs
from inflight.worker.gpu.device_state import DeviceState
from inflight.worker.parts.row_parts import StepParts

PROFILED_LOGPROBS = 20  # log-probabilities per token in the profile run: the most that OpenAI's API gives


class StepPrograms:
    """The programs of a step. Each call launches kernels on the current stream. Call `bind` first.

    Args:
        max_num_tokens: the most tokens of a step, padding included.
        max_mixed: the most tokens that `mixed` is called with.

    Attributes:
        logits: float32 [max_num_seqs, vocab_size], the logits of the draws; used on the last stage.
        tokens: int32 [max_num_seqs], the drawn tokens; used on the last stage.
        received: activations from the previous stage; None on the first stage.
        sent: activations for the next stage; None on the last stage.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        device: torch.device,
        *,
        tp: TensorParallelGroup,
        stage: PipelineStage,
        max_num_tokens: int,
        max_mixed: int,
    ) -> None:
        self._config = config
        self._model = model
        self._tp = tp
        self._draws = stage.is_last and tp.rank == 0
        architecture = config.model.architecture
        max_num_seqs = config.scheduler.max_num_seqs
        hidden_size = architecture.hidden_size
        dtype = getattr(torch, config.model.dtype)
        num_draws = max_num_seqs if stage.is_last else 0
        self.logits = torch.zeros(num_draws, architecture.vocab_size, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(num_draws, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(max_mixed if stage.is_last else 0, hidden_size, dtype=dtype, device=device)
        template = IntermediateTensors.template(hidden_size, dtype, device)
        self.received = None if stage.is_first else template.empty_like(max_num_tokens)
        self.sent = None if stage.is_last else template.empty_like(max_num_tokens)
        self._sampler = DeviceSampler(architecture.vocab_size, max_num_seqs, device)
        self._metadata: dict[tuple[int, int], tuple[AttentionMetadata, ...]] = {}

    def bind(self, state: DeviceState, kv_cache_config: KVCacheConfig) -> None:
        self._num_groups = len(kv_cache_config.groups)
        self._parts = {name: state.part(name) for name in state.start}
        self._metadata.clear()

    @property
    def history(self) -> Tensor:
        """The tokens of each slot: int32 [num_slots + 1, max_model_len]."""
        return self._parts["history"]

    def decode(self, num_rows: int) -> None:
        metadata = self._recorded_metadata(num_rows, num_rows, max_query_len=1)
        hidden = self._run(self._model_step(num_rows, metadata))
        if hidden is not None:
            self._model.compute_logits(hidden, out=self.logits[:num_rows])

    def mixed(self, num_tokens: int) -> None:
        num_rows = min(self._config.scheduler.max_num_seqs + 1, num_tokens)  # every row has at least one token
        metadata = self._recorded_metadata(num_tokens, num_rows, max_query_len=max(2, num_tokens))
        hidden = self._run(self._model_step(num_tokens, metadata))
        if hidden is not None:
            self._hidden[:num_tokens].copy_(hidden)

    def head(self, num_draws: int) -> None:
        hidden = self._hidden.index_select(0, self._parts["logits_indices"][:num_draws])
        self._model.compute_logits(hidden, out=self.logits[:num_draws])

    def eager(
        self,
        num_tokens: int,
        num_rows: int,
        num_draws: int,
        *,
        max_query_len: int,
        has_single_tokens: bool,
        max_seq_len: int,
        request_parts: StepParts | None,
    ) -> None:
        """`request_parts`: uploaded. They read the hidden states of the step, and keep on the device what they find."""
        indices = self._parts["logits_indices"][: max(num_draws, 1)]
        metadata = self._make_metadata(
            num_tokens,
            num_rows,
            max_query_len=max_query_len,
            has_single_tokens=has_single_tokens,
            max_seq_len=max_seq_len,
        )
        step = self._model_step(num_tokens, metadata, indices)
        if request_parts is not None:
            step = request_parts.extend(step)
        hidden = self._run(step)
        if hidden is None:
            return
        if request_parts is not None:
            request_parts.read(hidden, self._model)
        hidden = hidden.index_select(0, indices) if step.rows is None else hidden[: len(indices)]
        if num_draws:
            self._model.compute_logits(hidden, out=self.logits[:num_draws])

    def draw(self, num_draws: int) -> None:
        self.draw_from(self.logits[:num_draws])

    def draw_from(self, logits: Tensor) -> None:
        """Draw a token from each row of `logits`, float32 [num_draws, vocab_size]."""
        num_draws = len(logits)
        parts = self._parts
        slots = parts["draw_slots"][:num_draws]
        positions = parts["draw_positions"][:num_draws]
        tokens = self.tokens[:num_draws]
        if self._draws:
            self._sampler.draw(logits, parts["columns"], slots, positions, tokens)
        if self._tp.size > 1:
            tokens.copy_(self._tp.broadcast(tokens))
        advance(
            tokens,
            slots,
            positions,
            last_tokens=parts["last_tokens"],
            history=parts["history"],
            input_ids=parts["input_ids"],
            positions=parts["positions"],
            seq_lens=parts["seq_lens"],
        )

    def profile_draws(self, hidden: Tensor) -> None:
        """Run the LM head, the draws and the log-probabilities for the most rows that a step may draw. The profile run calls
        this before `bind`."""
        num_rows = min(len(self.logits), len(hidden))
        logits = self._model.compute_logits(hidden[:num_rows], out=self.logits[:num_rows])
        if self._draws:
            columns = torch.zeros(DeviceSampler.NUM_COLUMNS, 1, dtype=torch.int32, device=logits.device)
            zeros = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
            self._sampler.draw(logits, columns, zeros, zeros, self.tokens[:num_rows])
            gather_logprobs(logits, self.tokens[:num_rows], PROFILED_LOGPROBS)

    def _model_step(
        self, num_tokens: int, metadata: tuple[AttentionMetadata, ...], rows: Tensor | None = None
    ) -> ModelStep:
        ids = self._parts["input_ids"][:num_tokens]
        positions = self._parts["positions"][:num_tokens]
        if self._config.model.architecture.vision is not None:
            positions = positions + self._parts["rope_deltas"][self._parts["token_slots"][:num_tokens]]
        intermediate = None if self.received is None else self.received.first(num_tokens)
        return ModelStep(ids, positions, metadata, rows, intermediate=intermediate)

    def _run(self, step: ModelStep) -> Tensor | None:
        """The hidden states of `step.rows`, or of all tokens. None if this is not the last stage."""
        output = self._model(step)
        if isinstance(output, Tensor):
            return output
        assert self.sent is not None
        num_tokens = len(step.input_ids)
        self.sent.delta[:num_tokens].copy_(output.delta)
        self.sent.residual[:num_tokens].copy_(output.residual)
        return None

    def _recorded_metadata(
        self, num_tokens: int, num_rows: int, *, max_query_len: int
    ) -> tuple[AttentionMetadata, ...]:
        """The attention metadata for a size. It is made only once, because the CUDA graph of this size reads the metadata's
        tensors at their recorded addresses."""
        key = num_tokens, max_query_len
        if key not in self._metadata:
            max_seq_len = self._config.model.max_model_len
            self._metadata[key] = self._make_metadata(
                num_tokens, num_rows, max_query_len=max_query_len, has_single_tokens=True, max_seq_len=max_seq_len
            )
        return self._metadata[key]

    def _make_metadata(
        self, num_tokens: int, num_rows: int, *, max_query_len: int, has_single_tokens: bool, max_seq_len: int
    ) -> tuple[AttentionMetadata, ...]:
        parts = self._parts
        return tuple(
            TritonPagedMetadata(
                num_tokens=num_tokens,
                num_rows=num_rows,
                max_query_len=max_query_len,
                has_single_tokens=has_single_tokens,
                max_seq_len=max_seq_len,
                query_start_loc=parts["query_start_loc"][: num_rows + 1],
                seq_lens=parts["seq_lens"][:num_rows],
                slots=parts["slots"][:num_rows],
                token_slots=parts["token_slots"][:num_tokens],
                positions=parts["positions"][:num_tokens],
                block_table=parts["block_tables"][group],
            )
            for group in range(self._num_groups)
        )
