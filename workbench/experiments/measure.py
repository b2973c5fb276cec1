"""Scores of one trained model on test rows, and its costs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import metrics
from ..calibration.models import ask_as_given, distribution_of
from ..core.outputs.class_scores import Binary
from ..core.outputs.options import meaning_of
from ..core.wrapped import Wrapped
from ..risk import Risk
from .environment import peak_memory
from .positions import batch_rows, has_class_positions, has_labels, labelled, target_names

if TYPE_CHECKING:
    from ..data import Data
    from ..data.splits import Split

BATCH_SIZE = 1024  # rows per prediction call
REGRESSION_SCORES = (  # in the order of a table's columns
    *("rmse", "mae", "nll", "crps", "calibration_error", "picp90", "mpiw90", "sharpness", "mixture_nll"),
    *("aurc", "risk_error_correlation", "aleatoric", "epistemic", "vacuitic"),
)


class PeakMemory:
    """Peak memory since the object was created: of the GPU if one is used, else of the process.

    Linux can reset the peak of a process; elsewhere the peak counts from the start of the process.

    Example:
        >>> PeakMemory().read() > 1
        True
    """

    def __init__(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def read(self) -> float | None:
        """Return the peak in MiB; None if the system does not report it."""
        if torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated() / 2**20
        try:  # not ru_maxrss, which a process inherits from its parent
            status = Path("/proc/self/status").read_text(encoding="utf-8")
        except OSError:
            return peak_memory()
        match = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
        return int(match[1]) / 2**10 if match else peak_memory()


def measure(wrapped: Any, plain: nn.Module, data: Data, held_out: Split | None) -> dict[str, float]:
    """Return scores on the test rows, and costs.

    A model without aleatoric risk gets a constant noise for each target column, its root mean squared error on the held-out training rows,
    so that likelihoods can be compared; its square is added to the square of the epistemic risk. `nll`, `crps` and the intervals are those of
    one distribution with the prediction and the total risk: sculpt's family, else Normal (Lakshminarayanan et al. 2017). `mixture_nll` is the
    negative log-likelihood of the exact mixture of all members, if they predict distributions. `aurc` and `risk_error_correlation` rank rows
    by the total risk, or by the vacuitic risk if there is no other.

    Pixels and tokens are weighted equally, and those without a class (-100) are ignored; a risk with one number per row does not rank them.
    Labels are weighted equally, each as a binary choice. For 2 to 8 target columns, scores that have a unit are computed per column,
    `rmse_NAME`, while `nll`, `calibration_error` and `picp90` are means over all values. For maps and series, all scores are means over all
    values.

    Args:
        wrapped: trained model.
        plain: model before wrapping, on the same device; the reference for `passes`.
        data: data set, of which the test rows are scored.
        held_out: training rows that were not trained on, for the constant noise; None: all training rows.

    Returns:
        Regression: rmse, mae, nll, mixture_nll, crps, calibration_error, picp90, mpiw90, sharpness. Classification: accuracy, nll, brier, ece;
        for pixels and tokens also mean_iou; for pixels, tokens and labels also error_auroc.
        Both: risk_error_correlation and aurc if rows differ in risk; the mean of each risk (the root mean square of standard deviations); and
        the costs: parameters, passes (floating-point operations of a prediction with risks, relative to the plain model) and predict_seconds.
    """
    wrapped.eval()
    device = next((p.device for p in wrapped.parameters()), torch.device("cpu"))
    x, target = data.test.x.to(device), data.test.y.to(device)
    with torch.no_grad():
        start = time.perf_counter()
        size = batch_rows(target, BATCH_SIZE)
        by_position = has_class_positions(data) or has_labels(data)
        if by_position:
            scores_of = _label_scores(wrapped) if has_labels(data) else lambda y: y
            pairs = zip(_answers(wrapped, x, size), target.split(size), strict=True)
            answers = labelled((scores_of(y), risk, labels) for (y, risk), labels in pairs)
        else:
            y, risk = _predict(wrapped, x, size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        if by_position:
            scores = _positions(*answers)
            if has_labels(data):
                del scores["mean_iou"]  # meaningless for labels, which are no regions of an image
        elif data.task == "classification":
            scores = _classes(y, risk, target)
        else:
            scores = _values(wrapped, data, held_out, y, risk, x, target)
        sample = x[: min(64, size)]
        passes = _operations(lambda: _predict(wrapped, sample)) / max(1, _operations(lambda: plain.eval()(sample)))
    return {
        **{name: float(value) for name, value in scores.items()},
        "parameters": sum(p.numel() for p in wrapped.parameters()),
        "passes": round(passes, 4),
        "predict_seconds": seconds,
    }


def _answers(wrapped: Any, x: Tensor, size: int) -> Iterator[tuple[Tensor, Risk]]:
    return (ask_as_given(wrapped, (rows,), bool(wrapped._workbench.methods)) for rows in x.split(size))


def _predict(wrapped: Any, x: Tensor, size: int = BATCH_SIZE) -> tuple[Tensor, Risk]:
    """Return predictions and risks in original units; a model without wrappers has no risks."""
    answers = list(_answers(wrapped, x, size))
    names = answers[0][1].names()
    risk = Risk(**{name: torch.cat([part[name] for _, part in answers]) for name in names})
    return torch.cat([y for y, _ in answers]), risk


def _values(
    wrapped: Any, data: Data, held_out: Split | None, y: Tensor, risk: Risk, x: Tensor, target: Tensor
) -> dict[str, Any]:
    family: Any = distribution_of(wrapped)
    size = batch_rows(target, BATCH_SIZE)
    parts = [Wrapped.predictive(wrapped, rows) for rows in x.split(size)] if _says_a_distribution(wrapped) else []
    if risk.aleatoric is not None:
        total = risk.total
    elif parts:  # cross-fitting has estimated the noise
        total = torch.cat([mixture.stddev for mixture in parts])
    else:
        rows = held_out if held_out is not None else data.train
        held_out_pairs = _predict(wrapped, rows.x.to(x.device), size)[0], rows.y.to(x.device)
        # each target column has its own unit and noise level
        columns = (
            zip(*(values.split(1, 1) for values in held_out_pairs), strict=True) if y.ndim == 2 else [held_out_pairs]
        )
        constant = torch.stack([metrics.rmse(*column) for column in columns]).to(y)
        epistemic = torch.zeros_like(y) if risk.epistemic is None else risk.epistemic
        total = (epistemic.square() + constant.square()).sqrt()
    scores: dict[str, Any] = {
        "nll": metrics.nll(y, total, target, family),
        "calibration_error": metrics.calibration_error(y, total, target, family),
        "picp90": metrics.picp(y, total, target, 0.9, family),
    }
    if parts:
        terms = torch.cat([part.log_prob(rows) for part, rows in zip(parts, target.split(size), strict=True)])
        if terms.shape == target.shape:  # the log-density of a joint distribution can't be averaged over columns
            scores["mixture_nll"] = -terms.double().mean()
    names = target_names(data, target)
    if not names:
        scores |= _in_units(y, risk, total, target, family)
        return {name: scores[name] for name in sorted(scores, key=REGRESSION_SCORES.index)}
    for i, name in enumerate(names):
        column_risk = Risk(**{kind: risk[kind] if risk[kind].ndim == 1 else risk[kind][:, i] for kind in risk.names()})
        column_scores = _in_units(y[:, i], column_risk, total[:, i], target[:, i], family)
        scores |= {f"{metric}_{name}": value for metric, value in column_scores.items()}
    return scores


def _in_units(y: Tensor, risk: Risk, total: Tensor, target: Tensor, family: Any) -> dict[str, Any]:
    """Return the scores that have the unit of the target, or rank rows by a risk that has it."""
    scores = {
        "rmse": metrics.rmse(y, target),
        "mae": metrics.mae(y, target),
        "crps": metrics.crps(y, total, target, family),
        "mpiw90": metrics.mpiw(y, total, 0.9, family),
        "sharpness": metrics.sharpness(total),
    }
    return scores | _ranked(risk, (y - target).abs()) | _levels(risk, squared=True)


def _label_scores(wrapped: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that turns the outputs of a multi-label model into log-scores [n, labels, 2] of no and yes.

    Raises:
        ValueError: the model was not wrapped with output="binary", so that the meaning of its outputs is unknown.
    """
    output = wrapped._workbench.output
    meaning = None if isinstance(output, Mapping) else meaning_of(output)
    if not isinstance(meaning, Binary):
        raise ValueError(
            f'to be scored on labels, a model must be wrapped with output="binary"; this one has output={output!r}'
        )
    return meaning.log_scores


