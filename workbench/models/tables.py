"""A network for tables: its numbers embedded column by column, then an MLP."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

from torch import Tensor, nn

from workbench.models.embedding_choice import MIN_TRAINED_ROWS, best_trained, chosen_rows, helps
from workbench.models.embeddings import (
    ColumnLinear,
    NumericColumns,
    Periodic,
    PiecewiseLinear,
    Standardization,
    quantile_edges,
)
from workbench.training.standardization import moments

if TYPE_CHECKING:
    from workbench.data import Data

Embedding = Literal["auto", "piecewise", "periodic", "none"]
Activation = Literal["silu", "relu"]
BINS = 16
BINS_AND_DIMS = ((BINS, 0), (48, 0), (48, 12))  # that "auto" tries on large tables
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU}


def tabular(
    data: Data,
    *,
    embedding: Embedding = "auto",
    bins: int | None = None,
    frequencies: int = 6,
    embedding_dim: int | None = None,
    width: int = 100,
    depth: int = 2,
    activation: Activation = "silu",
    dropout: float = 0.0,
) -> nn.Sequential:
    """An MLP on embedded columns, the network of TabM (Gorishniy et al. 2025) without its ensemble, which a wrapper makes.

    Inputs are in the units of the table: the first layer standardises them, and `workbench.fit` then does not. Each number is handed on
    beside an embedding of its column (Gorishniy et al. 2022). Columns of two different numbers, such as those that `Data.from_dataframe` makes
    of categories and of what is missing, become 0 and 1 and have no embedding. Means, scales and bins are counted on the training rows of
    `data`, never on its test rows; rows that `fit` holds out of them for validation are counted, their inputs and, where "auto" chooses,
    their targets. For another split of the data make another model, as `experiments.grid("tabular", ...)` does: the test rows of one split
    are training rows of the next.

    In TabM all members share their weights but for factors on both sides of each: `vote.Wrapper(16, share="rank1")`. There those of the first
    layer start at random signs, the others at one, and the last layer is each member's own; here all start at 1 + alpha times a normal draw.
    `fit(..., folds=)` wants voters with weights of their own, `vote.Wrapper(10)`.

    Args:
        data: whose inputs [n, features] and targets it is for; regression of one or more columns, classes, several labels.
        embedding: "piecewise", how far a number has come through each of its column's bins (`PiecewiseLinear`); "periodic", sines and cosines
            of it (`Periodic`); "none"; "auto", piecewise or none. Fewer than 4,000 training rows are judged by the leave-one-out error of
            kernel ridge regression on at most 800 of them, within about a second; more by the validation loss of networks trained for 30
            to 100 epochs on at most 20,000 of them, within about half a minute. Steps in the target favour bins, with which a smooth target
            is harder to learn.
        bins: maximal number per column, with about as many training rows in each; a column of fewer distinct numbers has fewer. None: 16;
            with "auto" on 4,000 training rows or more 16 or 48, whichever validates better.
        frequencies: number per column, each with a sine and a cosine.
        embedding_dim: size of the embedding of a column after a linear layer of its own and a ReLU; 0 leaves the embedding as it is. None: 0;
            with "auto" on 4,000 training rows or more 0, or 12 after 48 bins, whichever validates better.
        width: units of each hidden layer.
        depth: number of hidden layers.
        activation: of the hidden layers, "silu" (Hendrycks & Gimpel 2016), which is smooth, or "relu".
        dropout: probability that a hidden unit is left out in training.

    Returns:
        A plain model, from x [n, features] to [n, data.n_outputs].

    Raises:
        ValueError: the data is no table of floating-point numbers, holds NaN or infinite numbers, has several targets or targets of another
            shape; or a setting is out of range.

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
    for name, value, least in (
        ("bins", BINS if bins is None else bins, 1),
        ("frequencies", frequencies, 1),
        ("embedding_dim", embedding_dim or 0, 0),
        ("width", width, 1),
        ("depth", depth, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}; found {value!r}")
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; found {dropout!r}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; found {activation!r}")
    x, n_outputs = _table(data)
    standardization = Standardization(*_moments(x))
    standard = standardization(x.to(standardization.mean.dtype))
    numeric = [number for number, column in enumerate(standard.T) if len(column.unique()) > 2]

    def build(embedding: Embedding, bins: int, embedding_dim: int) -> nn.Sequential:
        layers: list[nn.Module] = [standardization]
        inputs = x.shape[1]
        if embedding != "none" and numeric:
            embedded: nn.Module
            if embedding == "periodic":
                embedded, numbers = Periodic(len(numeric), frequencies), 2 * frequencies
            else:
                embedded = PiecewiseLinear([quantile_edges(standard[:, number], bins) for number in numeric])
                numbers = embedded.start.shape[1]
            if embedding_dim:
                embedded = nn.Sequential(embedded, ColumnLinear(len(numeric), numbers, embedding_dim), nn.ReLU())
                numbers = embedding_dim
            layers.append(NumericColumns(numeric, embedded))
            inputs += len(numeric) * numbers
        sizes = [inputs, *[width] * depth]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), ACTIVATIONS[activation](), *([nn.Dropout(dropout)] if dropout else [])]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], n_outputs))

    if embedding == "auto" and numeric and len(x) >= MIN_TRAINED_ROWS:
        embedded_as = {(bins or n, dim if embedding_dim is None else embedding_dim) for n, dim in BINS_AND_DIMS}
        candidates: list[tuple[Embedding, int, int]] = [
            ("none", 0, 0),
            *(("piecewise", *each) for each in sorted(embedded_as)),
        ]
        return build(*best_trained(candidates, build, data))
    bins, embedding_dim = BINS if bins is None else bins, embedding_dim or 0
    if embedding == "auto" and numeric:
        edges = [quantile_edges(standard[:, number], bins) for number in numeric]
        some = chosen_rows(standard)
        embedded = NumericColumns(numeric, PiecewiseLinear(edges))(standard[some])
        embedding = "piecewise" if helps(standard[some], embedded, data.train.load().y[some]) else "none"
    return build(embedding, bins, embedding_dim)


