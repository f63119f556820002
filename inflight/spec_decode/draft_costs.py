"""What drafts cost in time. `DraftCosts` estimates it from the models' sizes, `MeasuredCosts` learns it from real steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.config.architecture import ModelArchitecture

FloatArray = npt.NDArray[np.float64]

# How many more tokens a step could compute in the time in which it computes none (it reads the weights): about 19 with a model
# of 0.6 billion parameters in bf16 on two cores, from 1 to 8 tokens.
FREE_TOKENS = {"cpu": 16.0, "cuda": 256.0}


class DraftCosts:
    """An estimate: a step of n tokens takes a time in proportion to `free_tokens` + n. Here a second is an arbitrary unit.

    Args:
        share_of_step: the time of a drafter's pass / the time of a step of the served model, with as many tokens. 0: no model
            writes the drafts.
    """

    is_measured = False

    def __init__(self, free_tokens: float, share_of_step: float = 0.0) -> None:
        self._free_tokens = free_tokens
        self._share_of_step = share_of_step
        self.has_passes = share_of_step > 0

    def step(self, num_tokens: npt.ArrayLike) -> FloatArray:
        """The seconds of a step of the served model, for each number of tokens."""
        return self._free_tokens + np.asarray(num_tokens, dtype=np.float64)

    def draft(self, num_rows: npt.ArrayLike) -> FloatArray:
        """The seconds of a pass of the drafter, for each number of requests: a pass writes one draft of each."""
        return self._share_of_step * self.step(num_rows)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step without prompts took so long. An estimate stays as it is, so that the steps of a run can be repeated."""

    def observe_draft(self, num_rows: float, seconds: float) -> None:
        """The same for a pass of the drafter."""


# The curves have points at 1, 1.4, 2, 2.8, 4, ... tokens, up to 4,096, and are straight between them, in logarithms.
_POINTS = np.arange(25) / 2  # log2 of the numbers of tokens
_STEP, _DRAFT = 0, 1  # the two curves
# How far all times may be off together, because the machine is slower or faster than before; in logarithms
_SHARED = 0.3
_SHARED_AT_START = 0.1  # the same just after they were measured
_LOCAL = 0.5  # how far a point may be off beside that
_REACH = 1.0  # points so far apart (in log2) are off by 1 / e alike
_NOISE = 0.15  # of a measured time
_RENEWAL = 0.01  # in each step the uncertainty grows by this share of the way back to that of the start
# One strange step changes little, in logarithms. What other programs do only makes a step longer. If drafts seemed more than
# twice as dear as they are, not even a trial would be made, and nothing would correct it.
_LEAST_SURPRISE, _MOST_SURPRISE = -2.0, 0.65


class MeasuredCosts(DraftCosts):
    """Two curves, of the served model's steps and of the drafter's passes. Each measured time moves both.

    The points are estimated together by a Kalman filter, in logarithms. If a time is longer than expected, either the whole
    machine is slow, and then all points rise, or a point is wrong, and then it rises with its neighbours. Both are assumed in
    part. A point that was not measured for long is uncertain, so it follows a new time at once.

    Args:
        steps, drafts: number of tokens -> seconds, as measured at the start. `drafts` is empty if no model writes the drafts.
    """

    is_measured = True

    def __init__(self, steps: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        self.has_passes = bool(drafts)
        unused = {1: 1.0}
        step = _curve_through(steps)
        draft = _curve_through(drafts or unused)
        self._logs: FloatArray = np.concatenate([step, draft])
        distances = np.abs(_POINTS[:, None] - _POINTS)
        near = np.exp(-distances / _REACH)
        same_curve = np.eye(2)
        two_curves: FloatArray = np.kron(same_curve, near).astype(np.float64)
        local = _LOCAL**2 * two_curves
        self._most_uncertain: FloatArray = local + _SHARED**2
        self._covariance: FloatArray = local + _SHARED_AT_START**2

    def step(self, num_tokens: npt.ArrayLike) -> FloatArray:
        return self._seconds(_STEP, num_tokens)

    def draft(self, num_rows: npt.ArrayLike) -> FloatArray:
        if not self.has_passes:
            return np.zeros_like(num_rows, dtype=np.float64)
        return self._seconds(_DRAFT, num_rows)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        self._observe(_STEP, num_tokens, seconds)

    def observe_draft(self, num_rows: float, seconds: float) -> None:
        self._observe(_DRAFT, num_rows, seconds)

    def _seconds(self, curve: int, amounts: npt.ArrayLike) -> FloatArray:
        first = curve * len(_POINTS)
        end = first + len(_POINTS)
        logs = np.maximum.accumulate(self._logs[first:end])  # more tokens never take less time
        places = np.log2(np.maximum(amounts, 1.0))
        found: FloatArray = np.interp(places, _POINTS, logs)
        return np.exp(found)

    def _observe(self, curve: int, amount: float, seconds: float) -> None:
        """One update of the filter. The measured time is a weighted mean of two neighbouring points."""
        place = np.log2(max(amount, 1.0))
        place = min(place, _POINTS[-1])
        distances = np.abs(_POINTS - place)
        weights = np.zeros(len(self._logs))
        first = curve * len(_POINTS)
        end = first + len(_POINTS)
        near = 1 - 2 * distances
        weights[first:end] = np.maximum(near, 0)
        expected = weights @ self._logs
        surprise = np.log(max(seconds, 1e-6)) - expected
        limited = np.clip(surprise, _LEAST_SURPRISE, _MOST_SURPRISE)
        self._covariance += _RENEWAL * (self._most_uncertain - self._covariance)
        projected = self._covariance @ weights
        uncertainty = weights @ projected
        gain = projected / (_NOISE**2 + uncertainty)
        self._logs += gain * limited
        self._covariance -= np.outer(gain, projected)


def _curve_through(measured: Mapping[int, float]) -> FloatArray:
    """The logarithm of the seconds at each of _POINTS: straight lines through what was measured, and on behind it."""
    sizes: npt.NDArray[Any] = np.array(sorted(measured), dtype=np.float64)
    times = np.array([measured[size] for size in sorted(measured)])
    seconds = np.maximum.accumulate(times).clip(1e-6)
    amounts = 2.0**_POINTS
    found = np.interp(amounts, sizes, seconds)
    if len(sizes) > 1:
        longer = np.diff(seconds)[-1]
        more = np.diff(sizes)[-1]
        slope = longer / more
        beyond = amounts - sizes[-1]
        found += slope * np.maximum(beyond, 0)
    logs: FloatArray = np.log(found)
    return logs


def num_weights_read(model: ModelArchitecture) -> int:
    """About how many weights a step of one token reads."""
    spec = model.hidden_inputs
    joined = 0 if spec is None else spec.captured_size or 2 * model.hidden_size
    num_tokens = model.vocab_size if spec is None or spec.head_size is None else spec.head_size
    features = sum(each.mixer.num_features + each.mlp.num_features for each in model.layers)
    return model.hidden_size * (num_tokens + joined + features)
