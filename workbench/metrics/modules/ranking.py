"""Metric classes for how well a risk ranks rows: out-of-distribution detection and selective prediction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.metrics import out_of_distribution, selective
from workbench.metrics._pieces import value_pieces
from workbench.metrics.modules.base import RowsMetric


class _Detection(RowsMetric):
    """A metric of two splits, which may be added in one call or separately."""

    states = ("risk_in", "risk_out")

    def update(self, risk_in: Any = None, risk_out: Any = None) -> None:
        """Add risks, of any shape, of in-distribution rows, out-of-distribution rows, or both."""
        if risk_in is None and risk_out is None:
            raise ValueError("give risk_in, risk_out or both")
        if risk_in is not None and risk_out is not None:
            out_of_distribution.splits(risk_in, risk_out)  # detects labels given instead of a split
        checked = [
            (s, out_of_distribution.split(s, r))
            for s, r in zip(self.states, (risk_in, risk_out), strict=True)
            if r is not None
        ]
        for state, risk in checked:
            getattr(self, state).append(risk.detach().to(self.device))


class AUROC(_Detection, of=out_of_distribution.auroc):
    """Area under the ROC curve of out-of-distribution detection; see `auroc`."""


class AUPR(_Detection, of=out_of_distribution.aupr):
    """Area under the precision-recall curve of out-of-distribution detection; see `aupr`."""


class FPR95(_Detection, of=out_of_distribution.fpr95):
    """False positive rate at which 95 % of out-of-distribution rows are detected; see `fpr95`."""

    of_rows = staticmethod(out_of_distribution.fpr95)


class RiskErrorCorrelation(RowsMetric, of=selective.risk_error_correlation):
    """Spearman's rank correlation of risk and absolute error; see `risk_error_correlation`."""

    def __init__(self, *, void: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.void = void

    def update(self, prediction: Any, risk: Any, target: Any, mask: Any = None) -> None:
        """Add a batch of predictions, risks and targets of one shape."""
        pieces = value_pieces(prediction=prediction, risk=risk, target=target, void=self.void, mask=mask)
        for loc, sd, y in list(pieces):  # check all pieces before adding one
            self._keep(sd, (loc - y).abs())

    def compute(self) -> Tensor:
        """Return the correlation over everything seen since the last reset."""
        risk, error = self._columns()
        return selective.risk_error_correlation(error, risk, torch.zeros_like(error))


class _Selective(RowsMetric):
    """A metric of risks and errors >= 0, one of each per row."""

    def update(self, risk: Any, error: Any, mask: Any = None) -> None:
        """Add a batch of risks and errors of one shape."""
        self._keep(*selective.ranked(risk, error, mask))


class AURC(_Selective, of=selective.aurc):
    """Area under the risk-coverage curve; see `aurc`."""


class AUGRC(_Selective, of=selective.augrc):
    """Area under the generalized risk-coverage curve; see `augrc`."""


class AUSE(_Selective, of=selective.ause):
    """Area under the sparsification error; see `ause`."""


class AURG(_Selective, of=selective.aurg):
    """Area under the random gain; see `aurg`."""


class ErrorAUROC(_Selective, of=selective.error_auroc):
    """Area under the ROC curve of detecting errors by their risk; see `error_auroc`."""
