"""Which numbers of single inputs carry the prediction and each risk, by gradients along the way from a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.attributions.occlusion import cover
from workbench.attributions.one_input import one_input
from workbench.calibration.abstention import row_risk
from workbench.calibration.answers import log_probabilities
from workbench.calibration.base import ask, check_model, output_of
from workbench.core.batches.rows import bad_rows, place
from workbench.core.method import evaluating
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import tree_map


@dataclass(frozen=True, eq=False)
class IntegratedGradients:
    """What each number of the inputs adds to the prediction and to each risk; see `integrated_gradients`.

    Args:
        values: by name, "prediction" and each risk: attributions float64, shaped like the inputs.
        before: by name what the model says of the inputs, [n].
        baseline: by name what it says of the baseline, [n].
        left_out: risks that have no gradients that add up, and why.
    """

    values: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    baseline: Mapping[str, Tensor]
    left_out: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """What attributions are known of."""
        return tuple(self.values)

    @property
    def gap(self) -> dict[str, Tensor]:
        """By name how far the sum of a row is from before - baseline, [n]; the integral would have none."""
        return {
            name: value.flatten(1).sum(1) - (self.before[name] - self.baseline[name])
            for name, value in self.values.items()
        }

    def __repr__(self) -> str:
        shape = list(next(iter(self.values.values())).shape)
        without = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        return f"IntegratedGradients({shape}: {', '.join(self.names)}{without})"


def integrated_gradients(
    wrapped: nn.Module,
    x: Any,
    *,
    of: int | str | None = None,
    names: Sequence[str] | None = None,
    baseline: float | Tensor | None = None,
    steps: int = 64,
    tolerance: float = 0.05,
    batch_size: int = 256,
    seed: int = 0,
    progress: bool = True,
) -> IntegratedGradients:
    """Say how much each number of single inputs adds to each risk and the prediction, compared with a baseline, by integrated gradients.

        a_i = (x_i - b_i) * integral over t from 0 to 1 of d r / d x_i at b + t (x - b)

    (Sundararajan, Taly and Yan, Axiomatic attribution for deep networks, 2017). The numbers of a row sum to r(x) - r(b). That is checked: a
    risk whose sum is off has gradients that the method cuts off on their way, or jumps, and none of its numbers is given. Above 0: the number
    makes the risk higher than it is at the baseline.

    Args:
        wrapped: what a wrapper made of a model, trained; or a calibrated model. It is asked in evaluation mode and never changed.
        x: images, rows of a table, or other inputs [n, ...] of floating-point numbers; or a tuple of positional or dict of keyword inputs.
        of: which of several inputs, by place or name.
        names: "prediction" or risks; those that can't be given are refused. None: all that can be given; `left_out` says why others can't.
        baseline: b: a number, or a tensor that broadcasts to a row. None: the mean over `x`, of images the mean of each channel.
        steps: places on the way, those of Gauss and Legendre.
        tolerance: how far off the sum may be, as a share of the sum of all sizes of the row.
        batch_size: rows asked for at once.
        seed: of random draws; each place on the way is asked under the same ones.
        progress: whether to show a bar where it takes more than two seconds.

    Returns:
        The attributions; of risks in their units, of "prediction" in that of the value, or of the probability of the class that is predicted for
        x. Of several outputs a row's risk is their root mean square, and the prediction their mean.

    Raises:
        TypeError: the model is not wrapped, or x is no tensor.
        ValueError: x holds whole numbers, such as tokens, or NaN; the baseline does not fit; or what is asked for by name can't be given.

    Example:
        >>> from workbench import vote
        >>> found = integrated_gradients(vote.Wrapper(3)(nn.Linear(4, 1)), torch.rand(2, 4), baseline=0.5)
        >>> found.names, found.values["epistemic"].shape, bool(found.gap["prediction"].abs().max() < 1e-5)
        (('prediction', 'epistemic', 'total'), torch.Size([2, 4]), True)
    """
    check_model(wrapped)
    form = output_of(wrapped)
    chosen, with_others = one_input(x, of, "floating-point numbers")
    _check(chosen, steps, tolerance)
    start = cover(chosen, baseline) if chosen.ndim in (3, 4) or baseline is not None else chosen.mean(0)
    like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(steps))
    parts: list[tuple[dict[str, Tensor], ...]] = []
    without: dict[str, str] = {}
    from tqdm.auto import tqdm

    rows = torch.arange(len(chosen)).split(batch_size)
    with tqdm(total=len(rows) * steps, desc="gradients", delay=2, disable=not progress, leave=False) as bar:
        for some in rows:
            inputs = tree_map(lambda tensor, some=some: tensor[some], with_others(chosen))
            walk = _Walk(wrapped, form, inputs, of, chosen[some], start, like, seed)
            for node, weight in zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True):
                walk.step(node, weight)
                bar.update()
            parts.append((walk.attributions(), walk.before, walk.baseline))
            without |= walk.without
    values, before, after = (_joined([part[k] for part in parts]) for k in range(3))
    kept = {name: value for name, value in values.items() if name not in without}
    result = IntegratedGradients(kept, before, after, without)
    for name, gap in result.gap.items():
        share = gap.abs() / kept[name].abs().flatten(1).sum(1).clamp_min(1e-12)
        is_off = (share > tolerance) & (gap.abs() > 1e-4 * (before[name].abs() + after[name].abs()))
        if bool(is_off.any()):
            row = int(is_off.nonzero()[0, 0])
            difference = (before[name] - after[name])[row].item()
            without[name] = (
                f"the sum of row {row} is {gap[row].item():+.3g} off the difference of {difference:.3g} to the baseline: take more steps; if it "
                "stays, gradients are cut off on their way, or it jumps"
            )
    unknown = [name for name in names or () if name not in before]
    if unknown:
        raise ValueError(f"names: the model gives {', '.join(before)}; found {', '.join(map(repr, unknown))}")
    asked = [name for name in before if names is None or name in names]
    refused = {name: why for name, why in without.items() if name in asked}
    if (names is not None and refused) or len(refused) == len(asked):
        said = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"{said}. attributions.occlusion and permutation_importance need no gradients")
    return IntegratedGradients({name: kept[name] for name in asked if name not in without}, before, after, refused)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class _Walk:
    """From the baseline to some rows: gradients at places on the way, gathered."""

    def __init__(
        self, wrapped: Any, form: str, inputs: Any, of: Any, x: Tensor, start: Tensor, like: Tensor, seed: int
    ) -> None:
        self._model, self._form, self._inputs, self._of, self._seed = wrapped, form, inputs, of, seed
        self._like = like
        self._x, self._start = (place(value, like.device, like.dtype) for value in (x, start.expand_as(x)))
        self._classes: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self.without: dict[str, str] = {}
        with torch.no_grad():
            self.before = self._ask(self._x)
            self.baseline = self._ask(self._start)

    def _ask(self, x: Tensor, graph: bool = False) -> dict[str, Tensor]:
        """One number for each row [n]: of the prediction, and of each risk."""
        inputs: Any = place(self._inputs, self._like.device, self._like.dtype)
        if self._of is None:
            inputs = x
        elif isinstance(inputs, Mapping):
            inputs = {**inputs, self._of: x}
        else:
            inputs = tuple(x if i == self._of else value for i, value in enumerate(inputs))
        with own_random(self._seed, self._like.device), evaluating(self._model, whole=True):
            y, risks = ask(self._model, inputs, True)
        predicted = y
        if self._form != "values":
            logs = log_probabilities(y, self._form)
            self._classes = logs.argmax(-1) if self._classes is None else self._classes  # of x, which is asked first
            predicted = logs.exp().gather(-1, self._classes[..., None])
        numbers = {"prediction": predicted.reshape(len(y), -1).mean(1)}
        numbers |= {name: row_risk(y, risks, name, self._form) for name in risks.names()}
        return numbers if graph else {name: value.double().cpu() for name, value in numbers.items()}

    def step(self, node: float, weight: float) -> None:
        """Add the gradients at a place, a share of the way."""
        x = (self._start + node * (self._x - self._start)).requires_grad_()
        with torch.enable_grad():
            numbers = self._ask(x, graph=True)
        for name, value in numbers.items():
            (gradient,) = (
                torch.autograd.grad(value.sum(), x, retain_graph=True, allow_unused=True)
                if value.requires_grad
                else (None,)
            )
            if gradient is None:
                self.without[name] = "it has no gradient with regard to the input"
                gradient = torch.zeros_like(x)
            elif not bool(gradient.isfinite().all()):
                self.without[name] = "its gradient is NaN or infinite on the way, as where all voters agree"
            self._sums[name] = self._sums.get(name, 0.0) + weight * gradient.double()

    def attributions(self) -> dict[str, Tensor]:
        """What has been gathered, times the way."""
        way = (self._x - self._start).double()
        return {name: (way * value).cpu() for name, value in self._sums.items()}


def _check(x: Tensor, steps: Any, tolerance: Any) -> None:
    if not x.is_floating_point():
        raise ValueError(
            f"x holds whole numbers ({x.dtype}), which have no gradient; attributions.occlusion takes tokens, and images after x.float()"
        )
    if x.ndim < 2 or not x.numel():
        raise ValueError(f"x has shape {list(x.shape)}; expected [n, ...] with at least one row")
    if len(bad := bad_rows(x)):
        raise ValueError(f"x is NaN or infinite in {len(bad)} of {len(x)} rows, first in row {int(bad[0])}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1; found {steps!r}")
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise ValueError(f"tolerance: expected a share between 0 and 1; found {tolerance!r}")


__all__ = ["IntegratedGradients", "integrated_gradients"]
