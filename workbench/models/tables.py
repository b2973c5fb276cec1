"""Network for tables: embeddings of the numeric columns, then an MLP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from workbench.errors import as_count
from workbench.models.embedding_choice import MIN_TRAINED_ROWS, best_judged, best_trained, chosen_rows, factors_of
from workbench.models.embeddings import (
    ColumnLinear,
    NumericColumns,
    Periodic,
    PiecewiseLinear,
    PrincipalComponents,
    Standardization,
    quantile_edges,
    whitening,
)
from workbench.models.relevance import ColumnFactors
from workbench.training.standardization import moments

if TYPE_CHECKING:
    from workbench.data import Data

Embedding = Literal["auto", "piecewise", "periodic", "none"]
Activation = Literal["silu", "relu"]
BINS = 16
BINS_AND_DIMS = ((BINS, 0), (48, 0), (48, 12))  # bins and embedding_dim that "auto" tries on large tables
MIN_CONDITION = 1e4  # of the correlation matrix, from which "auto" tries components
MIN_ROWS_PER_COLUMN = 10  # below, small components are estimated badly
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU}


def tabular(
    data: Data,
    *,
    embedding: Embedding = "auto",
    bins: int | None = None,
    frequencies: int = 6,
    embedding_dim: int | None = None,
    components: bool | None = None,
    relevance: bool | None = None,
    width: int = 100,
    depth: int = 2,
    activation: Activation = "silu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build an MLP on embedded columns, the network of TabM (Gorishniy et al. 2025) without its ensemble, which a wrapper adds.

    Inputs are in the units of the table: the first layer standardizes them, and `workbench.fit` then does not. The embedding of each numeric
    column is appended to the inputs (Gorishniy et al. 2022). Columns of two distinct numbers, such as those that `Data.from_dataframe` makes
    for categories and missing values, become 0 and 1 and have no embedding. Means, scales and bins are computed on the training rows of `data`,
    never on its test rows; this includes rows that `fit` later holds out for validation, their inputs and, for "auto", their targets. For
    another split of the data, build another model, as `experiments.grid("tabular", ...)` does: the test rows of one split are training rows of
    the next.

    In TabM, all members share their weights except for factors on both sides of each: `vote.Wrapper(16, share="rank1")`. There the factors of
    the first layer start at random signs, the others at one, and each member has its own last layer; here all factors start as normal
    draws around a common mean. `fit(..., folds=)` needs voters with separate weights, `vote.Wrapper(10)`.

    Args:
        data: data set that the network is for, with inputs [n, features]; regression of one or more columns, classes, or several labels.
        embedding: "piecewise", the position of a number within each of its column's bins (`PiecewiseLinear`); "periodic", its sines and cosines
            (`Periodic`); "none"; or "auto", piecewise or none. Fewer than 4,000 training rows are judged by the leave-one-out error of kernel
            ridge regression on at most 800 of them, within seconds; more by the validation loss of networks trained for 30 to 100
            epochs on at most 20,000 of them, within about half a minute. Bins suit targets with steps, and make smooth targets harder to learn.
        bins: maximum number of bins per column, with about equally many training rows each; a column with fewer distinct numbers has fewer.
            None: 16; with "auto" on 4,000 training rows or more, 16 or 48, whichever validates better.
        frequencies: number of frequencies per column, each with a sine and a cosine.
        embedding_dim: size of the embedding of a column after a linear layer and a ReLU for that column; 0 leaves them out. None: 0; with
            "auto" on 4,000 training rows or more, 0, or 12 after 48 bins, whichever validates better.
        components: whether to append the principal components of the numeric columns, each scaled to variance 1 (`PrincipalComponents`), so that
            small differences of nearly collinear columns are learned as fast as the columns. None: False; with "auto", if the condition number
            of the correlation matrix is above 10,000, whichever validates better after a short training.
        relevance: whether to multiply each column and its embedding by a fixed factor that grows with the relevance of the column, so that
            columns which tell nothing about the targets or their noise hardly count (`column_factors`: automatic relevance determination,
            MacKay 1994, on at most 400 training rows and their targets). None: False; with "auto" on fewer than 4,000 training rows,
            whichever has the smaller leave-one-out error, if there are at least 10 rows for each column. A row that differs from the
            training rows only in columns that hardly count looks like them to the network.
        width: number of units of each hidden layer.
        depth: number of hidden layers.
        activation: activation of the hidden layers, "silu" (Hendrycks & Gimpel 2016), which is smooth, or "relu".
        dropout: probability of dropping a hidden unit in training.

    Returns:
        A plain model from x [n, features] to [n, data.n_outputs].

    Raises:
        ValueError: if the data is not a table of floating-point numbers, has NaN or infinite values, several targets or targets of another
            shape; or if an argument is out of range.

    Example:
        >>> from workbench import compose, data, fit, models, sculpt, vote
        >>> diabetes = data.load("diabetes")
        >>> model = models.tabular(diabetes, width=20)
        >>> wrapped = compose(vote.Wrapper(4, share="rank1"), sculpt.Wrapper())(model)
        >>> history = fit(wrapped, diabetes, epochs=1)
        >>> y, risk = wrapped(diabetes.test.x, return_risk=True)
        >>> y.shape, risk.names()
        (torch.Size([89, 1]), ('aleatoric', 'epistemic', 'total'))
    """
    if embedding not in get_args(Embedding):
        raise ValueError(f"embedding must be one of {', '.join(map(repr, get_args(Embedding)))}; found {embedding!r}")
    for name, value, minimum in (
        ("bins", BINS if bins is None else bins, 1),
        ("frequencies", frequencies, 1),
        ("embedding_dim", embedding_dim or 0, 0),
        ("width", width, 1),
        ("depth", depth, 0),
    ):
        as_count(name, value, minimum)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; found {dropout!r}")
    if not isinstance(components, bool | None):
        raise ValueError(f"components must be True, False or None; found {components!r}")
    if not isinstance(relevance, bool | None):
        raise ValueError(f"relevance must be True, False or None; found {relevance!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; found {activation!r}")
    x, n_outputs = _table(data)
    standardization = Standardization(*_moments(x))
    standardized = standardization(x.to(standardization.mean.dtype))
    numeric = [number for number, column in enumerate(standardized.T) if len(column.unique()) > 2]

    projection, condition = whitening(standardized[:, numeric]) if numeric else (None, 1.0)

    def build(embedding: Embedding, bins: int, embedding_dim: int, components: bool = False) -> nn.Sequential:
        layers: list[nn.Module] = [standardization]
        inputs = x.shape[1]
        factor = [] if factors is None else [factors]
        if components and projection is not None:
            layers.append(PrincipalComponents(numeric, projection))
            inputs += projection.shape[1]
            factor.append(torch.ones(projection.shape[1], dtype=torch.float64))
        if embedding != "none" and numeric:
            embedded: nn.Module
            if embedding == "periodic":
                embedded, numbers = Periodic(len(numeric), frequencies), 2 * frequencies
            else:
                embedded = PiecewiseLinear([quantile_edges(standardized[:, number], bins) for number in numeric])
                numbers = embedded.start.shape[1]
            if embedding_dim:
                embedded = nn.Sequential(embedded, ColumnLinear(len(numeric), numbers, embedding_dim), nn.ReLU())
                numbers = embedding_dim
            layers.append(NumericColumns(numeric, embedded))
            inputs += len(numeric) * numbers
            if factors is not None:
                factor.append(factors[numeric].repeat_interleave(numbers))
        if factors is not None:
            layers.append(ColumnFactors(torch.cat(factor)))
        sizes = [inputs, *[width] * depth]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), ACTIVATIONS[activation](), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs))

    is_auto = embedding == "auto"
    is_trained = is_auto and bool(numeric) and len(x) >= MIN_TRAINED_ROWS
    factors: Tensor | None = None
    if relevance or (is_auto and numeric and not is_trained):
        judged = chosen_rows(standardized)
        plain, y = standardized[judged], data.train.load().y[judged]
        factors = factors_of(plain, y, relevance)
    if is_trained:
        embedded_as = {(bins or n, dim if embedding_dim is None else embedding_dim) for n, dim in BINS_AND_DIMS}
        candidates: list[tuple[Embedding, int, int]] = [
            ("none", 0, 0),
            *(("piecewise", *each) for each in sorted(embedded_as)),
        ]
        chosen = best_trained(candidates, build, data)
    else:
        bins, embedding_dim = BINS if bins is None else bins, embedding_dim or 0
        if is_auto and numeric:
            edges = [quantile_edges(standardized[:, number], bins) for number in numeric]
            layer = PiecewiseLinear(edges)
            embedded = NumericColumns(numeric, layer)(plain)
            repeats = torch.tensor([*range(x.shape[1]), *(number for number in numeric for _ in layer.start[0])])
            is_embedded, factors = best_judged(plain, embedded, repeats, y, factors, relevance)
            embedding = "piecewise" if is_embedded else "none"
        chosen = (embedding, bins, embedding_dim)
    if components is None and is_auto and condition > MIN_CONDITION and len(x) >= MIN_ROWS_PER_COLUMN * len(numeric):
        components = best_trained([(*chosen, False), (*chosen, True)], build, data)[-1]
    return build(*chosen, bool(components))


