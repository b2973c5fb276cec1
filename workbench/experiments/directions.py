"""Which recorded numbers are metrics, and whether more or less of them is better, told by their names."""

from __future__ import annotations

import re

# as `workbench.metrics` names and judges them, and some that everybody uses; None: neither more nor less is better
METRICS: dict[str, bool | None] = {
    **dict.fromkeys(("accuracy", "auroc", "aupr", "risk_error_correlation", "r2", "f1", "log_likelihood"), True),
    **dict.fromkeys(("rmse", "mae", "mse", "nll", "crps", "loss", "error", "brier", "fpr95"), False),
    **dict.fromkeys(("categorical_nll", "mixture_nll", "mixture_crps", "sample_crps", "interval_score"), False),
    **dict.fromkeys(("ece", "max_ece", "adaptive_ece", "classwise_ece", "aurc", "augrc", "ause"), False),
    **dict.fromkeys(("calibration_error", "quantile_calibration_error", "mpiw", "sharpness"), False),
    **dict.fromkeys(("picp", "coverage"), None),
}
_WORD = f"(?P<metric>(?:ood_)?(?P<base>{'|'.join(sorted(METRICS, key=len, reverse=True))})[0-9]*)"
_LAST = re.compile(rf"(?:(?P<of>.+?)_)?{_WORD}")
_FIRST = re.compile(rf"{_WORD}_(?P<of>.+)")


def metric_of(name: str) -> tuple[str, str] | None:
    """What a metric is of, and its name, for names such as "vote_rmse" or "rmse_vote"; None for what is no known metric.

    Example:
        >>> metric_of("vote_sculpt_ood_auroc"), metric_of("picp90"), metric_of("rows_train")
        (('vote_sculpt', 'ood_auroc'), ('', 'picp90'), None)
    """
    found = _LAST.fullmatch(name) or _FIRST.fullmatch(name)
    return None if found is None else (found["of"] or "", found["metric"])


def higher_is_better(name: str) -> bool | None:
    """Whether more of a metric is better; None where neither is, or that is not known.

    Example:
        >>> higher_is_better("baseline_accuracy"), higher_is_better("vote_nll"), higher_is_better("vote_picp90")
        (True, False, None)
    """
    found = _LAST.fullmatch(name) or _FIRST.fullmatch(name)
    return None if found is None else METRICS[found["base"]]
