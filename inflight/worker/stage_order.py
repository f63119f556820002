"""`StageOrder`: which stage goes to the device when. It follows from the commands alone, never from time.

A step has two stages, its forward and its sample, and both go as soon as they may. On each command the steps under way are
walked, the oldest first:

    forward N   may go when the forwards of all older steps have gone, and the sample of the step that draws its inputs
    sample N    may go when forward N has gone, the samples of all older steps, and its masks are there

So a late mask holds up what depends on its step, and forwards that do not go on:

    commands   plan 0 (masks)   plan 1            plan 2, of tokens that step 0 draws   masks 0
    device     forward 0        forward 1                                               sample 0, sample 1, forward 2, sample 2

Ranks that get the same commands in the same order hand the same stages to their devices in the same order: their collectives
meet. Waits point to older steps only, so there is no cycle. On a stage of a pipeline that draws nothing no sample ever waits;
on the last one a forward waits for tokens that only the first embeds, because it cannot begin before that one has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inflight.interface.step import GrammarOutput


@dataclass(slots=True, kw_only=True)
class StagedStep:
    """A step's stages; `sample` takes the masks.

    `drawn_in_step` is the latest step that draws one of its inputs. One that is not under way has been sampled, or has failed.
    """

    step_id: int
    drawn_in_step: int
    awaits_masks: bool
    forward: Callable[[], None]
    sample: Callable[[GrammarOutput | None], None]
    forward_has_gone: bool = False
    grammar_output: GrammarOutput | None = None


class StageOrder:
    """Owned by the thread that takes commands.

    Args:
        submit: hands a stage to the device, behind those handed to it before.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._steps: deque[StagedStep] = deque()  # whose sample has not gone, in order

    def add(self, step: StagedStep) -> None:
        """A plan has come. Step ids rise."""
        self._steps.append(step)
        self._walk()

    def provide(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """The masks of a step that has come and awaits them; once for each."""
        step = next((step for step in self._steps if step.step_id == step_id), None)
        assert step is not None and step.awaits_masks, f"step {step_id} does not wait for masks"
        step.grammar_output, step.awaits_masks = grammar_output, False
        self._walk()

    def _walk(self) -> None:
        unsampled: int | None = None  # the oldest step whose sample cannot go
        for step in tuple(self._steps):
            if not step.forward_has_gone:
                if unsampled is not None and step.drawn_in_step >= unsampled:
                    return
                step.forward_has_gone = True
                self._submit(step.forward)
            if unsampled is None and step.awaits_masks:
                unsampled = step.step_id
            if unsampled is None:
                self._steps.popleft()
                self._submit(partial(step.sample, step.grammar_output))
