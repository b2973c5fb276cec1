"""Look into a model whose rows have several targets (maps, tokens, columns, labels): rank rows, look at one, refuse what is uncertain."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from workbench.calibration import Selective
from workbench.core.batches.rows import bad_rows
from workbench.core.method import evaluating
from workbench.core.outputs.options import form_of
from workbench.data import Data
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.experiments.positions import MOST_TARGETS, batch_rows, target_names
from workbench.risk import Risk
from workbench.widgets.common.cases import number
from workbench.widgets.common.labelled import explorable
from workbench.widgets.common.positions import comparable_data
from workbench.widgets.common.predictions import Predictions
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.models import named_models, naming, versions_of
from workbench.widgets.explorer.places import place_of
from workbench.widgets.explorer.ranking import OF, asked, meant_by, row_numbers, scales_of, targets_of

BATCH = 256  # rows asked at once, at most


class SeveralExploration(Exploration):
    """What an `Explorer` of maps, tokens, columns or labels knows and can be told; see there.

    Each model is asked about all rows at the start, batch by batch, and only the numbers of rows are kept; the maps of the row that is looked at
    are asked for again.
    """

    _said: dict[str, tuple[Tensor, dict[str, Tensor]]]  # what models say about the chosen row
    _body: tuple[Any, Any] = (None, None)  # which row and model were drawn last, and what was drawn

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
            self._refuse("are not beside their neighbours: leave k and space out")
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be a whole number of at least 1; found {max_rows!r}")
        for label, split in (("test", self.data.test), ("training", self.data.train)):
            for name, values in (("x", split.x), ("y", split.y)):
                if len(bad := bad_rows(values)):
                    raise ValueError(
                        f"data: {name} of {len(bad)} of {len(split)} {label} rows is NaN or infinite, first in row {int(bad[0])}; leave "
                        "those rows out, or fill them in"
                    )
        self.columns = column_names(self.data)
        y = self.data.test.y
        # a row of nothing but void has nothing to be right or wrong about
        known = torch.ones_like(y, dtype=torch.bool) if y.is_floating_point() else y != VOID
        rows = known.flatten(1).any(1).nonzero()[:, 0]
        if not len(rows):
            raise ValueError(f"data: no test row of {self.data.name} has a class, all numbers are -100")
        self._empty, self._drawn_rows = len(y) - len(rows), len(rows) > max_rows
        if self._drawn_rows:
            drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:max_rows]
            rows = rows[drawn.sort().values]
        self.rows = rows
        self._models = named_models(wrapped, self.data, lambda model: self._answer(model, self.data.test.x[:2]))
        self._asked_of, self._known_of = versions_of(self._models), {}
        for name, model in self._models.items():
            with naming(name, self.data) if isinstance(wrapped, Mapping) else nullcontext():
                self._known_of[name] = self._asked_of_all(name, model)
        self._use(next(iter(self._models)))
        self._start(by, coverage)
        self._take(int(self._ranked[0]))

    def _answer(self, wrapped: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What a model says about inputs, in evaluation mode and under the same draws each time."""
        like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
        with own_random(0, like.device), torch.no_grad(), evaluating(wrapped, whole=True):
            return asked(wrapped, self.data, x)

    def _asked_of_all(self, name: str, wrapped: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        test, scales = self.data.test, scales_of(self.data)
        rankings: list[dict[str, Tensor]] = []
        wrongs: list[dict[str, Tensor]] = []
        like = next((p for p in wrapped.parameters() if p.is_floating_point()), torch.empty(0))
        from tqdm.auto import tqdm

        batches = tqdm(self.rows.split(batch_rows(test.y, BATCH)), desc=f"{name}: rows", delay=2, leave=False)
        with own_random(0, like.device), torch.no_grad(), evaluating(wrapped, whole=True):
            for rows in batches:
                y, risk = asked(wrapped, self.data, test.x[rows])
                ranking, wrong = row_numbers(self.data, y, risk, test.y[rows], scales, self.columns)
                rankings.append(ranking)
                wrongs.append(wrong)
        return (
            {name: torch.cat([batch[name] for batch in rankings]) for name in rankings[0]},
            {name: torch.cat([batch[name] for batch in wrongs]) for name in wrongs[0]},
        )

    # ---- models
    def _ask_again(self) -> None:
        self._known_of = {name: self._asked_of_all(name, model) for name, model in self._models.items()}
        self._use(self._model)
        self._body = (None, None)
        self._take(self._row)

    def _use(self, name: str) -> None:
        self._model, self.wrapped = name, self._models[name]
        self.output = form_of(meant_by(self.wrapped))
        self._numbers, self._wrong = self._known_of[name]

    def _look_at(self, name: str) -> None:
        self._check_filtered(name, tuple(self._known_of[name][0]))
        self._use(name)

    def _changed_model(self) -> None:
        self._rank_anew()
        self._refresh("model")

    def numbers_by(self, model: str) -> dict[str, Tensor]:
        """What rows can be ranked by where this model is looked at, each [n] in the order of `rows`."""
        return self._known_of[model][0]

    def rank_of(self, model: str, by: str) -> tuple[float, int] | None:
        """What a model ranks the chosen row by, and its place in that order, from 1; None where there is no such number."""
        numbers, at = self._known_of[model][0], (self.rows == self._row).nonzero()
        if by not in numbers or not len(at):
            return None
        value = numbers[by][at[0, 0]]
        return value.item(), 1 + int((numbers[by] > value).sum())

    def said_by(self, model: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Prediction and risks of the chosen row by a model, as `prediction` and `risk` have them."""
        if model not in self._said:
            self._said[model] = self._said_of(model, self._row)
        return self._said[model]

    def _said_of(self, model: str, row: int) -> tuple[Tensor, dict[str, Tensor]]:
        y, risk = self._answer(self._models[model], self.data.test.x[row : row + 1])
        return y[0], {name: value[0] for name, value in risk.items()}

    def each_model(self) -> dict[str, Predictions]:
        """What each model says about the chosen row, by name, with a first dimension of 1: y values or numbers of classes (of labels 1 for yes),
        probs the probabilities of classes [1, ..., classes] or of a yes [1, labels], risk by name."""
        by_model = {}
        for name in self._models:
            y, risk = self.said_by(name)
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
        """What cases can be ranked by."""
        return tuple(self._numbers)

    @property
    def left_out(self) -> str:
        """Why not all test rows are among `rows`, in words."""
        empty = f", {self._empty:,} have no class" if self._empty else ""
        return f"{empty}{', drawn at random' if self._drawn_rows else ''}"

    def _value(self, by: str) -> Tensor:
        return self._numbers[by]

    def unit(self, by: str) -> str:
        """The unit of what cases are ranked by; "" where it has none, as where columns are divided by their standard deviation."""
        name, _, column = by.partition(OF)
        if name in ("vacuitic", "confidence"):
            return ""
        if self.data.classes is not None or self.data.task == "labels":
            return "nats"
        if column:
            return self.unit_of(self.columns.index(column))
        return "" if self.data.train.y.ndim == 2 else self.data.target.unit

    def unit_of(self, i: int) -> str:
        """The unit of a column: that of all, or the i-th of those that commas separate."""
        units = [unit.strip() for unit in self.data.target.unit.split(",")]
        return units[i] if len(units) == self.data.train.y.shape[1] else self.data.target.unit

    # ---- one case
    def _take(self, row: int) -> None:
        said = self._said_of(self._model, row)
        self._row, self._said = row, {self._model: said}

    @property
    def x(self) -> Tensor:
        """The input of the row, [...]."""
        return self.data.test.x[self._row]

    @property
    def prediction(self) -> Tensor:
        """What the model says of the row: values [...], probabilities of classes [..., classes], or of labels [labels]."""
        return self.said_by(self._model)[0]

    @property
    def risk(self) -> Risk:
        """The risks of the row, shaped like its targets; [] of those that are one number a row."""
        return Risk(**self.said_by(self._model)[1])

    @property
    def place_shape(self) -> tuple[int, ...]:
        """How many places a row has: (rows, columns) of maps, (positions,) of tokens and steps; () of columns and labels."""
        if self.data.task == "labels" or self.columns:
            return ()
        return tuple(targets_of(self.data, self.data.test.y[:1])[0].shape[1:])

    def at_place(self) -> dict[str, dict[str, Tensor]]:
        place, by_model = self._chosen_place(), {}
        for model in self._models:
            y, risk = self.said_by(model)
            by_model[model] = {"prediction": y[place]} | {name: r[place] if r.ndim else r for name, r in risk.items()}
        return by_model

    def riskiest_place(self) -> tuple[int, ...]:
        risk = {name: value for name, value in self.said_by(self._model)[1].items() if value.ndim}
        known = targets_of(self.data, self.data.test.y[self._row][None])[1][0]
        carried = risk.get(self._by.partition(OF)[0], next(iter(risk.values()), known.double()))
        return place_of(carried.double().masked_fill(~known, -torch.inf))

    def place_unit(self) -> str:
        """The unit of values and standard deviations at the place, or of entropies."""
        if self.data.classes is not None:
            return "nats"
        return self.unit_of(self._chosen_place()[0]) if len(self.place_shape) == 1 else self.data.target.unit

    @property
    def edits(self) -> dict[str, float]:
        """Nothing: such rows can't be edited."""
        return {}

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"data: rows of {self.data.name} have several targets, and {what}")

    def edit(self, changes: Any = None, **more: float) -> NoReturn:
        """Refused."""
        self._refuse("can't be edited; ask wrapped(x, return_risk=True) about inputs that you changed")

    @property
    def space(self) -> str:
        """Refused."""
        self._refuse("are not beside their neighbours")

    @space.setter
    def space(self, space: str) -> None:
        self._refuse("are not beside their neighbours")

    @property
    def neighbours(self) -> NoReturn:
        """Refused."""
        self._refuse("are not beside their neighbours")

    @property
    def importance(self) -> NoReturn:
        """Refused."""
        self._refuse(
            "their columns are not shuffled here: workbench.attributions.permutation_importance takes a table of inputs"
        )

    def occlusion(self, **options: Any) -> NoReturn:
        """Refused."""
        self._refuse("their places are not covered here: workbench.attributions.occlusion takes images and tokens")

    def answers(self) -> NoReturn:
        """Refused."""
        self._refuse(
            "only their numbers are kept: `values` in the order of `ranked`; `prediction` and `risk` are those of the chosen row"
        )

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Nothing: rows have several predictions."""
        return torch.empty(0), torch.empty(0)

    def axis_label(self, by: str) -> str:
        """What rows are ranked by, with its unit."""
        name = f"1 - {by}" if by.startswith("confidence") else by
        return f"{name} ({self.unit(by)})" if self.unit(by) else name

    def cases(self, rows: Any) -> NoReturn:
        """Refused."""
        self._refuse("are no cases of one answer; select(row) and read prediction, risk and target")

    def case(self, edited: bool = False) -> NoReturn:
        """Refused."""
        self.cases(edited)

    def tell(self, i: int) -> NoReturn:
        """Refused."""
        self.cases(i)

    # ---- abstaining
    @property
    def refusing_by(self) -> str | None:
        """What decides which rows are refused: the ranking; by "error" the total, or the first risk there is, of the same column."""
        name, _, column = self._by.partition(OF)
        if name != "error":
            return self._by
        known = [risk for risk in self._numbers if risk.partition(OF)[2] == column and not risk.startswith("error")]
        return next((risk for risk in known if risk.startswith("total")), known[0] if known else None)

    @property
    def selective(self) -> Selective:
        """Risk and error of all rows by the risk of the ranking ("error" counts as total); of one column, where that ranks."""
        if self._selective is None:
            if (by := self.refusing_by) is None:
                raise ValueError(
                    f"by={self._by!r}: no risk of the model, such as the plain baseline, tells which cases to refuse; wrap the model with vote, "
                    "sculpt or neo, or rank by a risk"
                )
            self._selective = Selective(self.wrapped, by, self._numbers[by], self._wrong[by.partition(OF)[2]])
        return self._selective

    @property
    def refusals(self) -> dict[str, Tensor]:
        """What could decide which rows are refused: each risk, and confidence, of the column of the ranking, by name."""
        column = (self.refusing_by or "").partition(OF)[2]
        same = (name for name in self._numbers if name.partition(OF)[2] == column)
        return {name: self._numbers[name] for name in same if not name.startswith("error")}

    @property
    def refusal_error(self) -> Tensor:
        """The error of rows that refusing them saves [n], of the column of the ranking; see `error_label`."""
        return self._wrong[(self.refusing_by or "").partition(OF)[2]]

    @property
    def error_label(self) -> str:
        """What the error of a row is, that abstention counts."""
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
        """What the chosen coverage costs and gains, in words."""
        kept, every = self.error
        n, by = len(self.rows), self.selective.by
        answered = n - len(self.abstained)
        limit = number(self.threshold, self.unit(by))
        return (
            f"answers {answered:,} of {n:,} cases ({100 * answered / n:.3g} %), those of {by} up to {limit}: {self.error_label} {kept:.3g} "
            f"instead of {every:.3g}"
        )

    def __repr__(self) -> str:
        model = f", {self._model}" if len(self._models) > 1 else ""
        return f"Explorer({self.data.name}{model}, row {self._row})"


def column_names(data: Data) -> list[str]:
    """Names of the columns or labels that rows can be ranked by alone; none of maps, tokens, and more than eight."""
    if data.task == "labels":
        names = list(data.classes or map(str, range(data.train.y.shape[1])))
        return names if len(names) <= MOST_TARGETS and len(set(names)) == len(names) else []
    return [] if data.classes is not None else target_names(data, data.train.y)


__all__ = ["SeveralExploration", "column_names"]
