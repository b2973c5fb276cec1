"""Explore models of rows with several targets (maps, tokens, columns, labels): rank rows, inspect one, and refuse uncertain rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from workbench.calibration import Selective
from workbench.console import progress_bar
from workbench.core.batches.rows import first_weight
from workbench.core.method import evaluating
from workbench.core.outputs.options import form_of
from workbench.data import Data
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.errors import as_count
from workbench.experiments.positions import MAX_TARGETS, batch_rows, target_names
from workbench.risk import Risk
from workbench.widgets.common.cases import format_number
from workbench.widgets.common.inputs import refuse_bad_rows, sampled_rows
from workbench.widgets.common.labelled import explorable
from workbench.widgets.common.positions import comparable_data
from workbench.widgets.common.predictions import Predictions
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.models import named_models, naming, versions_of
from workbench.widgets.explorer.places import place_of
from workbench.widgets.explorer.ranking import OF, output_meaning, predict_positions, row_numbers, scales_of, targets_of

BATCH = 256  # maximum number of rows predicted at once


class SeveralExploration(Exploration):
    """State and methods of an `Explorer` of maps, tokens, columns or labels; see there.

    Each model predicts all rows at the start, batch by batch, but only the ranking numbers are kept; the chosen row is predicted again.
    """

    _row_predictions: dict[str, tuple[Tensor, dict[str, Tensor]]]  # predictions for the chosen row by model
    _body: tuple[Any, Any] = (None, None)  # the row and model drawn last, and the picture or table

    def __init__(
        self,
        wrapped: nn.Module | Mapping[str, nn.Module],
        data: Any,
        *,
        by: str | None = None,
        coverage: float = 0.8,
        k: int | None = None,
        space: str | None = None,
        max_rows: int = 2000,
    ) -> None:
        self.data = comparable_data(explorable(wrapped, data))
        if k is not None or space is not None:
            self._refuse("there are no neighbours for them: leave out k and space")
        max_rows = as_count("max_rows", max_rows)
        refuse_bad_rows(self.data)
        self.columns = column_names(self.data)
        y = self.data.test.y
        # leave out rows without any target
        known = torch.ones_like(y, dtype=torch.bool) if y.is_floating_point() else y != VOID
        rows = known.flatten(1).any(1).nonzero()[:, 0]
        if not len(rows):
            raise ValueError(f"data: no test row of {self.data.name} has a class, all numbers are -100")
        self._empty, self._drawn_rows = len(y) - len(rows), len(rows) > max_rows
        self.rows = rows[sampled_rows(len(rows), max_rows)]
        self._models = named_models(wrapped, self.data, lambda model: self._predict(model, self.data.test.x[:2]))
        self._model_versions, self._numbers_of = versions_of(self._models), {}
        for name, model in self._models.items():
            with naming(name if isinstance(wrapped, Mapping) else "", self.data):
                self._numbers_of[name] = self._rank_rows(name, model)
        self._use(next(iter(self._models)))
        self._start_ranking(by, coverage)
        self._take(int(self._ranked[0]))

    def _predict(self, wrapped: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Predict inputs by a model, in evaluation mode and with the same random draws each time."""
        like = first_weight(wrapped)
        with own_random(0, like.device), torch.no_grad(), evaluating(wrapped, whole=True):
            return predict_positions(wrapped, self.data, x)

    def _rank_rows(self, name: str, wrapped: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        test, scales = self.data.test, scales_of(self.data)
        rankings: list[dict[str, Tensor]] = []
        wrongs: list[dict[str, Tensor]] = []
        like = first_weight(wrapped)
        batches = progress_bar(self.rows.split(batch_rows(test.y, BATCH)), desc=f"{name}: rows", delay=2, leave=False)
        with own_random(0, like.device), torch.no_grad(), evaluating(wrapped, whole=True):
            for rows in batches:
                y, risk = predict_positions(wrapped, self.data, test.x[rows])
                ranking, wrong = row_numbers(self.data, y, risk, test.y[rows], scales, self.columns)
                rankings.append(ranking)
                wrongs.append(wrong)
        return (
            {name: torch.cat([batch[name] for batch in rankings]) for name in rankings[0]},
            {name: torch.cat([batch[name] for batch in wrongs]) for name in wrongs[0]},
        )

    # ---- models
    def _predict_all_again(self) -> None:
        self._numbers_of = {name: self._rank_rows(name, model) for name, model in self._models.items()}
        self._use(self._model)
        self._body = (None, None)
        self._take(self._row)

    def _use(self, name: str) -> None:
        self._model, self.wrapped = name, self._models[name]
        self.output = form_of(output_meaning(self.wrapped))
        self._numbers, self._wrong = self._numbers_of[name]

    def _switch_to(self, name: str) -> None:
        self._check_filtered(name, tuple(self._numbers_of[name][0]))
        self._use(name)

    def _changed_model(self) -> None:
        self._rank_again()
        self._refresh("model")

    def numbers_by(self, model: str) -> dict[str, Tensor]:
        """Return the ranking numbers by a model, each [n] in the order of `rows`, by name."""
        return self._numbers_of[model][0]

    def rank_of(self, model: str, by: str) -> tuple[float, int] | None:
        """Return the ranking number of the chosen row by a model, and its rank, from 1; None if there is no such number."""
        numbers, at = self._numbers_of[model][0], (self.rows == self._row).nonzero()
        if by not in numbers or not len(at):
            return None
        value = numbers[by][at[0, 0]]
        return value.item(), 1 + int((numbers[by] > value).sum())

    def predicted_by(self, model: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Return prediction and risks of the chosen row by a model, as in `prediction` and `risk`."""
        if model not in self._row_predictions:
            self._row_predictions[model] = self._predict_row(model, self._row)
        return self._row_predictions[model]

    def _predict_row(self, model: str, row: int) -> tuple[Tensor, dict[str, Tensor]]:
        y, risk = self._predict(self._models[model], self.data.test.x[row : row + 1])
        return y[0], {name: value[0] for name, value in risk.items()}

    def each_model(self) -> dict[str, Predictions]:
        """Return the predictions of each model for the chosen row, by name, with a first dimension of 1.

        y has values or class numbers (1 for yes of labels), probs the probabilities of classes [1, ..., classes] or of yes [1, labels].
        """
        by_model = {}
        for name in self._models:
            y, risk = self.predicted_by(name)
            risks = {kind: value[None] for kind, value in risk.items()}
            if self.data.task == "labels":
                by_model[name] = Predictions((y > 0.5).long()[None], risks, y[None])
            elif self.data.classes is not None:
                by_model[name] = Predictions(y.argmax(-1)[None], risks, y[None])
            else:
                by_model[name] = Predictions(y[None], risks)
        return by_model

    # ---- ranking
    @property
    def rankings(self) -> tuple[str, ...]:
        """Names of the available rankings."""
        return tuple(self._numbers)

    @property
    def left_out(self) -> str:
        """Text that says why not all test rows are among `rows`."""
        empty = f", {self._empty:,} have no class" if self._empty else ""
        return f"{empty}{', drawn at random' if self._drawn_rows else ''}"

    def _value(self, by: str) -> Tensor:
        return self._numbers[by]

    def unit(self, by: str) -> str:
        """Return the unit of a ranking; "" if it has none, as when columns are divided by their standard deviations."""
        name, _, column = by.partition(OF)
        if name in ("vacuitic", "confidence"):
            return ""
        if self.data.classes is not None or self.data.task == "labels":
            return "nats"
        if column:
            return self.unit_of(self.columns.index(column))
        return "" if self.data.train.y.ndim == 2 else self.data.target.unit

    def unit_of(self, i: int) -> str:
        """Return the unit of a column: the unit of the target, or its i-th part if it has one for each column, separated by commas."""
        units = [unit.strip() for unit in self.data.target.unit.split(",")]
        return units[i] if len(units) == self.data.train.y.shape[1] else self.data.target.unit

    # ---- one case
    def _take(self, row: int) -> None:
        predictions = self._predict_row(self._model, row)
        self._row, self._row_predictions = row, {self._model: predictions}

    @property
    def x(self) -> Tensor:
        """The input of the row [...]."""
        return self.data.test.x[self._row]

    @property
    def prediction(self) -> Tensor:
        """The prediction for the row: values [...], or probabilities of classes [..., classes] or of labels [labels]."""
        return self.predicted_by(self._model)[0]

    @property
    def risk(self) -> Risk:
        """The risks of the row, shaped like its targets; [] for risks with one number per row."""
        return Risk(**self.predicted_by(self._model)[1])

    @property
    def place_shape(self) -> tuple[int, ...]:
        """Shape of the places of a row: (rows, columns) of maps, (positions,) of tokens and steps; () for columns and labels."""
        if self.data.task == "labels" or self.columns:
            return ()
        return tuple(targets_of(self.data, self.data.test.y[:1])[0].shape[1:])

    def at_place(self) -> dict[str, dict[str, Tensor]]:
        place, by_model = self._chosen_place(), {}
        for model in self._models:
            y, risk = self.predicted_by(model)
            by_model[model] = {"prediction": y[place]} | {name: r[place] if r.ndim else r for name, r in risk.items()}
        return by_model

    def riskiest_place(self) -> tuple[int, ...]:
        risk = {name: value for name, value in self.predicted_by(self._model)[1].items() if value.ndim}
        known = targets_of(self.data, self.data.test.y[self._row][None])[1][0]
        carried = risk.get(self._by.partition(OF)[0], next(iter(risk.values()), known.double()))
        return place_of(carried.double().masked_fill(~known, -torch.inf))

    def place_unit(self) -> str:
        """Return the unit of values and standard deviations, or of entropies, at the chosen place."""
        if self.data.classes is not None:
            return "nats"
        return self.unit_of(self._chosen_place()[0]) if len(self.place_shape) == 1 else self.data.target.unit

    @property
    def edits(self) -> dict[str, float]:
        """Empty, as such rows can't be edited."""
        return {}

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"data: rows of {self.data.name} have several targets, and {what}")

    def edit(self, changes: Any = None, **more: float) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse("they can't be edited; call wrapped(x, return_risk=True) for changed inputs")

    @property
    def space(self) -> str:
        """Raise ValueError: not available for several targets."""
        self._refuse("there are no neighbours for them")

    @space.setter
    def space(self, space: str) -> None:
        self._refuse("there are no neighbours for them")

    @property
    def neighbours(self) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse("there are no neighbours for them")

    @property
    def importance(self) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse(
            "there is no importance for them; use workbench.attributions.permutation_importance, for a table of inputs"
        )

    def occlusion(self, **options: Any) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse("there is no occlusion for them; use workbench.attributions.occlusion, for images and tokens")

    def answers(self) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse(
            "only ranking numbers are kept: `values` in the order of `ranked`; `prediction` and `risk` are those of the chosen row"
        )

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return empty tensors, as rows have several targets."""
        return torch.empty(0), torch.empty(0)

    def axis_label(self, by: str) -> str:
        """Return the axis label of a ranking, with its unit."""
        name = f"1 - {by}" if by.startswith("confidence") else by
        return f"{name} ({self.unit(by)})" if self.unit(by) else name

    def cases(self, rows: Any) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self._refuse("they can't be shown as cases; use select(row), then prediction, risk and target")

    def case(self, edited: bool = False) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self.cases(edited)

    def tell(self, i: int) -> NoReturn:
        """Raise ValueError: not available for several targets."""
        self.cases(i)

    # ---- abstaining
    @property
    def refusing_by(self) -> str | None:
        """Name of the risk that decides which rows are refused: the ranking, or if that is "error", total or the first risk of its column."""
        name, _, column = self._by.partition(OF)
        if name != "error":
            return self._by
        known = [risk for risk in self._numbers if risk.partition(OF)[2] == column and not risk.startswith("error")]
        return next((risk for risk in known if risk.startswith("total")), known[0] if known else None)

    @property
    def selective(self) -> Selective:
        """Risk and error of all rows, by the risk `refusing_by`; of a single column if that ranks."""
        if self._selective is None:
            if (by := self.refusing_by) is None:
                raise ValueError(
                    f"by={self._by!r}: the model, such as the plain baseline, measures no risk to refuse cases by; wrap it with vote, sculpt or "
                    "neo, or rank by a risk"
                )
            self._selective = Selective(self.wrapped, by, self._numbers[by], self._wrong[by.partition(OF)[2]])
        return self._selective

    @property
    def refusals(self) -> dict[str, Tensor]:
        """The scores that could decide which rows are refused: each risk, and confidence, of the ranked column, by name."""
        column = (self.refusing_by or "").partition(OF)[2]
        same = (name for name in self._numbers if name.partition(OF)[2] == column)
        return {name: self._numbers[name] for name in same if not name.startswith("error")}

    @property
    def refusal_error(self) -> Tensor:
        """The error that refusing each row saves [n], of the ranked column; see `error_label`."""
        return self._wrong[(self.refusing_by or "").partition(OF)[2]]

    @property
    def error_label(self) -> str:
        """Axis label of the error that refusing rows saves."""
        column = self.selective.by.partition(OF)[2]
        if self.data.task == "labels":
            return f"share wrong, {column}" if column else "share of labels wrong"
        if self.data.classes is not None:
            return "share of positions wrong"
        if self.data.train.y.ndim == 2 and not column:
            return "mean |error| / standard deviation of the target"
        unit = self.unit(self.selective.by if column else "error")
        return f"mean |error|{f' of {column}' if column else ''}{f' ({unit})' if unit else ''}"

    def summary(self) -> str:
        """Describe how many rows are answered at the chosen coverage, and how much that lowers the error."""
        kept, overall = self.error
        n, by = len(self.rows), self.selective.by
        answered = n - len(self.abstained)
        limit = format_number(self.threshold, self.unit(by))
        return (
            f"answers {answered:,} of {n:,} cases ({100 * answered / n:.3g} %), those of {by} up to {limit}: {self.error_label} {kept:.3g} "
            f"instead of {overall:.3g}"
        )

    def __repr__(self) -> str:
        model = f", {self._model}" if len(self._models) > 1 else ""
        return f"Explorer({self.data.name}{model}, row {self._row})"


def column_names(data: Data) -> list[str]:
    """Return the names of columns or labels with rankings of their own; none for maps, tokens, and more than eight columns."""
    if data.task == "labels":
        names = list(data.classes or map(str, range(data.train.y.shape[1])))
        return names if len(names) <= MAX_TARGETS and len(set(names)) == len(names) else []
    return [] if data.classes is not None else target_names(data, data.train.y)


__all__ = ["SeveralExploration", "column_names"]
