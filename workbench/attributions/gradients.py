"""Which numbers of single inputs carry the prediction and each risk, by gradients along the path from a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.attributions.occlusion import cover
from workbench.attributions.one_input import one_input
from workbench.calibration.answers import log_probabilities
from workbench.calibration.models import ask, check_model, output_of
from workbench.calibration.ranked_rows import row_risk
from workbench.console import progress_bar
from workbench.core.batches.rows import bad_rows, first_weight, place
from workbench.core.method import evaluating
from workbench.engine.effects.private_random import own_random
from workbench.engine.tree import tree_map
from workbench.errors import as_count


@dataclass(frozen=True, eq=False)
class IntegratedGradients:
    """Attributions of the prediction and of each risk to each number of the inputs; see `integrated_gradients`.

    Args:
        values: attributions by name ("prediction" and each risk), float64, shaped like the inputs.
        before: prediction and risks for the inputs by name, each [n].
        baseline: prediction and risks for the baseline by name, each [n].
        left_out: risks whose gradients do not add up, each with the reason.
    """

    values: Mapping[str, Tensor]
    before: Mapping[str, Tensor]
    baseline: Mapping[str, Tensor]
    left_out: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the prediction and the risks with attributions."""
        return tuple(self.values)

    @property
    def gap(self) -> dict[str, Tensor]:
        """Sum of each row's attributions minus (before - baseline) by name, each [n]; zero for the exact integral."""
        return {
            name: value.flatten(1).sum(1) - (self.before[name] - self.baseline[name])
            for name, value in self.values.items()
        }

    def __repr__(self) -> str:
        shape = list(next(iter(self.values.values())).shape)
        missing = f"; without {', '.join(self.left_out)}" if self.left_out else ""
        return f"IntegratedGradients({shape}: {', '.join(self.names)}{missing})"


@torch.inference_mode(False)  # also enables gradients, where a notebook has turned them off
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
    """Attribute each risk and the prediction to the numbers of single inputs, compared with a baseline, by integrated gradients.

        a_i = (x_i - b_i) * integral over t from 0 to 1 of d r / d x_i at b + t (x - b)

    (Sundararajan, Taly and Yan, Axiomatic attribution for deep networks, 2017). The attributions of a row sum to r(x) - r(b). This is checked:
    if the sum of a risk is off, its gradients are cut off on the way or the risk jumps, and it is left out. A positive attribution means that
    the number makes the risk higher than at the baseline.

    Args:
        wrapped: a trained wrapped model, or a calibrated one. It is evaluated in evaluation mode and never changed.
        x: images, rows of a table, or other floating-point inputs [n, ...]; or a tuple of positional or dict of keyword inputs.
        of: which of several inputs to use, by position or name.
        names: "prediction" or risks; an error is raised for those that can't be attributed. None: all that can be; `left_out` says why others
            can't.
        baseline: b, a number or a tensor that broadcasts to a row. None: the mean over `x`, for images the mean of each channel.
        steps: number of Gauss-Legendre nodes on the path.
        tolerance: how far off the sum may be, relative to the sum of the row's absolute attributions.
        batch_size: rows evaluated at once.
        seed: seed of random draws, which are the same at each node.
        progress: whether to show a progress bar if it takes more than two seconds.

    Returns:
        The attributions: of risks in their units, of "prediction" in those of the value, or of the probability of the class predicted for
        x. With several outputs, a row's risk is their root mean square, and the prediction their mean.

    Raises:
        TypeError: if the model is not wrapped, or x is no tensor.
        ValueError: if x holds integers, such as tokens, or NaN; if the baseline does not fit; or if a named risk can't be attributed.

    Example:
        >>> from workbench import vote
        >>> attribution = integrated_gradients(vote.Wrapper(3)(nn.Linear(4, 1)), torch.rand(2, 4), baseline=0.5)
        >>> attribution.names, attribution.values["epistemic"].shape, bool(attribution.gap["prediction"].abs().max() < 1e-5)
        (('prediction', 'epistemic', 'total'), torch.Size([2, 4]), True)
    """
    check_model(wrapped)
    form = output_of(wrapped)
    chosen, with_others = one_input(x, of, "floating-point numbers")
    _check(chosen, steps, tolerance)
    start = cover(chosen, baseline) if chosen.ndim in (3, 4) or baseline is not None else chosen.mean(0)
    like = first_weight(wrapped)
    nodes, weights = (torch.from_numpy(values) for values in np.polynomial.legendre.leggauss(steps))
    parts: list[tuple[dict[str, Tensor], ...]] = []
    left_out: dict[str, str] = {}
    batches = torch.arange(len(chosen)).split(batch_size)
    with progress_bar(total=len(batches) * steps, desc="gradients", delay=2, disable=not progress, leave=False) as bar:
        for rows in batches:
            inputs = tree_map(lambda tensor, rows=rows: tensor[rows], with_others(chosen))
            path = _PathIntegral(wrapped, form, inputs, of, chosen[rows], start, like, seed)
            for node, weight in zip(((nodes + 1) / 2).tolist(), (weights / 2).tolist(), strict=True):
                path.step(node, weight)
                bar.update()
            parts.append((path.attributions(), path.before, path.baseline))
            left_out |= path.left_out
    values, before, at_baseline = (_joined([part[k] for part in parts]) for k in range(3))
    kept = {name: value for name, value in values.items() if name not in left_out}
    left_out |= _incomplete(IntegratedGradients(kept, before, at_baseline, left_out), tolerance)
    requested = _requested(names, before)
    refused = {name: why for name, why in left_out.items() if name in requested}
    if (names is not None and refused) or len(refused) == len(requested):
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"{reasons}. attributions.occlusion and permutation_importance need no gradients")
    return IntegratedGradients(
        {name: kept[name] for name in requested if name not in left_out}, before, at_baseline, refused
    )


