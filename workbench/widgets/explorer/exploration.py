"""Explore a trained model case by case: rank cases, edit one, find its nearest training cases, and refuse uncertain cases."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor, nn

from workbench.calibration.models import output_of
from workbench.data.reader import data_of
from workbench.errors import as_count
from workbench.risk import Risk
from workbench.widgets.common.cases import Case, cases, format_number
from workbench.widgets.common.inputs import refuse_bad_rows, sampled_rows
from workbench.widgets.common.labelled import explorable, task_of
from workbench.widgets.common.positions import refuse_one_class
from workbench.widgets.common.predictions import Predictions, per_row, predict_cases, rankings, risk_unit
from workbench.widgets.explorer.abstaining import Abstention, checked_coverage
from workbench.widgets.explorer.carriers import Carriers
from workbench.widgets.explorer.editing import Editor
from workbench.widgets.explorer.landscape import risk_label
from workbench.widgets.explorer.models import ModelChoice, named_models, naming, versions_of
from workbench.widgets.explorer.neighbours import Nearest, NeighbourSearch
from workbench.widgets.explorer.places import PlaceChoice
from workbench.widgets.explorer.selections import RowSelection


class Exploration(RowSelection, ModelChoice, Abstention, Carriers, PlaceChoice):
    """State and methods of an `Explorer` without its widgets; see there for the arguments."""

    def __init__(
        self,
        wrapped: nn.Module | Mapping[str, nn.Module],
        data: Any,
        *,
        by: str | None = None,
        coverage: float = 0.8,
        k: int = 5,
        space: str | None = None,
        max_rows: int = 2000,
    ) -> None:
        self.data, self.k = data_of(explorable(wrapped, data), task=task_of(wrapped, data)), k
        refuse_one_class(self.data)
        test = self.data.test
        if not 2 <= test.x.ndim <= 4:
            raise ValueError(
                f"data: rows have shape {list(self.data.input_shape)}; cases must be table rows or pictures"
            )
        refuse_bad_rows(self.data)
        k, max_rows = as_count("k", k), as_count("max_rows", max_rows)
        self.rows = sampled_rows(len(test), max_rows)
        self._models = named_models(wrapped, self.data, lambda model: predict_cases(model, self.data, test.x[:2]))
        self._model, self.wrapped = next(iter(self._models.items()))
        self.output = output_of(self.wrapped)
        with naming(self._model if isinstance(wrapped, Mapping) else "", self.data):
            self._answers = predict_cases(
                self.wrapped, self.data, test.x if len(self.rows) == len(test) else test.x[self.rows]
            )
        self._answers_by_model = {self._model: self._answers}
        self._model_versions = versions_of(self._models)
        self._start_ranking(by, coverage)
        self._searches: dict[str, NeighbourSearch] = {}
        linear = any(isinstance(module, nn.Linear) for module in self.wrapped.modules())
        self._space = space or ("features" if test.x.ndim > 2 and linear else "inputs")
        self._search(self._space)
        self._editor = Editor(self.data, self._edited)
        self._take(int(self._ranked[0]))

    # ---- ranking
    def _start_ranking(self, by: str | None, coverage: float) -> None:
        self._by = by or self._default_ranking()
        self._check_by(self._by)
        self._coverage = checked_coverage(coverage)
        self._selective, self._area_texts = None, {}
        self._ranked = self._order()
        self._start_selecting()

    def _default_ranking(self) -> str:
        """Return the ranking used by default."""
        return "epistemic" if "epistemic" in (known := self.rankings) else known[0]

    def _rank_again(self) -> None:
        """Rank and filter rows again for another model, by the same risk if it measures that."""
        self._by, self._selective = self._by if self._by in self.rankings else self._default_ranking(), None
        self._ranked, self._passing = self._order(), self._checked_filter(**self._filter)[1]

    def _changed_model(self) -> None:
        self._rank_again()
        self._importance, self._searches = None, {}
        try:
            self._search(self._space)
        except ValueError:  # this model has no features to search neighbours in
            self._space = "inputs"
            self._search(self._space)
        self._refresh("model")

    @property
    def by(self) -> str:
        """Name of the ranking; can be set."""
        return self._by

    @by.setter
    def by(self, by: str) -> None:
        self._refresh_if_trained()
        self._check_by(by)
        self._by, self._selective = by, None
        self._ranked = self._order()
        self._refresh("ranking")

    @property
    def rankings(self) -> tuple[str, ...]:
        """Names of the available rankings."""
        return rankings(self._answers)

    @property
    def ranked(self) -> Tensor:
        """Numbers of the test rows in ranked order, int64 [n], highest first; ties in row order."""
        return self._ranked

    @property
    def values(self) -> Tensor:
        """The ranking numbers [n], in the order of `ranked`."""
        return self._value(self._by).sort(descending=True, stable=True).values

    def values_of(self, rows: Tensor, by: str | None = None) -> Tensor:
        """Return the ranking number, or another risk, of test rows [n], which must be among `rows`."""
        return self._value(by or self._by)[torch.searchsorted(self.rows, rows)]

    def _value(self, by: str) -> Tensor:
        """Return the ranking numbers of `rows` [n]."""
        return per_row(self._answers, by, self._targets)

    @property
    def left_out(self) -> str:
        """Text that says why not all test rows are among `rows`."""
        return ", drawn at random"

    def unit(self, by: str) -> str:
        """Return the unit of a ranking; "" if it has none."""
        return risk_unit(self.data, self.output, by)

    def axis_label(self, by: str) -> str:
        """Return the axis label of a ranking, with its unit."""
        return risk_label(self.data, self.output, by)

    def _order(self) -> Tensor:
        return self.rows[self._value(self._by).sort(descending=True, stable=True).indices]

    @property
    def _targets(self) -> Tensor:
        return self.data.test.y[self.rows]

    def _check_by(self, by: str) -> None:
        if by not in (known := self.rankings):
            raise ValueError(f"by={by!r}: cases of this model can be ranked by {', '.join(known)} only")

    # ---- one case
    @property
    def row(self) -> int:
        """The number of the selected test row; see `select`."""
        return self._row

    def select(self, row: SupportsIndex) -> Self:
        """Select a test row, without edits.

        Args:
            row: row number, from 0.

        Returns:
            The object itself.
        """
        try:
            number = -1 if isinstance(row, bool) else operator.index(row)
        except TypeError:
            number = -1
        if not 0 <= number < len(self.data.test):
            raise ValueError(f"row must be a whole number from 0 to {len(self.data.test) - 1}; found {row!r}")
        self._refresh_if_trained()
        self._take(number)
        self._refresh("case")
        return self

    def step(self, by: int = 1) -> Self:
        """Select the next of the listed cases (`shown`), or with -1 the previous one."""
        if not len(shown := self.shown):
            return self
        place = (shown == self._row).nonzero()
        at = int(place[0, 0]) + by if len(place) else 0
        return self.select(shown[min(max(at, 0), len(shown) - 1)])

    def _take(self, row: int) -> None:
        answers = predict_cases(self.wrapped, self.data, self.data.test.x[row : row + 1])
        self._row, self._original, self._current = row, answers, answers
        self._answered: dict[str, float] = {}
        self._editor.load(self.data.test.x[row])

    def edit(self, changes: Mapping[str | int, float] | None = None, **more: float) -> Self:
        """Edit the case and predict it again; the row of the data is not changed.

        Args:
            changes: new values by feature name or column number; for images by noise, brightness, contrast, rotation, blur, erase, across
                and down.
            more: the same as keyword arguments.

        Returns:
            The object itself.

        Raises:
            KeyError: if there is no such feature.
            ValueError: if a feature is constant in the training rows, or a value or the prediction is not finite; the case is not changed then.
        """
        self._refresh_if_trained()
        wanted: dict[str | int, float] = dict(changes or {})
        wanted.update(more)
        self._editor.set(wanted)
        self._predict_again()
        self._refresh("edit")
        return self

    def reset(self) -> Self:
        """Undo all edits."""
        return self.select(self._row)

    def _predict_again(self) -> None:
        """Predict the edited case; if that fails, go back to the edits that the current prediction belongs to."""
        edits = dict(self._editor.changes)
        try:
            self._current = predict_cases(self.wrapped, self.data, self.x[None]) if edits else self._original
        except Exception as error:
            self._editor.restore(self._answered)
            names = ", ".join(f"{name}={value:.7g}" for name, value in edits.items())
            error.add_note(f"row {self._row}, edited: {names}; the case was not changed")
            raise
        self._answered = edits

    def _edited(self) -> None:
        """Predict again after a slider was moved."""
        self._refresh_if_trained()
        self._predict_again()
        self._refresh("edit")

    @property
    def edits(self) -> dict[str, float]:
        """The edited values, by name."""
        return dict(self._editor.changes)

    @property
    def x(self) -> Tensor:
        """The input of the case [...]: the row with all edits."""
        return self._editor.applied(self._editor.changes)

    @property
    def prediction(self) -> Tensor:
        """The prediction for the case: the value [1], or class probabilities [classes]."""
        return self._current.y if self._current.probs is None else self._current.probs[0]

    @property
    def risk(self) -> Risk:
        """The risks of the case as floats: standard deviations in the unit of the target, or entropies in nats for classes."""
        return Risk(**{name: value.item() for name, value in self._current.risk.items()})

    @property
    def target(self) -> Tensor:
        """The true value of the row [1], or its class number []."""
        return self.data.test.y[self._row]

    # ---- neighbours
    @property
    def space(self) -> str:
        """Space of the distances to neighbours, "inputs" or "features"; can be set."""
        return self._space

    @space.setter
    def space(self, space: str) -> None:
        self._search(space)
        self._space = space
        self._refresh("neighbours")

    @property
    def neighbours(self) -> Nearest:
        """The training rows nearest to the edited case: their numbers, distances and targets."""
        return self._search(self._space).of(self.x, self.k)

    def _search(self, space: str) -> NeighbourSearch:
        if space not in self._searches:
            train = self.data.train
            self._searches[space] = NeighbourSearch(self.wrapped, train.x, train.y, space)
        return self._searches[space]

    # ---- display
    def cases(self, rows: Tensor) -> list[Case]:
        """Return test rows as cases for display; they must be among `rows`."""
        at = torch.searchsorted(self.rows, rows)
        names = [f"row {row}" for row in rows.tolist()]
        test = self.data.test
        return cases(self.data, test.x[rows], self._answers.take(at), names, test.y[rows], self.output)

    def case(self, edited: bool = False) -> Case:
        """Return the case for display, as in the data or with all edits."""
        x, answers = (self.x, self._current) if edited else (self.data.test.x[self._row], self._original)
        name = f"row {self._row}{', edited' if edited else ''}"
        return cases(self.data, x[None], answers, [name], self.target[None], self.output)[0]

    def tell(self, i: int) -> list[str]:
        """Return the tooltip lines of the i-th of `rows`: its prediction, true value and risks."""
        one = torch.tensor([i])
        answer, y = self._answers.take(one), self._targets[one]
        predicted = f"{answer.y.item():.4g}"
        truth = f"{y.item():.4g} {self.data.target.unit}".rstrip()
        if self.data.classes is not None:
            predicted, truth = self.data.classes[int(answer.y)], self.data.classes[int(y)]
        risks = [
            f"{name} {format_number(risk.item(), risk_unit(self.data, self.output, name))}"
            for name, risk in answer.risk.items()
        ]
        return [f"row {int(self.rows[i])}", f"{predicted}, true {truth}", *risks]

    def answers(self) -> Predictions:
        """Return predictions and risks of all `rows`."""
        return self._answers

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of `rows`, one number each; empty tensors if rows have several targets."""
        return self._answers.y, self._targets.reshape(-1)

    def summary(self) -> str:
        """Describe how many cases are answered at the chosen coverage, and how much that lowers the error."""
        chosen = self.selective
        answered, overall = self.error
        refused = len(self.abstained)
        n = len(self.rows)
        unit = self.data.target.unit
        left, whole = (
            (f"{100 * answered:.3g} % wrong", f"{100 * overall:.3g} %")
            if self.data.classes is not None
            else (f"mean absolute error {format_number(answered, unit)}", format_number(overall, unit))
        )
        label = risk_label(self.data, self.output, chosen.by).split(" (")[0]
        limit = format_number(self.threshold, risk_unit(self.data, self.output, chosen.by))
        return (
            f"answers {n - refused:,} of {n:,} cases ({100 * (n - refused) / n:.3g} %), those with {label} of at most {limit}: {left} "
            f"instead of {whole}"
        )

    def _refresh(self, what: str) -> None:
        """Update the display after a change of "model", "ranking", "case", "edit", "neighbours", "coverage", "selection", "filter",
        "selections" or "place"; does nothing without widgets."""

    def __repr__(self) -> str:
        edited = f", edited: {', '.join(self._editor.changes)}" if self._editor.changes else ""
        model = f", {self._model}" if len(self._models) > 1 else ""
        return f"{type(self).__name__}({self.data.name}{model}, row {self._row}{edited})"
