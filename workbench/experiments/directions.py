"""Recognition of metrics by the names of recorded numbers, and whether higher values of them are better."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

# common metrics besides those of `workbench.metrics`; None: neither higher nor lower is better
OTHERS: dict[str, bool | None] = {
    **dict.fromkeys(("r2", "f1", "log_likelihood"), True),
    **dict.fromkeys(("mse", "loss", "error", "sample_crps"), False),
    "coverage": None,
}
_WIDTHS = ("mpiw", "sharpness")
_COVERAGES = ("picp", "coverage")
_DEFAULT_LEVEL = "90"  # percent, for metric names without a level


def directions() -> dict[str, bool | None]:
    """Return, for each metric name, whether higher is better. Imports torch."""
    from ..metrics.registry import METRICS  # the package registers all of its functions

    return {**OTHERS, **{name: info.higher_is_better for name, info in METRICS.items()}}


@functools.cache
def _patterns(metrics: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the names that end with a metric and of those that begin with one."""
    word = f"(?P<metric>(?:ood_)?(?P<base>{'|'.join(sorted(metrics, key=len, reverse=True))})[0-9]*)"
    return re.compile(rf"(?:(?P<of>.+?)_)?{word}"), re.compile(rf"{word}_(?P<of>.+)")


def _match(name: str) -> re.Match[str] | None:
    last, first = _patterns(tuple(directions()))
    return last.fullmatch(name) or first.fullmatch(name)


def metric_of(name: str) -> tuple[str, str] | None:
    """Split a name such as "vote_rmse" or "rmse_vote" into subject and metric; None if it contains no known metric.

    Example:
        >>> metric_of("vote_sculpt_ood_auroc"), metric_of("picp90"), metric_of("rows_train")
        (('vote_sculpt', 'ood_auroc'), ('', 'picp90'), None)
    """
    match = _match(name)
    return None if match is None else (match["of"] or "", match["metric"])


def higher_is_better(name: str) -> bool | None:
    """Return whether higher values of a metric are better; None if neither direction is, or the metric is unknown.

    Example:
        >>> higher_is_better("baseline_accuracy"), higher_is_better("vote_nll"), higher_is_better("vote_picp90")
        (True, False, None)
    """
    match = _match(name)
    return None if match is None else directions()[match["base"]]


def may_be_best(name: str, numbers: Mapping[str, float | None]) -> bool:
    """Return whether a value may count as best: interval widths may only if the coverage, rounded to percent, reaches its level.

    Args:
        name: name of the metric.
        numbers: all numbers recorded with it, by name, among which its coverage is looked up.

    Example:
        >>> [may_be_best("mpiw90", {"picp90": covered}) for covered in (0.5, 0.91)], may_be_best("rmse", {})
        ([False, True], True)
    """
    metric = (metric_of(name) or ("", ""))[1]
    width = re.fullmatch(rf"(?:ood_)?({'|'.join(_WIDTHS)})([0-9]*)", metric)
    if width is None:
        return True
    level = width[2] or _DEFAULT_LEVEL
    suffixes = (level, "") if level == _DEFAULT_LEVEL else (level,)
    for coverage in (f"{word}{suffix}" for word in _COVERAGES for suffix in suffixes):
        observed = numbers.get(name.replace(f"{width[1]}{width[2]}", coverage))
        if observed is not None:
            return round(observed, 2) >= int(level) / 100
    return False
