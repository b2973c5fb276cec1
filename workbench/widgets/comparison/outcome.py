"""What came out of a comparison: models, scores and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .findings import Findings
from .matrix import matrix_figure
from .preparation import Prepared

if TYPE_CHECKING:
    import pandas as pd


class Outcome:
    """What came out of the trainings of a comparison."""

    _findings: Findings
    _prepared: Prepared

    @property
    def models(self) -> dict[str, Any]:
        """The trained models by name, wrapped, in evaluation mode; those of `outdated` are among them."""
        return {kept.name: kept.wrapped for kept in self._findings.kept if kept.wrapped is not None}

    @property
    def histories(self) -> dict[str, Any]:
        """The course of each training, by name; see `workbench.History`."""
        return {kept.name: kept.history for kept in self._findings.kept}

    @property
    def errors(self) -> dict[str, BaseException]:
        """What failed, by name."""
        judged = {kept.name: kept.error for kept in self._findings.kept if kept.error is not None}
        return {**{name: error for name, (error, _) in self._findings.failed.items()}, **judged}

    @property
    def results(self) -> pd.DataFrame:
        """One row for each model that is trained with the present settings: metrics on the test rows, and costs.

        With several seeds or splits means over all of them; a model that was not trained on each is in `outdated`.
        NaN where there is nothing to measure. Models that are not ticked any more, that were stopped, or that were trained with other settings,
        from other weights or on other data can't be compared with these: they are in `outdated`.
        """
        return self._findings.frame()

    @property
    def standard_errors(self) -> pd.DataFrame:
        """The standard errors of `results`, over the splits or else over the seeds; NaN with one run for each model."""
        return self._findings.spread_frame()

    @property
    def outdated(self) -> pd.DataFrame:
        """One row for each trained model that is not of the present settings: what differs, and the columns of `results`."""
        differences = self._findings.differences
        frame = self._findings.frame(outdated=True)
        frame.insert(0, "differs", [differences.get(name, "") for name in frame.index])
        return frame

    @property
    def runs(self) -> pd.DataFrame:
        """One row for each training, by its number: settings, seed, split, when and by what versions, what differs now, scores.

        A training overwrites no other: with the settings of an earlier run entered again, that run is in `results` again.
        """
        return self._findings.run_frame()

    def matrix(self, **options: Any) -> Any:
        """All models of the present settings in one picture: a row each, prediction and risks in columns, the truth where it is known.

        Args:
            **options: of `workbench.plots.matrix`, such as rows, features and target.

        Returns:
            A matplotlib Figure; a cell that ends with it shows it.

        Raises:
            ValueError: nothing is trained with the present settings, or the data have no such picture.
        """
        return matrix_figure(self._findings, self._prepared.output, options)
