"""`PhaseOrder`: decides when each phase of a step goes to the device. The order depends only on the commands, never on time.

On the device a step has two phases: its forward and its sample. A command is a new plan (the scheduler's output for a step), or
the grammar masks of a step. After each command, all phases that may go are submitted to the device, in the order of their
steps:

    forward N   may go after the forwards of all older steps, and after the sample of the step that draws its inputs
    sample N    may go after forward N, after the samples of all older steps, and, if step N has a grammar, after its masks

So late masks delay only the sample of their step and the phases that depend on this sample. Here step 0 waits for masks, and
step 2 computes tokens that step 0 draws:

    commands   plan 0           plan 1            plan 2                                   masks 0
    device     forward 0        forward 1                                                  sample 0, sample 1, forward 2, ...

Ranks that get the same commands in the same order submit the same phases in the same order, so their collectives match. A
step waits only for older steps, so there is no deadlock. Only the last pipeline stage waits for masks. A forward on the last
pipeline stage also waits for the step that draws the forward's inputs, although only the first pipeline stage embeds these
tokens. This costs no time, because the first pipeline stage, which needs the tokens, cannot send its activations earlier.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from inflight.interface.step import GrammarOutput


@dataclass(slots=True, kw_only=True)
class StepPhases:
    """The phases of one step. `sample` is called with the masks.

    `drawn_in_step` is the id of the latest step that draws one of this step's inputs. That step may have ended already.
    """

    step_id: int
    drawn_in_step: int
    awaits_masks: bool
    forward: Callable[[], None]
    sample: Callable[[GrammarOutput | None], None]
    forward_has_gone: bool = False
    grammar_output: GrammarOutput | None = None


class PhaseOrder:
    """Only the thread that receives the commands uses it.

    Args:
        submit: gives a phase to the device, which runs phases in the order of these calls.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._steps: deque[StepPhases] = deque()  # the steps whose sample was not submitted yet, in order

    def add(self, step: StepPhases) -> None:
        """Add the step of a new plan. Its id is larger than all earlier ids."""
        self._steps.append(step)
        self._walk()

    def provide(self, step_id: int, grammar_output: GrammarOutput) -> None:
        """Give a step its masks. Call it once for each step that was added with `awaits_masks`."""
        step = next((step for step in self._steps if step.step_id == step_id), None)
        assert step is not None and step.awaits_masks, f"masks came for step {step_id}, which does not wait for masks"
        step.grammar_output, step.awaits_masks = grammar_output, False
        self._walk()

    def _walk(self) -> None:
        unsampled: int | None = None  # the oldest step whose sample cannot be submitted yet
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