def _positions(probs: Tensor, risk: Risk, labels: Tensor, of_rows: dict[str, Tensor]) -> dict[str, Any]:
    """Return the scores of the pixels or tokens that have a class; arguments as returned by `labelled`."""
    if not risk.names() and not of_rows:
        risk = Risk(total=torch.special.entr(probs).sum(-1))
    wrong = (probs.argmax(-1) != labels).double()
    scores = {
        "accuracy": metrics.accuracy(probs, labels),
        "mean_iou": metrics.mean_iou(probs, labels),
        "nll": metrics.categorical_nll(probs.clamp_min(torch.finfo(torch.float32).tiny), labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels),
    }
    ranking_risk = risk.total if risk.total is not None else risk.vacuitic
    if ranking_risk is not None and 0 < wrong.mean() < 1:
        scores["error_auroc"] = metrics.error_auroc(ranking_risk, wrong)
    return scores | _ranked(risk, wrong) | _levels(risk, squared=False) | _levels(Risk(**of_rows), squared=False)


def _classes(y: Tensor, risk: Risk, target: Tensor) -> dict[str, Any]:
    probs = y.double().softmax(-1)
    if not risk.names():
        risk = Risk(total=torch.special.entr(probs).sum(-1))
    scores = {
        "accuracy": metrics.accuracy(probs, target),
        "nll": metrics.categorical_nll(probs.clamp_min(torch.finfo(torch.float32).tiny), target),
        "brier": metrics.brier(probs, target),
        "ece": metrics.ece(probs, target),
    }
    return scores | _ranked(risk, (probs.argmax(-1) != target).double()) | _levels(risk, squared=False)


