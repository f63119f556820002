"""`Trunk`: a model of transformers without its head, for vectors. It looks like a model with a head to the code around it."""

from typing import Any

from transformers import PreTrainedModel
from transformers.utils import ModelOutput


class Trunk(PreTrainedModel):  # type: ignore[misc]  # of transformers, which has no types
    """The decoder or encoder `inner` has the name that it has in models with a head, so that the checkpoints of those fit, too.
    The "logits" are the hidden states; nothing reads them."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__(inner.config)
        self.base_model_prefix = inner.base_model_prefix
        setattr(self, inner.base_model_prefix, inner)
        self.post_init()

    def init_weights(self) -> None:
        """They are loaded later."""

    def forward(self, **arguments: Any) -> ModelOutput:  # Any: each family has its own
        found = getattr(self, self.base_model_prefix)(**arguments)
        return ModelOutput(logits=found["last_hidden_state"])
