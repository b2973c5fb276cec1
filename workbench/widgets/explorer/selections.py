"""Rows that were picked out: by their risks, by class, by what is wrong; kept under a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from workbench.widgets.explorer.explored import Explored

UNSEEN = 2.0  # vacuitic risk, in standard deviations over the training data, above which a row is called never seen


class RowSelection(Explored):
    """What an exploration lists: rows that pass the filter and, if any are selected, are among those; mixed into `Exploration`."""

    _ranked: Tensor

    def _start_selecting(self) -> None:
        self._selection = torch.empty(0, dtype=torch.int64)
        self._filter: dict[str, Any] = {}
        self._passing = torch.ones(len(self.rows), dtype=torch.bool)
        self._selections = SavedSelections(self)

    # ---- selected rows
    @property
    def selection(self) -> Tensor:
        """Numbers of the selected test rows, int64 in rising order, none at first; it can be set, None selects none."""
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
                f"selection: expected the numbers of rows, whole and in one dimension; found {numbers.dtype} {list(numbers.shape)}"
                f"{'; a mask becomes numbers by explorer.rows[mask]' if numbers.dtype == torch.bool else ''}"
            )
        numbers = numbers.long().unique()  # sorted as well
        if len(other := numbers[~torch.isin(numbers, self.rows)]):
            raise ValueError(
                f"selection: row {int(other[0])} is not among the {len(self.rows):,} rows that this explorer knows (explorer.rows)"
            )
        return numbers

    def brush(
        self, ranges: Mapping[str, tuple[float, float]] | None = None, *, add: bool = False, **more: tuple[float, float]
    ) -> Self:
        """Select the rows that lie within ranges of their risks or error, as a drag over the linked plot does.

        Only rows that pass the filter are taken. A number that is NaN lies within no range.

        Args:
            ranges: (lowest, highest), both included, by what cases can be ranked by.
            add: to what is selected already; else instead of it.
            more: the same, for names that are Python names.

        Returns:
            The object itself.

        Raises:
            ValueError: there is no such risk, or a range is none.

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
            low, high = (float(bound) for bound in pair)
            if not low <= high:
                raise ValueError(f"brush: {name}={pair!r} must be a lowest and a highest number, in this order")
            value = self._value(name).double()
            inside &= (value >= low) & (value <= high)
        rows = self.rows[inside]
        self._selection = torch.cat([self._selection, rows]).unique() if add else rows.clone()
        self._refresh("selection")
        return self

    def toggle(self, row: int) -> Self:
        """Take a row into the selection, or out of it."""
        one = self._checked([row])
        there = self._selection == one
        self._selection = self._selection[~there] if bool(there.any()) else torch.cat([self._selection, one]).unique()
        self._refresh("selection")
        return self

    @property
    def selections(self) -> SavedSelections:
        """Selections by name: `explorer.selections["odd"] = explorer.selection` keeps one, `explorer.selection = explorer.selections["odd"]`
        brings it back."""
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
        """List only rows that meet all of these; without any, all rows. The ranking, coverage and abstention stay those of all rows.

        Args:
            of_class: name or number of the true class.
            predicted: name or number of the predicted class; both together are one cell of `confusion`.
            wrong: only rows whose predicted class is not the true one.
            confident_unseen: only rows about which the model is sure and which are unlike the training data: total risk of at most its median
                over `rows` (where no total is measured, 1 - confidence), vacuitic risk above 2 standard deviations.

        Returns:
            The object itself.

        Raises:
            ValueError: the model or the data do not know it.
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
        """What the filter was told, and which of `rows` pass it [n]."""
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
                    "wrong: rows have no single class here that is right or wrong; brush those of large error, such as error=(10, inf)"
                )
            chosen["wrong"] = True
            passing &= self._answers.y != self._targets
        if confident_unseen:
            chosen["confident_unseen"] = True
            sure = self._value(self._sureness())
            passing &= (sure <= sure.double().median()) & (self._value("vacuitic") > UNSEEN)
        return chosen, passing

    @property
    def filters(self) -> dict[str, Any]:
        """What `filter` was told."""
        return dict(self._filter)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes that rows can be filtered by; none of values and of rows with several targets."""
        return tuple(self.data.classes or ()) if self.data.train.y.ndim == 1 else ()

    @property
    def confusion(self) -> Tensor:
        """How many of `rows` of each true class (down) are taken for each class (across), int64 [classes, classes].

        Raises:
            ValueError: rows have no single class.
        """
        count = len(self.class_names)
        if not count:
            raise ValueError(f"confusion: rows of {self.data.name} have no single class here")
        return torch.bincount(self._targets * count + self._answers.y, minlength=count**2).view(count, count)

    def _class_number(self, chosen: str | int, argument: str) -> int:
        names = self.class_names
        if chosen in names:
            return names.index(str(chosen))
        if isinstance(chosen, int) and not isinstance(chosen, bool) and 0 <= chosen < len(names):
            return chosen
        known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"
        raise ValueError(f"{argument}={chosen!r}: the classes of {self.data.name} are {known}")

    def _sureness(self) -> str:
        """The risk that is low where the model is sure."""
        known = self.rankings
        sure = next((name for name in ("total", "confidence") if name in known), None)
        if sure is None or "vacuitic" not in known:
            raise ValueError(
                f"confident_unseen needs total and vacuitic risk, and the model measures {', '.join(known[:-1]) or 'none'}; compose it with neo"
            )
        return sure

    @property
    def tells_unseen(self) -> bool:
        """Whether the model measures what `filter(confident_unseen=True)` needs."""
        try:
            return bool(self._sureness())
        except ValueError:
            return False

    # ---- what is listed
    @property
    def shown(self) -> Tensor:
        """Those of `ranked` that pass the filter and, if any rows are selected, are among those; int64, highest first."""
        places = torch.searchsorted(self.rows, self._ranked)
        keep = self._passing[places]
        if len(self._selection):
            keep = keep & torch.isin(self._ranked, self._selection)
        return self._ranked[keep]

    def shown_in_words(self) -> str:
        """Why not all rows are listed; "" if they are."""
        said = []
        if self._filter:
            named = {
                "of_class": "class {}",
                "predicted": "predicted {}",
                "wrong": "wrong",
                "confident_unseen": "confident and never seen",
            }
            said.append(", ".join(named[name].format(value) for name, value in self._filter.items()))
        if len(self._selection):
            said.append(
                "selected" if len(self._selection) == len(self.shown) else f"of {len(self._selection):,} selected"
            )
        return f"{len(self.shown):,} of {len(self.rows):,} rows: {'; '.join(said)}" if said else ""


class SavedSelections(MutableMapping[str, Tensor]):
    """Numbers of rows, int64 in rising order, by name."""

    def __init__(self, owner: RowSelection) -> None:
        self._owner = owner
        self._rows: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._rows:
            raise KeyError(f"no selection is saved as {name!r}; there are {', '.join(self._rows) or 'none'}")
        return self._rows[name].clone()

    def __setitem__(self, name: str, rows: Tensor | Sequence[int]) -> None:
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"a selection is saved under a name; found {name!r}")
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