def _incomplete(integrated: IntegratedGradients, tolerance: float) -> dict[str, str]:
    """Return the names whose attributions do not add up to the difference to the baseline, each with the reason."""
    reasons: dict[str, str] = {}
    for name, gap in integrated.gap.items():
        before, baseline = integrated.before[name], integrated.baseline[name]
        share = gap.abs() / integrated.values[name].abs().flatten(1).sum(1).clamp_min(1e-12)
        is_off = (share > tolerance) & (gap.abs() > 1e-4 * (before.abs() + baseline.abs()))
        if bool(is_off.any()):
            row = int(is_off.nonzero()[0, 0])
            reasons[name] = (
                f"the sum of row {row} is {gap[row].item():+.3g} off the difference of {(before - baseline)[row].item():.3g} to the baseline: "
                "take more steps; if it stays, gradients are cut off on their way, or it jumps"
            )
    return reasons


def _requested(names: Sequence[str] | None, values: Mapping[str, Tensor]) -> list[str]:
    unknown = [name for name in names or () if name not in values]
    if unknown:
        raise ValueError(f"names: the model gives {', '.join(values)}; found {', '.join(map(repr, unknown))}")
    return [name for name in values if names is None or name in names]


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class _PathIntegral:
    """Gradients summed over nodes on the path from the baseline to some rows."""

    def __init__(
        self, wrapped: Any, form: str, inputs: Any, of: Any, x: Tensor, start: Tensor, like: Tensor, seed: int
    ) -> None:
        self._model, self._form, self._inputs, self._of, self._seed = wrapped, form, inputs, of, seed
        self._like = like
        self._x, self._start = (place(value, like.device, like.dtype) for value in (x, start.expand_as(x)))
        self._classes: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self.left_out: dict[str, str] = {}
        with torch.no_grad():
            self.before = self._evaluate(self._x)
            self.baseline = self._evaluate(self._start)

    def _evaluate(self, x: Tensor, graph: bool = False) -> dict[str, Tensor]:
        """One number per row for the prediction and each risk, [n] by name."""
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
            self._classes = logs.argmax(-1) if self._classes is None else self._classes  # those of x, evaluated first
            predicted = logs.exp().gather(-1, self._classes[..., None])
        numbers = {"prediction": predicted.reshape(len(y), -1).mean(1)}
        numbers |= {name: row_risk(y, risks, name, self._form) for name in risks.names()}
        return numbers if graph else {name: value.double().cpu() for name, value in numbers.items()}

    def step(self, node: float, weight: float) -> None:
        """Add the weighted gradients at a node, a position from 0 (baseline) to 1 (x)."""
        x = (self._start + node * (self._x - self._start)).requires_grad_()
        with torch.enable_grad():
            numbers = self._evaluate(x, graph=True)
        for name, value in numbers.items():
            (gradient,) = (
                torch.autograd.grad(value.sum(), x, retain_graph=True, allow_unused=True)
                if value.requires_grad
                else (None,)
            )
            if gradient is None:
                self.left_out[name] = "it has no gradient with regard to the input"
                gradient = torch.zeros_like(x)
            elif not bool(gradient.isfinite().all()):
                self.left_out[name] = "its gradient is NaN or infinite on the way, as where all voters agree"
            self._sums[name] = self._sums.get(name, 0.0) + weight * gradient.double()

    def attributions(self) -> dict[str, Tensor]:
        """Return the summed gradients times (x - baseline), by name."""
        difference = (self._x - self._start).double()
        return {name: (difference * value).cpu() for name, value in self._sums.items()}


def _check(x: Tensor, steps: Any, tolerance: Any) -> None:
    if not x.is_floating_point():
        raise ValueError(
            f"x holds whole numbers ({x.dtype}), which have no gradient; attributions.occlusion takes tokens, and images after x.float()"
        )
    if x.ndim < 2 or not x.numel():
        raise ValueError(f"x has shape {list(x.shape)}; expected [n, ...] with at least one row")
    if len(bad := bad_rows(x)):
        raise ValueError(f"x is NaN or infinite in {len(bad)} of {len(x)} rows, first in row {int(bad[0])}")
    as_count("steps", steps)
    if not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise ValueError(f"tolerance: expected a share between 0 and 1; found {tolerance!r}")


__all__ = ["IntegratedGradients", "integrated_gradients"]
