"""`CompletionPresenter`: writes the answers of /v1/completions."""

from collections.abc import Sequence

from inflight.entrypoints.http.logprobs import PositionLogprobs
from inflight.entrypoints.http.presenter import AnswerTo
from inflight.entrypoints.openai.bodies import CompletionChoice
from inflight.entrypoints.openai.chunk_presenter import ChunkPresenter, finish_reason_of
from inflight.entrypoints.openai.logprobs import CompletionLogprobs, prompt_logprobs
from inflight.outputs import CompletionOutput, RequestOutput


class CompletionPresenter(ChunkPresenter):
    """The choices of all prompts are numbered together. Choice `index` of a prompt has number `prompt_index * n + index`."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"
    body_object = "text_completion"

    def __init__(self, to: AnswerTo) -> None:
        super().__init__(to)
        self._prompts = to.request.prompts
        self._n = to.request.params.n
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice number; made at the choice's first output
        # The log-probabilities of prompts, by prompt index. The engine sends them only once, but every choice may need them.
        self._prompt_rows: dict[int, Sequence[PositionLogprobs | None]] = {}

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        choices = self._choices(prompt_index, output)
        self._usage.add(prompt_index, output)
        found = zip(output.outputs, choices, strict=True)
        return [self._chunk(shown) for choice, shown in found if _is_new(choice, shown)]

    def body(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [shown for index, output in enumerate(outputs) for shown in self._choices(index, output)]
        return self._body(choices, outputs)

    def _choices(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        if self._presentation.prompt_only:  # the engine always draws at least one token, so hide this token
            for choice in output.outputs:
                choice.text = ""
                choice.token_ids = []
                choice.stop_reason = None
                choice.logprobs = None if choice.logprobs is None else []
        if output.prompt_logprobs is not None:
            self._prompt_rows[prompt_index] = output.prompt_logprobs
        return [self._choice(prompt_index, output, choice) for choice in output.outputs]

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> CompletionChoice:
        shown = self._presentation
        prompt = self._prompts[prompt_index]
        index = prompt_index * self._n + choice.index
        logprobs = self._logprobs.get(index)
        is_first = logprobs is None
        if logprobs is None:
            logprobs = self._logprobs[index] = CompletionLogprobs(self._tokenizer, as_ids=shown.tokens_as_ids)
        echoes = shown.echo and is_first
        presented: CompletionChoice = {
            "index": index,
            "text": (prompt.text or "") + choice.text if echoes else choice.text,
            "logprobs": None,
            "finish_reason": finish_reason_of(choice),
            "stop_reason": choice.stop_reason,
        }
        if self._top_logprobs is not None:
            rows = [*(self._prompt_rows.get(prompt_index, ()) if echoes else ()), *(choice.logprobs or ())]
            if rows or not shown.stream:
                first = prompt.token_ids[0]
                first_text = "" if self._tokenizer is None else self._tokenizer.decode_token(first)
                presented["logprobs"] = logprobs.columns(rows, (first, first_text))
        if shown.return_token_ids:
            presented["token_ids"] = choice.token_ids
            if is_first:
                presented["prompt_token_ids"] = output.prompt_token_ids
        if shown.parts and is_first and not shown.stream:
            presented["prompt_logprobs"] = prompt_logprobs(self._prompt_rows.get(prompt_index, ()))
        return presented


def _is_new(choice: CompletionOutput, shown: CompletionChoice) -> bool:
    """Whether the choice needs a chunk. Even a token without text gets a chunk, because clients measure token times by
    chunks."""
    return bool(choice.token_ids or shown["text"] or shown["logprobs"] or choice.finish_reason)
