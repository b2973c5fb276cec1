"""`Explorer`: look into one trained model, case by case; with widgets in a notebook, and the same without a browser."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from workbench.calibration import Selective
from workbench.calibration.base import check_model, output_of
from workbench.risk import Risk
from workbench.training.rows import bad_rows
from workbench.widgets.common.cases import Case, cases, number
from workbench.widgets.common.inputs import data_of
from workbench.widgets.common.row_risks import Answers, ask, per_row, rankings, risk_unit, taken
from workbench.widgets.explorer import scene, view
from workbench.widgets.explorer.editing import Editor
from workbench.widgets.explorer.landscape import risk_label
from workbench.widgets.explorer.neighbours import Nearest, Neighbours


class Explorer:
    """One trained model, case by case: ranked by any risk, split by cause, edited by hand, and refused above a threshold.

    In a notebook the object shows itself: a list ranked by a risk, the chosen case beside its nearest training cases, sliders that
    change it, a map of all cases whose points say more under the pointer, and a slider for the share of cases that are answered. All
    of it can be set and read without a browser; the model is asked in evaluation mode and, like the data, never changed.

    The ranking is made once: after more training make a new object. A method that draws at random, such as sample, is asked about all
    cases in one batch for the ranking, and about a single case and its edits with the same draws, so that what differs is the edit's doing.

    Args:
        wrapped: what a wrapper made of a model, trained; or a calibrated model.
        data: a workbench Data, the name of one, or a pair (x, y), a fifth of whose rows become the test rows. Cases are test rows: of
            images [n, channels, height, width] or [n, height, width], or of tables [n, features].
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
        ValueError: there are no test rows, rows hold NaN, or the model does not give one number, or scores of classes, for each row.

    Example:
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

    def __init__(
        self,
        wrapped: nn.Module,
        data: Any,
        *,
        by: str | None = None,
        coverage: float = 0.8,
        k: int = 5,
        space: str | None = None,
        max_rows: int = 2000,
    ) -> None:
        check_model(wrapped)
        self.wrapped, self.data, self.k = wrapped, data_of(data), k
        self.output = output_of(wrapped)
        test = self.data.test
        if not 2 <= test.x.ndim <= 4:
            raise ValueError(f"data: rows have shape {list(self.data.input_shape)}; cases are tables or pictures")
        for label, part in (("test", test), ("training", self.data.train)):
            for name, values in (("x", part.x), ("y", part.y)):
                if len(bad := bad_rows(values)):
                    raise ValueError(
                        f"data: {name} of {len(bad)} of {len(part)} {label} rows is NaN or infinite, first in row {int(bad[0])}; leave "
                        "those rows out, or fill them in"
                    )
        for name, count in (("k", k), ("max_rows", max_rows)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1; found {count!r}")
        self.rows = torch.arange(len(test))
        if len(test) > max_rows:
            drawn = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:max_rows]
            self.rows = drawn.sort().values
        self._answers = ask(wrapped, self.data, test.x[self.rows])
        known = rankings(self._answers)
        self._by = by or ("epistemic" if "epistemic" in known else known[0])
        self._check_by(self._by)
        self._coverage = _share(coverage)
        self._searches: dict[str, Neighbours] = {}
        linear = any(isinstance(module, nn.Linear) for module in wrapped.modules())
        self._space = space or ("features" if test.x.ndim > 2 and linear else "inputs")
        self._search(self._space)
        self._editor = Editor(self.data, self._edited)
        self._selective: Selective | None = None
        self._view: Any = None
        self._ranked = self._order()
        self._take(int(self._ranked[0]))

    # ---- ranking
    @property
    def by(self) -> str:
        """What ranks the cases; it can be set."""
        return self._by

    @by.setter
    def by(self, by: str) -> None:
        self._check_by(by)
        self._by, self._selective = by, None
        self._ranked = self._order()
        self._show("ranking")

    @property
    def rankings(self) -> tuple[str, ...]:
        """What cases can be ranked by."""
        return rankings(self._answers)

    @property
    def ranked(self) -> Tensor:
        """Numbers of the test rows, int64 [n], highest first; of equal ones the earlier row comes first."""
        return self._ranked

    @property
    def values(self) -> Tensor:
        """What ranks them, [n], in the order of `ranked`."""
        return per_row(self._answers, self._by, self._targets).sort(descending=True, stable=True).values

    def _order(self) -> Tensor:
        value = per_row(self._answers, self._by, self._targets)
        return self.rows[value.sort(descending=True, stable=True).indices]

    @property
    def _targets(self) -> Tensor:
        return self.data.test.y[self.rows]

    def _check_by(self, by: str) -> None:
        if by not in (known := rankings(self._answers)):
            raise ValueError(f"by={by!r}: cases of this model can be ranked by {', '.join(known)}")

    # ---- one case
    @property
    def row(self) -> int:
        """The number of the test row that is looked at; see `select`."""
        return self._row

    def select(self, row: SupportsIndex) -> Explorer:
        """Look at a test row, as it is.

        Args:
            row: its number, from 0.

        Returns:
            The object itself.
        """
        try:
            number = -1 if isinstance(row, bool) else operator.index(row)
        except TypeError:
            number = -1
        if not 0 <= number < len(self.data.test):
            raise ValueError(f"row must be a whole number from 0 to {len(self.data.test) - 1}; found {row!r}")
        self._take(number)
        self._show("case")
        return self

    def step(self, by: int = 1) -> Explorer:
        """Go on to the next case of the ranking, or with -1 to the one before."""
        place = (self._ranked == self._row).nonzero()
        at = int(place[0, 0]) + by if len(place) else 0
        return self.select(self._ranked[min(max(at, 0), len(self._ranked) - 1)])

    def _take(self, row: int) -> None:
        answers = ask(self.wrapped, self.data, self.data.test.x[row : row + 1])
        self._row, self._original, self._current = row, answers, answers
        self._editor.load(self.data.test.x[row])

    def edit(self, changes: Mapping[str | int, float] | None = None, **more: float) -> Explorer:
        """Change the case, and ask again; the row of the data stays as it is.

        Args:
            changes: new values by name of the feature or number of the column; for images noise, brightness, contrast, rotation, blur,
                erase, across and down.
            more: the same, for names that are Python names.

        Returns:
            The object itself.

        Raises:
            KeyError: there is no such feature.
            ValueError: a value or the prediction is not finite; the case is as before then.
        """
        before = dict(self._editor.changes)
        wanted: dict[str | int, float] = dict(changes or {})
        wanted.update(more)
        self._editor.set(wanted)
        try:
            self._ask_again()
        except Exception:
            self._editor.restore(before)
            raise
        self._show("edit")
        return self

    def reset(self) -> Explorer:
        """Undo all edits."""
        return self.select(self._row)

    def _ask_again(self) -> None:
        changed = bool(self._editor.changes)
        self._current = ask(self.wrapped, self.data, self.x[None]) if changed else self._original

    def _edited(self) -> None:
        """A slider was moved."""
        if self._view is not None:
            with self._view.guarded():
                self._ask_again()
                self._show("edit")

    @property
    def edits(self) -> dict[str, float]:
        """What was changed, by name."""
        return dict(self._editor.changes)

    @property
    def x(self) -> Tensor:
        """The input as it is asked, [...]: the row with all edits."""
        return self._editor.applied(self._editor.changes)

    @property
    def prediction(self) -> Tensor:
        """What the model says of the case: the value [1], or class probabilities [classes]."""
        return self._current.y if self._current.probs is None else self._current.probs[0]

    @property
    def risk(self) -> Risk:
        """The risks of the case as numbers: standard deviations in the units of the target, for classes entropies in nats."""
        return Risk(**{name: value.item() for name, value in self._current.risk.items()})

    @property
    def target(self) -> Tensor:
        """The true value of the row, [1] or []."""
        return self.data.test.y[self._row]

    # ---- neighbours
    @property
    def space(self) -> str:
        """Where neighbours are near, "inputs" or "features"; it can be set."""
        return self._space

    @space.setter
    def space(self, space: str) -> None:
        self._search(space)
        self._space = space
        self._show("neighbours")

    @property
    def neighbours(self) -> Nearest:
        """The training rows nearest to the case, with all edits: their numbers, distances and targets."""
        return self._search(self._space).of(self.x, self.k)

    def _search(self, space: str) -> Neighbours:
        if space not in self._searches:
            train = self.data.train
            self._searches[space] = Neighbours(self.wrapped, train.x, train.y, space)
        return self._searches[space]

    # ---- abstaining
    @property
    def selective(self) -> Selective:
        """Risk and error of all cases, as `workbench.selective` gives them, by the risk of the ranking ("error" counts as total)."""
        if self._selective is None:
            known = rankings(self._answers)
            by = self._by if self._by != "error" else "total" if "total" in known else known[0]
            if by == "error":
                raise ValueError(
                    "the plain baseline measures no risk, so nothing tells which cases to refuse; wrap the model with vote, sculpt or neo"
                )
            y = self._targets
            risk = per_row(self._answers, by, y)
            wrong = (self._answers.y != y).to(risk) if self._answers.probs is not None else None
            self._selective = Selective(
                self.wrapped, by, risk, per_row(self._answers, "error", y) if wrong is None else wrong
            )
        return self._selective

    @property
    def coverage(self) -> float:
        """Share of cases that are answered; it can be set."""
        return self._coverage

    @coverage.setter
    def coverage(self, coverage: float) -> None:
        self._coverage = _share(coverage)
        self._show("coverage")

    @property
    def threshold(self) -> float:
        """The highest risk that is still answered."""
        return self.selective.threshold(coverage=self._coverage)

    @property
    def abstained(self) -> Tensor:
        """Numbers of the test rows that the model would refuse, int64, highest risk first."""
        risk = per_row(self._answers, self.selective.by, self._targets)
        order = risk.sort(descending=True, stable=True).indices
        return self.rows[order[risk[order] > self.threshold]]

    @property
    def error(self) -> tuple[float, float]:
        """The mean error of the cases that are answered, and of all; for classes the share of wrong ones."""
        chosen = self.selective
        return chosen.error[chosen.risk <= self.threshold].mean().item(), chosen.error.mean().item()

    # ---- showing
    def cases(self, rows: Tensor) -> list[Case]:
        """Test rows as they are shown; they must be among `rows`."""
        at = torch.searchsorted(self.rows, rows)
        names = [f"row {row}" for row in rows.tolist()]
        test = self.data.test
        return cases(self.data, test.x[rows], taken(self._answers, at), names, test.y[rows], self.output)

    def case(self, edited: bool = False) -> Case:
        """The case as it is, or with all edits."""
        x, answers = (self.x, self._current) if edited else (self.data.test.x[self._row], self._original)
        name = f"row {self._row}{', edited' if edited else ''}"
        return cases(self.data, x[None], answers, [name], self.target[None], self.output)[0]

    def tell(self, i: int) -> list[str]:
        """Lines that say of the i-th of `rows` what the model says."""
        one = torch.tensor([i])
        own, y = taken(self._answers, one), self._targets[one]
        said = f"{own.y.item():.4g}"
        truth = f"{y.item():.4g} {self.data.target.unit}".rstrip()
        if self.data.classes is not None:
            said, truth = self.data.classes[int(own.y)], self.data.classes[int(y)]
        risks = [
            f"{name} {number(risk.item(), risk_unit(self.data, self.output, name))}" for name, risk in own.risk.items()
        ]
        return [f"row {int(self.rows[i])}", f"{said}, true {truth}", *risks]

    def answers(self) -> Answers:
        """What the model says about all of `rows`."""
        return self._answers

    def summary(self) -> str:
        """What the chosen coverage costs and gains, in words."""
        chosen = self.selective
        kept, every = self.error
        refused = len(self.abstained)
        n = len(self.rows)
        unit = self.data.target.unit
        left, whole = (
            (f"{100 * kept:.3g} % wrong", f"{100 * every:.3g} %")
            if self.data.classes is not None
            else (f"mean absolute error {number(kept, unit)}", number(every, unit))
        )
        label = risk_label(self.data, self.output, chosen.by).split(" (")[0]
        limit = number(self.threshold, risk_unit(self.data, self.output, chosen.by))
        return (
            f"answers {n - refused:,} of {n:,} cases ({100 * (n - refused) / n:.3g} %), those with {label} of at most {limit}: {left} "
            f"instead of {whole}"
        )

    @property
    def widget(self) -> Any:
        """The ipywidget; made when it is first asked for."""
        if self._view is None:
            self._view = view.View(self)
        return self._view.widget

    @property
    def message(self) -> str:
        """What went wrong last in the widget; "" if nothing did."""
        return "" if self._view is None else self._view.problem

    def snapshot(self) -> None:
        """Display what can be seen now as a static picture: HTML with hover, and PNG; it needs no kernel."""
        scene.snapshot(self)

    def _show(self, what: str) -> None:
        if self._view is not None:
            with self._view.guarded():
                self._view.update(what)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)

    def __repr__(self) -> str:
        edited = f", edited: {', '.join(self._editor.changes)}" if self._editor.changes else ""
        return f"Explorer({self.data.name}, row {self._row}{edited})"


def _share(coverage: float) -> float:
    if not (isinstance(coverage, int | float) and math.isfinite(coverage) and 0 < coverage <= 1):
        raise ValueError(f"coverage must lie above 0 and at most at 1; found {coverage!r}")
    return float(coverage)


__all__ = ["Explorer"]
