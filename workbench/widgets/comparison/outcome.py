"""Results of a comparison: models, scores and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .findings import Findings
from .matrix import matrix_figure
from .preparation import Prepared

if TYPE_CHECKING:
    import pandas as pd


class Outcome:
    """Results of the trainings of a comparison; base class of `Comparison`."""

    _findings: Findings
    _prepared: Prepared

    @property
    def models(self) -> dict[str, Any]:
        """The trained wrapped models by name, in evaluation mode, including those of `outdated`."""
        return {kept.name: kept.wrapped for kept in self._findings.kept if kept.wrapped is not None}

    @property
    def histories(self) -> dict[str, Any]:
        """The history of each training, by name; see `workbench.History`."""
        return {kept.name: kept.history for kept in self._findings.kept}

    @property
    def errors(self) -> dict[str, BaseException]:
        """The exceptions of training and evaluation, by name."""
        of_evaluation = {kept.name: kept.error for kept in self._findings.kept if kept.error is not None}
        return {**{name: error for name, (error, _) in self._findings.failed.items()}, **of_evaluation}

    @property
    def results(self) -> pd.DataFrame:
        """One row for each model trained with the current settings: metrics on the test rows, and costs.

        With several seeds or splits, these are means over all of them. NaN where a metric does not apply. Models that are not comparable are
        in `outdated`: those not ticked any more, not trained on each seed and split, stopped early, or trained with other settings, from other
        weights or on other data.
        """
        return self._findings.frame()

    @property
    def standard_errors(self) -> pd.DataFrame:
        """The standard errors of `results`, over the splits or else over the seeds; NaN with one run per model."""
        return self._findings.spread_frame()

    @property
    def outdated(self) -> pd.DataFrame:
        """One row for each model not trained with the current settings: what differs, and the columns of `results`."""
        differences = self._findings.differences
        frame = self._findings.frame(outdated=True)
        frame.insert(0, "differs", [differences.get(name, "") for name in frame.index])
        return frame

    @property
    def runs(self) -> pd.DataFrame:
        """One row for each run, by number: settings, seed, split, time, software versions, what differs from the current settings, scores.

        No run overwrites another: if the settings of an earlier run are entered again, that run is in `results` again.
        """
        return self._findings.run_frame()

    def matrix(self, **options: Any) -> Any:
        """Draw all models trained with the current settings: a row for each, prediction and risks in columns, and the truth if known.

        Args:
            **options: options of `workbench.plots.matrix`, such as rows, features and target.

        Returns:
            A matplotlib Figure, which a cell that ends with it displays.

        Raises:
            ValueError: if nothing is trained with the current settings, or `plots.matrix` can't draw the data.
        """
        return matrix_figure(self._findings, self._prepared.output, options)
