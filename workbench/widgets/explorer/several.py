"""Look into a model whose rows have several targets (maps, tokens, columns, labels): rank rows, look at one, refuse what is uncertain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from workbench.calibration import Selective
from workbench.calibration.base import _record, check_model
from workbench.core.method import evaluating
from workbench.core.outputs import form_of
from workbench.core.rows import bad_rows
from workbench.data import Data
from workbench.data.targets import VOID
from workbench.engine.effects.private_random import own_random
from workbench.experiments.positions import MOST_TARGETS, batch_rows, target_names
from workbench.risk import Risk
from workbench.widgets.common.cases import number
from workbench.widgets.common.positions import comparable_data
from workbench.widgets.explorer.exploration import Exploration
from workbench.widgets.explorer.models import ONLY
from workbench.widgets.explorer.ranking import OF, asked, row_numbers, scales_of

BATCH = 256  # rows asked at once, at most


class SeveralExploration(Exploration):
    """What an `Explorer` of maps, tokens, columns or labels knows and can be told; see there.

    Rows are asked batch by batch and only their numbers are kept; the maps of the row that is looked at are asked for again.
    """

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
        if isinstance(wrapped, Mapping):
            raise ValueError(
                "data: rows have several targets, of which one model at a time is explored; give one of "
                f"{', '.join(map(str, wrapped)) or 'no'} models"
            )
        check_model(wrapped)
        self._models, self._model = {ONLY: wrapped}, ONLY
        self.wrapped, self.data = wrapped, comparable_data(data)
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
        self.output = form_of(_record(wrapped).output)
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
        self._numbers, self._wrong = self._asked_of_all()
        self._start(by, coverage)
        self._take(int(self._ranked[0]))

    def _asked_of_all(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        test, scales = self.data.test, scales_of(self.data)
        rankings: list[dict[str, Tensor]] = []
        wrongs: list[dict[str, Tensor]] = []
        like = next((p for p in self.wrapped.parameters() if p.is_floating_point()), torch.empty(0))
        with own_random(0, like.device), torch.no_grad(), evaluating(self.wrapped, whole=True):
            for rows in self.rows.split(batch_rows(test.y, BATCH)):
                y, risk = asked(self.wrapped, self.data, test.x[rows])
                ranking, wrong = row_numbers(self.data, y, risk, test.y[rows], scales, self.columns)
                rankings.append(ranking)
                wrongs.append(wrong)
        return (
            {name: torch.cat([batch[name] for batch in rankings]) for name in rankings[0]},
            {name: torch.cat([batch[name] for batch in wrongs]) for name in wrongs[0]},
        )

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
        like = next((p for p in self.wrapped.parameters() if p.is_floating_point()), torch.empty(0))
        with own_random(0, like.device), torch.no_grad(), evaluating(self.wrapped, whole=True):
            y, risk = asked(self.wrapped, self.data, self.data.test.x[row : row + 1])
        self._row, self._y, self._risk = row, y[0], {name: value[0] for name, value in risk.items()}

    @property
    def x(self) -> Tensor:
        """The input of the row, [...]."""
        return self.data.test.x[self._row]

    @property
    def prediction(self) -> Tensor:
        """What the model says of the row: values [...], probabilities of classes [..., classes], or of labels [labels]."""
        return self._y

    @property
    def risk(self) -> Risk:
        """The risks of the row, shaped like its targets; [] of those that are one number a row."""
        return Risk(**self._risk)

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

    def each_model(self) -> NoReturn:
        """Refused."""
        self._refuse("one model at a time is explored; `prediction` and `risk` are what it says")

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
        return f"Explorer({self.data.name}, row {self._row})"


def column_names(data: Data) -> list[str]:
    """Names of the columns or labels that rows can be ranked by alone; none of maps, tokens, and more than eight."""
    if data.task == "labels":
        names = list(data.classes or map(str, range(data.train.y.shape[1])))
        return names if len(names) <= MOST_TARGETS and len(set(names)) == len(names) else []
    return [] if data.classes is not None else target_names(data, data.train.y)


__all__ = ["SeveralExploration", "column_names"]
