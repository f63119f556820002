"""`PoolingParams`: what a request wants that makes vectors or scores of a prompt, instead of text."""

from dataclasses import dataclass
from functools import partial

from inflight.errors import InvalidRequestError, UnknownParameterError
from inflight.sampling_params import SamplingParams
from inflight.setting import check_values, names_unknown, setting

TASKS = ("embed", "classify", "token_embed", "token_classify")
FOREIGN_POOLING = {
    "normalize": "give use_activation",
    "activation": "give use_activation",
    "softmax": "give use_activation",
    "output_kind": "leave it out: there is one output",
    "returned_token_ids": "start with hf_overrides={'classifier_from_token': [...], 'method': 'no_post_processing'}",
    "step_tag_id": "start with pooler_config={'pooling_type': 'STEP', 'step_tag_id': ...}",
}
_pooling = partial(setting, group="Pooling")


@names_unknown(UnknownParameterError, FOREIGN_POOLING)
@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The names are those of vLLM.

    Raises:
        InvalidRequestError: a value is out of bounds.
    """

    task: str | None = _pooling(
        None,
        "embed: one vector. classify: a score for each class. token_embed, token_classify: the same for each token. Default: "
        "what the model makes.",
        choices=(None, *TASKS),
    )
    dimensions: int | None = _pooling(
        None, "Keep the first so many numbers of a vector, and normalize it again.", bounds=(1, 2**20)
    )
    use_activation: bool = _pooling(True, "Normalize vectors; make probabilities of scores.")
    truncate_prompt_tokens: int | None = _pooling(
        None, "Cut longer prompts to so many tokens; -1: to as many as the model takes.", bounds=(-1, 2**31 - 1)
    )

    def __post_init__(self) -> None:
        for name, problem in check_values(PoolingParams, vars(self)).items():
            raise InvalidRequestError(problem, name)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens=0 leaves no prompt; give at least 1, or -1", "truncate_prompt_tokens"
            )


Params = SamplingParams | PoolingParams
