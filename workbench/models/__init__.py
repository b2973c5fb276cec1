"""Plain networks built for a given data set, to be wrapped like any other model.

Example:
    >>> from workbench import data, vote
    >>> diabetes = data.load("diabetes")
    >>> wrapped = vote.Wrapper(16, share="rank1")(tabular(diabetes))
    >>> y, risk = wrapped(diabetes.test.x, return_risk=True)
"""

from __future__ import annotations

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
from workbench.models.tables import is_table, tabular

__all__ = [
    "ColumnFactors",
    "ColumnLinear",
    "NumericColumns",
    "Periodic",
    "PiecewiseLinear",
    "PrincipalComponents",
    "Standardization",
    "is_table",
    "quantile_edges",
    "tabular",
    "whitening",
]