def _says_a_distribution(wrapped: Any) -> bool:
    from ..core.crossfit import committee_of
    from ..distributions.base import Distribution

    distributions = (method.distribution for method in wrapped._workbench.methods)
    by_risk = any(family.by_risk for family in distributions if isinstance(family, Distribution))
    return by_risk or committee_of(wrapped) is not None


def _ranked(risk: Risk, error: Tensor) -> dict[str, Tensor]:
    """Return scores of how well the risk ranks rows by error; the correlation only if risks and errors vary."""
    ranking_risk = risk.total if risk.total is not None else risk.vacuitic
    # a risk with one number per row can't rank pixels
    if ranking_risk is None or ranking_risk.numel() != error.numel():
        return {}
    ranking_risk, error = ranking_risk.flatten(), error.flatten()
    scores = {"aurc": metrics.aurc(ranking_risk, error)}
    if ranking_risk.unique().numel() > 1 and error.unique().numel() > 1:
        # shifted, since a vacuitic risk may be negative; the correlation depends only on the order
        scores["risk_error_correlation"] = metrics.risk_error_correlation(
            error, ranking_risk - ranking_risk.min(), torch.zeros_like(error)
        )
    return scores


def _levels(risk: Risk, squared: bool) -> dict[str, Tensor]:
    means = {}
    for name in risk.names():
        value = risk[name].double()
        means[name] = value.square().mean().sqrt() if squared and name != "vacuitic" else value.mean()
    return {name: value for name, value in means.items() if name != "total"}


def _operations(run: Any) -> int:
    """Count the floating-point operations of the matrix products and convolutions in `run`."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