def is_table(data: Data) -> bool:
    """Whether rows of the data are floating-point numbers [features] with one answer each, such as `tabular` takes.

    Example:
        >>> from workbench import data
        >>> is_table(data.load("diabetes")), is_table(data.load("digits"))
        (True, False)
    """
    row = data.train.take([0]).load()
    if isinstance(row.x, Mapping) or isinstance(row.y, Mapping):
        return False
    answers = 1 if data.task == "classification" else 2
    return row.x.ndim == 2 and row.x.shape[1] > 0 and row.x.is_floating_point() and row.y.ndim <= answers


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and scale of each column; two different numbers become 0 and 1, since the standard deviation of a rare category is small."""
    mean, scale = moments(x)
    least, greatest = x.aminmax(dim=0)
    is_binary = ((x == least) | (x == greatest)).all(0) & (least < greatest)
    return mean.where(~is_binary, least), scale.where(~is_binary, greatest - least)


def _table(data: Data) -> tuple[Tensor, int]:
    """The inputs of the training rows [n, features] in float64, and how many outputs a row has."""
    shape = list(data.input_shape)  # which refuses a dict
    if len(shape) != 1 or not shape[0]:
        raise ValueError(
            f"data: tabular takes tables, x [n, features]; a row of {data.name} is {shape}. For images take a convolutional network, for "
            "series and tokens one that knows their order"
        )
    train = data.train.load()
    if not train.x.is_floating_point():
        raise ValueError(
            f"data: x of {data.name} holds whole numbers ({str(train.x.dtype).removeprefix('torch.')}), which may be "
            "amounts or codes of categories: make amounts floating-point numbers, x.float(), and a Data of a table with categories by "
            "Data.from_dataframe(frame, target)"
        )
    x = train.x.double()
    if not bool(x.isfinite().all()):
        row, column = (~x.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"data: x of {data.name} is {float(x[row, column])} in training row {row}, column {column}; fill in what is missing, as "
            "Data.from_dataframe does"
        )
    n_outputs = data.n_outputs  # which refuses a dict
    if train.y.ndim > (1 if data.task == "classification" else 2):
        raise ValueError(
            f"data: tabular gives one answer for each row; the targets of {data.name} are {data.task} of shape {list(train.y.shape[1:])} in each"
        )
    return x, n_outputs


__all__ = ["Activation", "Embedding", "is_table", "tabular"]
