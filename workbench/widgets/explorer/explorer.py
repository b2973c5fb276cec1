"""`Explorer`: explore trained models case by case, with widgets in a notebook or without a browser."""

from __future__ import annotations

from typing import Any

from ..common.labelled import explorable
from ..common.positions import takes_several
from ..common.saved import SavedOutput
from . import several_view
from .exploration import Exploration
from .scene import SavedPage, snapshot
from .several import SeveralExploration
from .several_view import SeveralView
from .view import ExplorerView


class Explorer(Exploration):
    """Explore a trained model case by case: rank cases by any risk, split it by cause, edit cases, and refuse those above a threshold.

    In a notebook it displays as a widget: a list ranked by a risk, the chosen case beside its nearest training cases, sliders to edit it, a
    plot of all cases with tooltips, and a slider for the share of cases that are answered. All of it can be set and read without a browser.
    The model predicts in evaluation mode; model and data are never changed.

    If a model is trained further, all rows are predicted again at the next selection, edit or display. A method with random draws, such as
    sample, predicts all cases in one batch for the ranking, and a single case and its edits under the same draws, so that differences are due
    to the edits.

    Rows may have several targets: maps, tokens, columns [n, k] or labels. Then the chosen row is drawn with its truth, prediction and risks, and
    there are no edits, neighbours or plot of all cases. A place in maps, tokens, steps and images can be clicked, reached by keys, or set with
    `explorer.place = (row, column)`; the predictions of all models there are shown below, and are in `explorer.at_place()`.

    Rows with several targets are ranked by one number each, over the positions that have a target (neither void nor padding): the mean of
    entropies and of vacuitic risk, the root mean square of standard deviations. As columns may differ in unit, each is first divided by the
    standard deviation of its training targets; `by="total of NAME"` ranks by one of up to eight columns or labels, in its own unit.

    Args:
        wrapped: trained wrapped model, or calibrated model; or a dict of them by name, such as the `models` of a `Comparison`. A menu then
            chooses the current model (`explorer.model`), and the predictions of all models for the chosen row are shown side by side. Row,
            place, edits, selection and filter stay when the model changes.
        data: a workbench Data, the name of one, or a pair (x, y), of whose rows a fifth become test rows; whole numbers in y are values if the
            model gives one value a row, and class numbers otherwise. Cases are test rows: images
            [n, channels, height, width] or [n, height, width], or table rows [n, features]; with several targets, any single tensor. Or
            dicts with "labels", as for `workbench.fit` (but no DataLoader), if the model depends on its first input only.
        by: ranking of the cases: a risk that the model measures, "confidence" (for classes) or "error". None: epistemic risk if measured,
            else the first risk.
        coverage: share of cases that are answered, above 0 and at most 1.
        k: number of nearest training cases shown.
        space: space of their distances: "inputs" (each column divided by its standard deviation) or "features" (the input of the last linear
            layer). None: features for images and a model with a linear layer, else inputs.
        max_rows: maximum number of test rows explored; of more rows a fixed random sample is taken, and the widget says so.

    Raises:
        TypeError: if the model is not wrapped, or data is of another type.
        NotFittedError: if a method, such as neo, has not seen training data yet.
        ValueError: if there are no test rows, rows contain NaN, or the outputs of the model do not fit the targets.

    Example:
        >>> from torch import nn
        >>> from workbench import data, fit, vote
        >>> diabetes = data.load("diabetes")
        >>> wrapped = vote.Wrapper(3)(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1)))
        >>> history = fit(wrapped, diabetes, epochs=3, progress=False)
        >>> explorer = Explorer(wrapped, diabetes, by="epistemic")
        >>> explorer.select(int(explorer.ranked[0])).edit({"body mass index": 40})
        Explorer(diabetes, row ..., edited: body mass index)
        >>> explorer.prediction.shape, explorer.risk.names(), len(explorer.neighbours.indices)
        (torch.Size([1]), ('epistemic', 'total'), 5)
    """

    _view: ExplorerView | None = None
    _saved: SavedOutput | None = None

    def __new__(cls, wrapped: Any = None, data: Any = None, **options: Any) -> Explorer:
        return object.__new__(SeveralExplorer if cls is Explorer and takes_several(explorable(wrapped, data)) else cls)

    @property
    def widget(self) -> Any:
        """The ipywidget, made on first access."""
        if self._view is None:
            self._view = self._make_view()
        return self._view.widget

    @property
    def message(self) -> str:
        """The last error shown in the widget; "" if there was none."""
        return "" if self._view is None else self._view.problem

    def snapshot(self) -> None:
        """Display the current view as a static picture, which needs no kernel: HTML with tooltips, and PNG."""
        self._refresh_if_trained()
        snapshot(self)
        if self._saved is not None:
            self._saved.clear()

    def _mime_(self) -> tuple[str, str]:
        """Return the page of a saved notebook for marimo, which shows no ipywidgets."""
        self._refresh_if_trained()
        return "text/html", SavedPage(self)()

    def _make_view(self) -> ExplorerView:
        def now() -> Any:
            return self.model, self.by, self.filters, self.selection.tolist(), self._model_versions

        self._saved = SavedOutput(SavedPage(self), now, f"{self!r} as it was saved")
        return ExplorerView(self, self._saved.style)

    def _edited(self) -> None:
        if self._view is not None:
            with self._view.guarded():
                super()._edited()

    def _refresh(self, what: str) -> None:
        if self._view is not None:
            with self._view.guarded():
                self._view.update(what)
                if self._saved is not None:
                    self._saved.update()

    def _ipython_display_(self) -> None:
        self._refresh_if_trained()
        widget = self.widget
        assert self._saved is not None
        self._saved.display(widget, repr(self))


class SeveralExplorer(SeveralExploration, Explorer):
    """The explorer that `Explorer` makes if rows have several targets."""

    def snapshot(self) -> None:
        """Display the current view as a static picture, which needs no kernel: HTML, and PNG."""
        self._refresh_if_trained()
        several_view.snapshot(self)
        if self._saved is not None:
            self._saved.clear()

    def _mime_(self) -> tuple[str, str]:
        self._refresh_if_trained()
        return "text/html", several_view.saved_page(self)

    def _make_view(self) -> ExplorerView:
        def now() -> Any:
            return self.model, self.by, self.row, self.coverage, self._model_versions

        self._saved = SavedOutput(lambda: several_view.saved_page(self), now, f"{self!r} as it was saved")
        return SeveralView(self, self._saved.style)


__all__ = ["Explorer"]
