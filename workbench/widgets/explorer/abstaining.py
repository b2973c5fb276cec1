"""Which cases the explored model would refuse, and which of its risks is best for that."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from workbench.calibration import Selective
from workbench.metrics import aurc
from workbench.plots.selective import TIE_TOLERANCE
from workbench.widgets.common.predictions import rankings
from workbench.widgets.explorer.explored import Explored

RESAMPLES = 100  # bootstrap samples of the rows, to see whether one risk is better than another by more than chance


class Abstention(Explored):
    """Refusing the cases of highest risk; mixed into `Exploration`."""

    _area_texts: dict[tuple[str, ...], str]
    _by: str
    _coverage: float
    _selective: Selective | None

    @property
    def selective(self) -> Selective:
        """Risk and error of all cases, as from `workbench.selective`, by the risk that ranks them (by the total if "error" does)."""
        if self._selective is None:
            known = rankings(self._answers)
            by = self._by if self._by != "error" else "total" if "total" in known else known[0]
            if by == "error":
                raise ValueError(
                    "the plain baseline measures no risk to refuse cases by; wrap the model with vote, sculpt or neo"
                )
            self._selective = Selective(self.wrapped, by, self._value(by), self.refusal_error)
        return self._selective

    @property
    def coverage(self) -> float:
        """Share of cases that are answered; can be set."""
        return self._coverage

    @coverage.setter
    def coverage(self, coverage: float) -> None:
        self._coverage = checked_coverage(coverage)
        self._refresh("coverage")

    @property
    def threshold(self) -> float:
        """The highest risk that is still answered."""
        return self.selective.threshold(coverage=self._coverage)

    @property
    def abstained(self) -> Tensor:
        """Numbers of the test rows that would be refused, int64, highest risk first."""
        risk = self._value(self.selective.by)
        order = risk.sort(descending=True, stable=True).indices
        return self.rows[order[risk[order] > self.threshold]]

    @property
    def error(self) -> tuple[float, float]:
        """The mean error of the answered cases and of all cases; for classes, the share of wrong ones."""
        chosen = self.selective
        return chosen.error[chosen.risk <= self.threshold].mean().item(), chosen.error.mean().item()

    @property
    def refusals(self) -> dict[str, Tensor]:
        """The scores that could decide which cases are refused: each risk, and confidence, of `rows` [n], by name."""
        return {name: self._value(name) for name in self.rankings if name != "error"}

    @property
    def refusal_error(self) -> Tensor:
        """The error that refusing each of `rows` saves [n]: |prediction - target|, or for classes 1 where wrong and 0 where right."""
        if self._answers.probs is None:
            return self._value("error")
        return (self._answers.y != self._targets).float()

    @property
    def areas(self) -> dict[str, float]:
        """The area under the risk-coverage curve (AURC) of each risk over `rows`, lowest, that is best, first."""
        areas = {name: aurc(risk, self.refusal_error).item() for name, risk in self.refusals.items()}
        return dict(sorted(areas.items(), key=lambda item: item[1]))

    def areas_in_words(self) -> str:
        """Describe which risk is best for refusing cases, and where its lead over others may be chance; "" with a single risk."""
        key = (self.model, *self.refusals)
        if key not in self._area_texts:
            self._area_texts[key] = self._compared()
        return self._area_texts[key]

    def _compared(self) -> str:
        areas, risks, error = self.areas, self.refusals, self.refusal_error
        lowest_area = min(areas.values(), default=0.0)
        best = [name for name, area in areas.items() if area <= lowest_area * (1 + TIE_TOLERANCE)]
        others = [name for name in areas if name not in best]
        if not others:
            return ""
        generator = torch.Generator().manual_seed(0)
        differences: dict[str, list[float]] = {name: [] for name in others}
        for _ in range(RESAMPLES):  # paired: both risks on the same rows, so that their common variation cancels
            rows = torch.randint(len(error), (len(error),), generator=generator)
            of_best = aurc(risks[best[0]][rows], error[rows]).item()
            for name, gaps in differences.items():
                gaps.append(aurc(risks[name][rows], error[rows]).item() - of_best)
        # the best was found on these rows, so that every pair could have been the one with the largest difference (Bonferroni, 5 % together)
        reach = statistics.NormalDist().inv_cdf(1 - 0.05 / (len(areas) * (len(areas) - 1)))
        chance = {
            name for name, gaps in differences.items() if areas[name] - lowest_area < reach * statistics.stdev(gaps)
        }
        rest = ", ".join(f"{name} {areas[name]:.3g}{' (may be chance)' * (name in chance)}" for name in others)
        verb = "is" if len(best) == 1 else "are"
        return (
            f"{' and '.join(best)} {verb} best for refusing these rows: area under the curve {lowest_area:.3g}; {rest}"
        )


def checked_coverage(coverage: float) -> float:
    """Return a coverage as float, if it is above 0 and at most 1."""
    if not (isinstance(coverage, int | float) and math.isfinite(coverage) and 0 < coverage <= 1):
        raise ValueError(f"coverage must be above 0 and at most 1; found {coverage!r}")
    return float(coverage)


__all__ = ["Abstention", "checked_coverage"]