def is_table(data: Data) -> bool:
    """Whether rows of the data are floating-point numbers [features] with one target tensor each, as `tabular` needs.

    Example:
        >>> from workbench import data
        >>> is_table(data.load("diabetes")), is_table(data.load("digits"))
        (True, False)
    """
    row = data.train.take([0]).load()
    if isinstance(row.x, Mapping) or isinstance(row.y, Mapping):
        return False
    max_dims = 1 if data.task == "classification" else 2
    return row.x.ndim == 2 and row.x.shape[1] > 0 and row.x.is_floating_point() and row.y.ndim <= max_dims


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and scale of each column; a binary column becomes 0 and 1, since the standard deviation of a rare category is small."""
    mean, scale = moments(x)
    minimum, maximum = x.aminmax(dim=0)
    is_binary = ((x == minimum) | (x == maximum)).all(0) & (minimum < maximum)
    return mean.where(~is_binary, minimum), scale.where(~is_binary, maximum - minimum)


def _table(data: Data) -> tuple[Tensor, int]:
    """Return the inputs of the training rows [n, features] in float64, and the number of outputs per row."""
    shape = list(data.input_shape)  # raises for a dict
    if len(shape) != 1 or not shape[0]:
        raise ValueError(
            f"data: tabular takes tables, x [n, features]; a row of {data.name} has shape {shape}. For images use a convolutional network, for "
            "series and tokens a sequence model"
        )
    train = data.train.load()
    if not train.x.is_floating_point():
        raise ValueError(
            f"data: x of {data.name} has whole numbers ({str(train.x.dtype).removeprefix('torch.')}), which may be amounts or codes of "
            "categories: convert amounts to floating-point numbers, x.float(), and load a table with categories by "
            "Data.from_dataframe(frame, target)"
        )
    x = train.x.double()
    if not bool(x.isfinite().all()):
        row, column = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"data: x of {data.name} is {float(x[row, column])} in training row {row}, column {column}; fill in missing values, as "
            "Data.from_dataframe does"
        )
    n_outputs = data.n_outputs  # raises for a dict
    if train.y.ndim > (1 if data.task == "classification" else 2):
        raise ValueError(
            f"data: tabular predicts one target per row; the targets of {data.name} are {data.task} of shape {list(train.y.shape[1:])} per row"
        )
    return x, n_outputs


__all__ = ["Activation", "Embedding", "is_table", "tabular"]
