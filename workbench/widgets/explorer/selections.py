"""Selection and filter of rows: by risks, class or wrong prediction; and selections saved by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from workbench.introspect.source_lines import some_of
from workbench.widgets.explorer.explored import Explored

UNSEEN = 2.0  # vacuitic risk, in standard deviations over the training data, above which a row counts as never seen


class RowSelection(Explored):
    """The listed rows: those that pass the filter and, if any rows are selected, are selected; mixed into `Exploration`."""

    _ranked: Tensor

    def _start_selecting(self) -> None:
        self._selection = torch.empty(0, dtype=torch.int64)
        self._filter: dict[str, Any] = {}
        self._passing = torch.ones(len(self.rows), dtype=torch.bool)
        self._selections = SavedSelections(self)

    # ---- selected rows
    @property
    def selection(self) -> Tensor:
        """Numbers of the selected test rows, int64 in increasing order, empty at first; can be set, also to None."""
        return self._selection.clone()

    @selection.setter
    def selection(self, rows: Tensor | Sequence[int] | None) -> None:
        self._selection = self._checked(rows)
        self._refresh("selection")

    def _checked(self, rows: Tensor | Sequence[int] | None) -> Tensor:
        numbers = torch.as_tensor([] if rows is None or not len(rows) else rows).cpu()
        whole = not numbers.is_floating_point() and not numbers.is_complex() and numbers.dtype != torch.bool
        if numbers.ndim != 1 or not (whole or not len(numbers)):
            raise ValueError(
                f"selection: expected row numbers as integers [n]; found {numbers.dtype} {list(numbers.shape)}"
                f"{'; for a mask give explorer.rows[mask]' if numbers.dtype == torch.bool else ''}"
            )
        numbers = numbers.long().unique()  # sorted as well
        if len(other := numbers[~torch.isin(numbers, self.rows)]):
            raise ValueError(
                f"selection: row {int(other[0])} is not among the {len(self.rows):,} rows of this explorer (explorer.rows)"
            )
        return numbers

    def brush(
        self, ranges: Mapping[str, tuple[float, float]] | None = None, *, add: bool = False, **more: tuple[float, float]
    ) -> Self:
        """Select the rows within ranges of their risks or error, like a drag over the linked plot.

        Only rows that pass the filter are selected. NaN is within no range.

        Args:
            ranges: ranges (lowest, highest), both inclusive, by name of a ranking.
            add: whether to add to the selection instead of replacing it.
            more: the same as keyword arguments.

        Returns:
            The object itself.

        Raises:
            ValueError: if there is no such ranking, or a range is invalid.

        Example:
            >>> from torch import nn
            >>> from workbench import vote
            >>> from workbench.widgets import Explorer
            >>> explorer = Explorer(vote.Wrapper(3)(nn.Linear(10, 1)), "diabetes")
            >>> explorer.brush(epistemic=(0, float("inf"))).selection.equal(explorer.rows)
            True
        """
        wanted = {**(ranges or {}), **more}
        if not wanted:
            raise ValueError(f"brush: name a risk and its range, such as {self.rankings[0]}=(0, 1)")
        inside = self._passing.clone()
        for name, pair in wanted.items():
            self._check_by(name)
            try:
                low, high = map(float, pair)
                fits = low <= high
            except (TypeError, ValueError):  # no pair, or not of numbers
                fits = False
            if not fits:
                raise ValueError(f"brush: {name}={pair!r} must be a pair (lowest, highest)")
            value = self._value(name).double()
            inside &= (value >= low) & (value <= high)
        rows = self.rows[inside]
        self._selection = torch.cat([self._selection, rows]).unique() if add else rows.clone()
        self._refresh("selection")
        return self

    def toggle(self, row: int) -> Self:
        """Add a row to the selection, or remove it if it is selected."""
        added = self._checked([row])
        same = self._selection == added
        self._selection = self._selection[~same] if bool(same.any()) else torch.cat([self._selection, added]).unique()
        self._refresh("selection")
        return self

    @property
    def selections(self) -> SavedSelections:
        """Saved selections by name: `explorer.selections["odd"] = explorer.selection` saves one, and
        `explorer.selection = explorer.selections["odd"]` restores it."""
        return self._selections

    # ---- filter
    def filter(
        self,
        *,
        of_class: str | int | None = None,
        predicted: str | int | None = None,
        wrong: bool = False,
        confident_unseen: bool = False,
    ) -> Self:
        """List only rows that meet all conditions; without arguments, all rows. Ranking, coverage and abstention still refer to all rows.

        Args:
            of_class: name or number of the true class.
            predicted: name or number of the predicted class; with `of_class`, one cell of `confusion`.
            wrong: only rows whose predicted class is wrong.
            confident_unseen: only rows that the model is confident about but that are unlike the training data: total risk (or 1 - confidence
                if no total is measured) at most its median over `rows`, and vacuitic risk above 2 standard deviations.

        Returns:
            The object itself.

        Raises:
            ValueError: if there is no such class, rows have no single class, or the model does not measure the risks needed.
        """
        self._filter, self._passing = self._checked_filter(of_class, predicted, wrong, confident_unseen)
        self._refresh("filter")
        return self

    def _checked_filter(
        self,
        of_class: str | int | None = None,
        predicted: str | int | None = None,
        wrong: bool = False,
        confident_unseen: bool = False,
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the conditions of the filter, and which of `rows` pass it [n]."""
        passing, chosen = torch.ones(len(self.rows), dtype=torch.bool), dict[str, Any]()
        if of_class is not None:
            number = self._class_number(of_class, "of_class")
            chosen["of_class"] = self.class_names[number]
            passing &= self._targets == number
        if predicted is not None:
            number = self._class_number(predicted, "predicted")
            chosen["predicted"] = self.class_names[number]
            passing &= self._answers.y == number
        if wrong:
            if not self.class_names:
                raise ValueError(
                    "wrong: rows have no single class that is right or wrong; brush those of large error, as in brush(error=(10, inf))"
                )
            chosen["wrong"] = True
            passing &= self._answers.y != self._targets
        if confident_unseen:
            chosen["confident_unseen"] = True
            confident = self._value(self._confidence_risk())
            passing &= (confident <= confident.double().median()) & (self._value("vacuitic") > UNSEEN)
        return chosen, passing

    @property
    def filters(self) -> dict[str, Any]:
        """The conditions of the filter, by argument of `filter`."""
        return dict(self._filter)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that rows can be filtered by; () for values and for rows with several targets."""
        return tuple(self.data.classes or ()) if self.data.train.y.ndim == 1 else ()

    @property
    def confusion(self) -> Tensor:
        """The confusion matrix: number of `rows` by true class (down) and predicted class (across), int64 [classes, classes].

        Raises:
            ValueError: if rows have no single class.
        """
        count = len(self.class_names)
        if not count:
            raise ValueError(f"confusion: rows of {self.data.name} have no single class")
        return torch.bincount(self._targets * count + self._answers.y, minlength=count**2).view(count, count)

    def _class_number(self, chosen: str | int, argument: str) -> int:
        names = self.class_names
        if chosen in names:
            return names.index(str(chosen))
        if isinstance(chosen, int) and not isinstance(chosen, bool) and 0 <= chosen < len(names):
            return chosen
        known = some_of(names, 20) or "none"
        raise ValueError(f"{argument}={chosen!r}: the classes of {self.data.name} are {known}")

    def _confidence_risk(self) -> str:
        """Return the name of the risk that is low where the model is confident."""
        known = self.rankings
        confident = next((name for name in ("total", "confidence") if name in known), None)
        if confident is None or "vacuitic" not in known:
            raise ValueError(
                f"confident_unseen needs total and vacuitic risk, and the model measures {', '.join(known[:-1]) or 'none'}; compose it with neo"
            )
        return confident

    @property
    def tells_unseen(self) -> bool:
        """Whether the model measures what `filter(confident_unseen=True)` needs."""
        try:
            return bool(self._confidence_risk())
        except ValueError:
            return False

    # ---- listed rows
    @property
    def shown(self) -> Tensor:
        """Numbers of the listed rows, int64, highest first: those that pass the filter and, if any rows are selected, are selected."""
        places = torch.searchsorted(self.rows, self._ranked)
        keep = self._passing[places]
        if len(self._selection):
            keep = keep & torch.isin(self._ranked, self._selection)
        return self._ranked[keep]

    def shown_in_words(self) -> str:
        """Describe which rows are listed; "" if all are."""
        conditions = []
        if self._filter:
            named = {
                "of_class": "class {}",
                "predicted": "predicted {}",
                "wrong": "wrong",
                "confident_unseen": "confident and never seen",
            }
            conditions.append(", ".join(named[name].format(value) for name, value in self._filter.items()))
        if len(self._selection):
            conditions.append(
                "selected" if len(self._selection) == len(self.shown) else f"of {len(self._selection):,} selected"
            )
        return f"{len(self.shown):,} of {len(self.rows):,} rows: {'; '.join(conditions)}" if conditions else ""


class SavedSelections(MutableMapping[str, Tensor]):
    """Selections by name, each the row numbers as int64 in increasing order."""

    def __init__(self, owner: RowSelection) -> None:
        self._owner = owner
        self._rows: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._rows:
            raise KeyError(f"no selection is saved as {name!r}; there are {', '.join(self._rows) or 'none'}")
        return self._rows[name].clone()

    def __setitem__(self, name: str, rows: Tensor | Sequence[int]) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"selections: expected a name to save the selection under; found {name!r}")
        checked = self._owner._checked(rows)
        if not len(checked):
            raise ValueError(f"selections[{name!r}]: no row is selected; an empty selection would list all rows")
        self._rows[name] = checked
        self._owner._refresh("selections")

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._rows[name]
        self._owner._refresh("selections")

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: {len(rows)} rows' for name, rows in self._rows.items())}}}"


__all__ = ["UNSEEN", "RowSelection", "SavedSelections"]
