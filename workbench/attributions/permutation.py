"""Which columns of a table carry the prediction, each risk and the error, by shuffling one column at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workbench.attributions.one_input import alone, one_input
from workbench.calibration.answers import Answers, check_known, check_labels, check_values, log_probabilities
from workbench.calibration.collection import collect
from workbench.calibration.models import check_model, output_of
from workbench.calibration.ranked_rows import row_risk
from workbench.console import progress_bar
from workbench.core.batches.arrays import is_frame
from workbench.core.batches.rows import TensorRows, bad_rows, read
from workbench.data import Data, Split
from workbench.data.columns import names_in
from workbench.data.frames import FrameEncoding
from workbench.data.reader import data_of
from workbench.engine.tree import tree_map
from workbench.errors import as_count, as_seed, require

# standard deviation over rows, relative to the largest value, below which values count as constant in float32
CONSTANT = 1e-5


@dataclass(frozen=True, eq=False)
class PermutationImportance:
    """Effect of shuffling each column of a table; see `permutation_importance`.

    Args:
        columns: names of the columns, or groups of columns, that were shuffled.
        values: importance [columns, repeats] by name: "prediction", each risk, and "error" if targets are known. Shares of a variance over
            rows; for the error an increase, in `unit`.
        rows: number of rows evaluated.
        unit: unit of the error.
    """

    columns: tuple[str, ...]
    values: Mapping[str, Tensor]
    rows: int
    unit: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the quantities with importance: the prediction, the risks and the error."""
        return tuple(self.values)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Mean over the permutations by name, each [columns]."""
        return {name: value.mean(1) for name, value in self.values.items()}

    @property
    def standard_error(self) -> dict[str, Tensor]:
        """Standard error of `mean` over the permutations by name, each [columns], for these rows and this model."""
        return {name: value.std(1) / value.shape[1] ** 0.5 for name, value in self.values.items()}

    def ranked(self, name: str = "total") -> tuple[str, ...]:
        """Return the columns, most important first, for a risk, "prediction" or "error"."""
        if name not in self.values:
            raise ValueError(f"name={name!r}: importance is known for {', '.join(self.names)}")
        order = self.mean[name].nan_to_num(0.0).sort(descending=True, stable=True).indices
        return tuple(self.columns[i] for i in order.tolist())

    def frame(self) -> Any:
        """Return a pandas DataFrame with a row for each column, and the mean and standard error for each name."""
        table = {}
        for name in self.names:
            table[name] = self.mean[name].numpy()
            table[f"{name} ±"] = self.standard_error[name].numpy()
        return require("pandas").DataFrame(table, index=list(self.columns))

    def __repr__(self) -> str:
        return f"PermutationImportance({len(self.columns)} columns of {self.rows:,} rows: {', '.join(self.names)})"


def permutation_importance(
    wrapped: nn.Module,
    data: Any,
    *,
    columns: Sequence[str] | Mapping[str, Sequence[int]] | None = None,
    of: int | str | None = None,
    n_repeats: int = 10,
    seed: int = 0,
    max_rows: int = 2000,
    batch_size: int = 1024,
    progress: bool = True,
) -> PermutationImportance:
    """Measure which columns of a table carry each risk, the prediction and the error: shuffle one column over the rows, and predict again.

    The importance for the error is the usual one: the increase of its mean over the rows (Breiman, Random forests, 2001; Fisher, Rudin and
    Dominici, All models are wrong, but many are useful, 2019). The mean of a *risk* may not change at all, since shuffling only swaps it
    between rows; so for risks and the prediction, importance is how far each row moves. With r_i = r(x_i), and r'_i the same with column j of
    another row:

        share_j = mean_i (r_i - r'_i)^2 / (Var r + Var r' + (mean r - mean r')^2),

    which is one minus the concordance correlation of the two (Lin, 1989). If columns are independent, it is the total-effect index (Sobol,
    2001; Jansen, 1999): the share of the variance of the risk over rows that column j contributes to, alone or with others. 0 means that the
    risk does not depend on the column, 1 that without it the risk says nothing. For a sum of terms of independent columns the shares add up
    to 1, with interactions to more. Like all permutation importance, it makes rows that may not exist if columns depend on each other, and a
    risk of unknown inputs then counts this against the column: shuffle such columns as one group.

    Args:
        wrapped: a trained wrapped model, or a calibrated one. It is evaluated in evaluation mode and never changed.
        data: a Data (its test rows), the name of one, a Split, a pair (x, y) of tensors or arrays, or inputs x [n, columns] alone, which have
            no error. A frame names the columns. For a Data made from a frame, the one-hot and "is missing" columns are shuffled together with
            the column that they encode. x may be a tuple of positional or a dict of keyword inputs, one of which is a table; pass a tuple
            without targets as the pair (x, None).
        columns: names of the columns; or groups to shuffle together, as a dict of names and column numbers. Columns in no group stay.
        of: which of several inputs is the table whose columns are shuffled, by position or name; the others stay.
        n_repeats: permutations of each column, at least 2.
        seed: seed of the permutations, which have their own generator; the same seed gives the same numbers.
        max_rows: maximum number of rows evaluated; of more rows a subset is drawn, always the same one.
        batch_size: rows evaluated at once.
        progress: whether to show a progress bar if it takes more than two seconds.

    Returns:
        Means, standard errors and single values; with several outputs, a row's risk is their root mean square. NaN for a risk (or prediction)
        that is the same for all rows, and so carried by no column.

    Raises:
        TypeError: if the model is not wrapped, or data is something else.
        ValueError: if x is no table, `of` names none of several inputs, a column does not exist, or targets and predictions do not fit.

    Example:
        >>> from workbench import sculpt
        >>> x = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
        >>> importance = permutation_importance(sculpt.Wrapper()(nn.Linear(3, 1)), (x, x[:, :1]), columns=["a", "b", "c"], n_repeats=3)
        >>> importance.mean["aleatoric"].shape, importance.names
        (torch.Size([3]), ('prediction', 'aleatoric', 'total', 'error'))
    """
    n_repeats, max_rows = as_count("n_repeats", n_repeats, 2), as_count("max_rows", max_rows, 2)
    check_model(wrapped)
    form = output_of(wrapped)
    model_inputs, y, named_columns, unit = _rows(data)
    x, with_others = _table(model_inputs, y, of)
    named_columns = named_columns or {f"x{i + 1}": [i] for i in range(x.shape[1])}
    groups = _groups(columns, named_columns, x.shape[1])
    generator = torch.Generator().manual_seed(as_seed(seed))
    if len(x) > max_rows:
        drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:max_rows].sort().values
        model_inputs, y = tree_map(lambda tensor: tensor[drawn], model_inputs), None if y is None else y[drawn]
        x, with_others = one_input(model_inputs, of, "a table")

    def evaluate(table: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        # the same seed in each call, so that a method's random draws do not count as an effect of the column
        rows = alone(with_others(table)) if y is None else (with_others(table), y)
        answers = collect(wrapped, rows, targets=y is not None, batch_size=batch_size, seed=seed)
        return _quantities(answers, form), None if y is None else _mean_error(answers, form)

    before, error = evaluate(x)
    values = {name: torch.full((len(groups), n_repeats), torch.nan, dtype=torch.float64) for name in before}
    if error is not None:
        values["error"] = values["prediction"].clone()
    bar = progress_bar(total=len(groups) * n_repeats, desc="permutations", delay=2, disable=not progress, leave=False)
    with bar:
        for i, group in enumerate(groups.values()):
            for k in range(n_repeats):
                shuffled = x.clone()
                order = torch.randperm(len(x), generator=generator)
                shuffled[:, group] = x[order][:, group]
                after, shuffled_error = evaluate(shuffled)
                for name, value in before.items():
                    values[name][i, k] = _share(value, after[name])
                if error is not None and shuffled_error is not None:
                    values["error"][i, k] = shuffled_error - error
                bar.update()
    return PermutationImportance(tuple(groups), values, len(x), unit)


def _rows(data: Any) -> tuple[Any, Tensor | None, dict[str, list[int]], str]:
    """Inputs, targets, columns of a single table by name (none if they are not known), and the unit of the error."""
    if isinstance(data, Data | str):
        dataset = data_of(data)
        unit = dataset.target.unit if dataset.classes is None else "nats"
        return dataset.test.x, dataset.test.y, _names(dataset), unit
    if isinstance(data, Split):
        data = (data.x, data.y)
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    x, y = data if is_pair else (data, None)
    names = {name: [i] for i, name in enumerate(names_in(x) or ())}
    if isinstance(x, np.ndarray) or is_frame(x) or (is_pair and (isinstance(y, np.ndarray) or is_frame(y))):
        rows = read((x, y) if is_pair else x, targets=is_pair)
        assert isinstance(rows, TensorRows)
        x, y = rows.x, rows.y if is_pair else None
    of_several = isinstance(x, tuple | Mapping)
    if isinstance(y, Tensor) or (y is None and (of_several if is_pair else isinstance(x, Tensor | Mapping))):
        return x, y, names, "" if y is None or y.is_floating_point() else "nats"
    raise TypeError(
        f"data: expected a Data, the name of one, a pair (x, y) of tensors or arrays, or x alone; found {type(data).__name__}. For a model "
        "with several inputs, x is a tuple or a dict; without targets, pass (x, None)"
    )


def _names(data: Data) -> dict[str, list[int]]:
    """Column numbers by name; empty if they do not fit the table."""
    names: dict[str, list[int]] = {}
    parts = data.encoding.parts if isinstance(data.encoding, FrameEncoding) else ()
    if parts and data.encoding.columns == data.features:
        start = 0
        for part in parts:
            names[part.name] = list(range(start, start + len(part.columns)))
            start += len(part.columns)
    else:
        names = {column.name: [i] for i, column in enumerate(data.features)}
    fits = isinstance(data.test.x, Tensor) and sum(map(len, names.values())) == data.test.x.shape[-1]
    return names if fits else {}


def _table(inputs: Any, y: Tensor | None, of: int | str | None) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The table, and a function that combines a changed table with the other inputs."""
    x, with_others = one_input(inputs, of, "a table")
    if x.ndim != 2:
        raise ValueError(
            f"data: x has shape {list(x.shape)}; permutation_importance takes tables [n, columns], attributions.occlusion images and tokens"
        )
    if len(x) < 2 or (y is not None and len(y) != len(x)):
        raise ValueError(f"data: {len(x)} rows of x and {len(x) if y is None else len(y)} of y; two rows are needed")
    if len(bad := bad_rows(x)):
        raise ValueError(f"data: x is NaN or infinite in {len(bad)} of {len(x)} rows, first in row {int(bad[0])}")
    return x, with_others


def _groups(
    columns: Sequence[str] | Mapping[str, Sequence[int]] | None, named_columns: dict[str, list[int]], count: int
) -> dict[str, list[int]]:
    if columns is None:
        return named_columns
    if not isinstance(columns, Mapping):
        if isinstance(columns, str) or len(columns) != count or len(set(columns)) != count:
            raise ValueError(f"columns: expected {count} different names, one for each column of x; found {columns!r}")
        return {name: [i] for i, name in enumerate(columns)}
    groups = {name: list(group) for name, group in columns.items()}
    for name, group in groups.items():
        are_valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < count for i in group)
        if not group or not are_valid or len(set(group)) != len(group):
            raise ValueError(
                f"columns[{name!r}]: expected different column numbers from 0 to {count - 1}; found {group!r}"
            )
    if not groups:
        raise ValueError("columns: the dict of groups is empty")
    return groups


def _quantities(answers: Answers, form: str) -> dict[str, Tensor]:
    """Prediction and risks, each [n, numbers], float64."""
    predicted = answers.y if form == "values" else log_probabilities(answers.y, form).exp()
    risks = {name: row_risk(answers.y, answers.risk, name, form) for name in answers.risk.names()}
    values = {"prediction": predicted, **risks}
    return {name: value.cpu().double().reshape(len(value), -1) for name, value in values.items()}


def _mean_error(answers: Answers, form: str) -> Tensor:
    """The mean of |prediction - target|, or for classes of -log p(true class) over the rows and positions that have a class."""
    if form == "values":
        check_values(answers, "permutation_importance")
        return (answers.y - answers.target).abs().double().mean().cpu()
    check_labels(answers, "permutation_importance")
    check_known(answers)
    logs = log_probabilities(answers.y, form).double()
    chosen = logs.gather(-1, answers.target.clamp_min(0)[..., None])[..., 0]
    return -chosen[answers.known].mean().cpu()


def _share(before: Tensor, after: Tensor) -> Tensor:
    """One minus the concordance correlation of two tensors [n, numbers]; NaN if the first is constant."""
    variance, variance_after = (value.var(0, correction=0).sum() for value in (before, after))
    if variance.sqrt() <= CONSTANT * before.abs().max():
        return variance.new_tensor(torch.nan)
    distance = (before.mean(0) - after.mean(0)).square().sum()
    return (before - after).square().sum(1).mean() / (variance + variance_after + distance)


__all__ = ["PermutationImportance", "permutation_importance"]
