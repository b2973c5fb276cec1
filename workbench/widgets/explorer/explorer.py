"""`Explorer`: look into one trained model, case by case; with widgets in a notebook, and the same without a browser."""

from __future__ import annotations

from typing import Any

from workbench.errors import require

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
    """One trained model, case by case: ranked by any risk, split by cause, edited by hand, and refused above a threshold.

    In a notebook the object shows itself: a list ranked by a risk, the chosen case beside its nearest training cases, sliders that
    change it, a map of all cases whose points say more under the pointer, and a slider for the share of cases that are answered. All
    of it can be set and read without a browser; the model is asked in evaluation mode and, like the data, never changed.

    The ranking is made once: after more training make a new object. A method that draws at random, such as sample, is asked about all
    cases in one batch for the ranking, and about a single case and its edits with the same draws, so that what differs is the edit's doing.

    Rows may have several targets: maps, tokens, columns [n, k] or labels. Then the chosen row is drawn with its truth, prediction and risks, and
    edits, neighbours and the map of all cases are left out. A place of maps, tokens, steps and images can be clicked, walked to by keys, or set,
    `explorer.place = (row, column)`; what all models say there stands below, and in `explorer.at_place()`.

    Rows of several targets are ranked by one number each, over the positions that have a target (neither void nor padding): the mean of
    entropies and of vacuitic risk, the root mean square of standard deviations. Columns may differ in unit, so that each is divided by the
    standard deviation of its training targets before; `by="total of NAME"` ranks by one of up to eight columns or labels, in its own unit.

    Args:
        wrapped: what a wrapper made of a model, trained; or a calibrated model. Or several of them, a dict by name, such as the `models` of a
            `Comparison`: a list chooses which one is looked at (`explorer.model`), and what all say about the chosen row stands side by side.
            Row, place, edits, selection and filter stay when the model changes.
        data: a workbench Data, the name of one, or a pair (x, y), a fifth of whose rows become the test rows. Cases are test rows: of
            images [n, channels, height, width] or [n, height, width], or of tables [n, features]; with several targets of any one tensor. Or
            dicts with "labels", as for `workbench.fit`, but no DataLoader, of a model that answers from its first input alone.
        by: what ranks the cases: a risk that the model measures, "confidence" (for classes) or "error"; None: epistemic risk if there
            is one, else the first.
        coverage: share of cases that are answered, above 0 and at most 1.
        k: how many nearest training cases are shown.
        space: where they are near: "inputs" (each column divided by its standard deviation) or "features" (what enters the last linear
            layer); None: features for images with a linear layer, else inputs.
        max_rows: how many test rows are asked at most; of more a part is drawn, always the same, and the widget says so.

    Raises:
        TypeError: the model is not wrapped, or data is something else.
        NotFittedError: a method, such as neo, has seen no training data yet.
        ValueError: there are no test rows, rows hold NaN, or the model does not give numbers or scores that fit the targets.

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
        """The ipywidget; made when it is first asked for."""
        if self._view is None:
            self._view = self._make_view()
        return self._view.widget

    @property
    def message(self) -> str:
        """What went wrong last in the widget; "" if nothing did."""
        return "" if self._view is None else self._view.problem

    def snapshot(self) -> None:
        """Display what can be seen now as a static picture: HTML with hover, and PNG; it needs no kernel."""
        self._notice_training()
        snapshot(self)
        if self._saved is not None:
            self._saved.clear()

    def _mime_(self) -> tuple[str, str]:
        """What marimo shows, which shows no ipywidgets: the page of a saved notebook."""
        self._notice_training()
        return "text/html", SavedPage(self)()

    def _make_view(self) -> ExplorerView:
        def now() -> Any:
            return self.model, self.by, self.filters, self.selection.tolist(), self._asked_of

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
        self._notice_training()
        require("IPython.display").display(self.widget)
        if self._saved is not None:
            self._saved.display()


class SeveralExplorer(SeveralExploration, Explorer):
    """The explorer that `Explorer` makes where rows have several targets."""

    def snapshot(self) -> None:
        """Display what can be seen now as a static picture: HTML, and PNG; it needs no kernel."""
        self._notice_training()
        several_view.snapshot(self)
        if self._saved is not None:
            self._saved.clear()

    def _mime_(self) -> tuple[str, str]:
        self._notice_training()
        return "text/html", several_view.saved_page(self)

    def _make_view(self) -> ExplorerView:
        def now() -> Any:
            return self.model, self.by, self.row, self.coverage, self._asked_of

        self._saved = SavedOutput(lambda: several_view.saved_page(self), now, f"{self!r} as it was saved")
        return SeveralView(self, self._saved.style)


__all__ = ["Explorer"]
