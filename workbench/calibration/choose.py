"""`calibrate`: one function for all calibration methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import nn

from workbench.calibration.answers import Answers
from workbench.calibration.base import Calibrated
from workbench.calibration.collection import collect
from workbench.calibration.conformal import SplitConformal
from workbench.calibration.cross import CrossConformal
from workbench.calibration.models import check_model, output_of
from workbench.calibration.quantiles import QuantileRecalibration
from workbench.calibration.scaling import TemperatureScaling, VarianceScaling
from workbench.training.history import History, OutOfFold

Score = Literal["absolute", "normalized", "cqr", "lac", "aps", "raps"]
METHODS: dict[str, type[Calibrated]] = {
    "temperature": TemperatureScaling,
    "variance": VarianceScaling,
    "isotonic": QuantileRecalibration,
    "conformal": SplitConformal,
}


@overload
def calibrate(
    wrapped: nn.Module,
    data: History | OutOfFold,
    method: Literal["conformal"] | None = None,
    *,
    batch_size: int = 1024,
    seed: int = 0,
    score: Literal["normalized", "absolute"] = "normalized",
) -> CrossConformal: ...
@overload
def calibrate(
    wrapped: nn.Module, data: Any, method: Literal["temperature"], *, batch_size: int = 1024, seed: int = 0
) -> TemperatureScaling: ...
@overload
def calibrate(
    wrapped: nn.Module,
    data: Any,
    method: Literal["variance"],
    *,
    batch_size: int = 1024,
    seed: int = 0,
    per_output: bool = False,
) -> VarianceScaling: ...
@overload
def calibrate(
    wrapped: nn.Module,
    data: Any,
    method: Literal["isotonic"],
    *,
    batch_size: int = 1024,
    seed: int = 0,
    per_output: bool = False,
) -> QuantileRecalibration: ...
@overload
def calibrate(
    wrapped: nn.Module,
    data: Any,
    method: Literal["conformal"],
    *,
    batch_size: int = 1024,
    seed: int = 0,
    score: Score | None = None,
    by: Literal["total", "aleatoric", "epistemic", "vacuitic"] = "total",
    joint: bool = False,
    randomized: bool = True,
    penalty: float = 0.01,
    k_reg: int = 5,
    groups: Callable[[Any], Any] | Literal["class"] | None = None,
    weight: Callable[[Any], Any] | None = None,
) -> SplitConformal: ...
@overload
def calibrate(
    wrapped: nn.Module, data: Any, method: str | None = None, *, batch_size: int = 1024, seed: int = 0, **options: Any
) -> Calibrated: ...
def calibrate(
    wrapped: nn.Module, data: Any, method: str | None = None, *, batch_size: int = 1024, seed: int = 0, **options: Any
) -> Calibrated:
    """Calibrate a wrapped model on held-out rows, so that its risks, probabilities or intervals hold on new rows.

    The result is called like the wrapped model, `calibrated(x)` or `calibrated(x, return_risk=True)`, and can be calibrated once more. The
    wrapped model itself is not changed.

    Args:
        wrapped: a trained model wrapped by one of the wrappers, or a calibrated model.
        data: held-out rows: a pair (x, y) of tensors or arrays, a Split (`train, held = data.validation(0.2)` before training), a
            Dataset or a DataLoader of pairs, or dicts with "labels"; or the history of a cross-fitted training, `fit(..., folds=5)`, for which
            no rows are held out. y is float [n, outputs] for values, integer class numbers [n] for classes, 0 or 1 for a yes or no.
            Rows that the model was trained on, or that selected its best weights, make it look better than it is.
        method: "temperature" (class scores; the default for them), "variance" (standard deviations; the default for values), "isotonic"
            (quantiles of values) or "conformal" (intervals or sets with a guarantee).
        batch_size: rows per call of the model; a DataLoader has its own batch size.
        seed: seed of the model's random draws; the global random state is not touched.
        options: options of the method: per_output for "variance" and "isotonic"; score, by, joint, randomized, penalty, k_reg, groups, weight
            for "conformal".

    Returns:
        A `TemperatureScaling`, `VarianceScaling`, `QuantileRecalibration`, `SplitConformal` or `CrossConformal`, whose docstring describes
        its effect on predictions and risks. `interval(x, coverage=0.9)` returns (lower, upper) for values,
        `predict_set(x, coverage=0.9)` bool [rows, classes].

    Raises:
        TypeError: the model is not wrapped, does not return a tensor, or data is something else.
        ValueError: there is no such method, rows, predictions or risks are not suitable for it, or there are fewer than 10 rows ("conformal"
            needs coverage / (1 - coverage) of them, when it is called).

    Example:
        >>> from workbench import vote
        >>> wrapped = vote.Wrapper(3, output="logits")(nn.Linear(2, 3))
        >>> held_out = torch.zeros(30, 2), torch.arange(30) % 3
        >>> calibrated = calibrate(wrapped, held_out)
        >>> calibrated(torch.zeros(1, 2)).softmax(-1)[0].round(decimals=1).shape
        torch.Size([3])
        >>> calibrate(calibrated, held_out, "conformal", score="lac").predict_set(torch.zeros(4, 2), coverage=0.8).shape
        torch.Size([4, 3])
    """
    if isinstance(data, History | OutOfFold):
        if not (method is None or (isinstance(method, str) and method == "conformal")):
            raise ValueError(
                f"method: out-of-fold predictions make CV+ intervals, method='conformal'; found {method!r}"
            )
        return CrossConformal(wrapped, **options).fit(data)
    if method is not None and not (isinstance(method, str) and method in METHODS):
        raise ValueError(f"method must be one of {', '.join(METHODS)}; found {method!r}")
    check_model(wrapped)
    if method is not None:
        return METHODS[method](wrapped, **options).fit(data, batch_size=batch_size, seed=seed)
    form = output_of(wrapped)

    def suited_to(answers: Answers) -> Calibrated:
        return METHODS["temperature" if answers.labels else "variance"](wrapped, **options)

    answers = collect(
        wrapped,
        data,
        risk=form == "values",
        batch_size=batch_size,
        seed=seed,
        check=lambda answers: suited_to(answers).check(answers),
    )
    return suited_to(answers).fit_to(answers, seed)
