"""Baselines that use the class scores only."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from workbench.core.outputs.class_scores import at_least_float32
from workbench.methods.densities.base import Density, refuse_size
from workbench.methods.densities.features import Rows

_MAX_CLASSES = 100  # number of largest probabilities that the generalized entropy uses


class Output(Density):
    """Score of the model's own class scores; `fit` only standardizes it."""

    needs_features: ClassVar[bool] = False
    needs_logits: ClassVar[bool] = True

    learned: ClassVar[tuple[str, ...]] = ("classes",)

    classes: Tensor

    def _check_sizes(self, rows: Rows) -> None:
        refuse_size(self, _logits(rows).shape[1], self.classes.numel(), "logits")

    def _learn(self, rows: Rows) -> None:
        self.classes = torch.arange(_logits(rows).shape[1], dtype=self.classes.dtype)
        self.to(rows.device)

    def _score(self, rows: Rows) -> Tensor:
        logits = _logits(rows)
        score = self._strange(at_least_float32(logits))
        return score.where(logits.isfinite().all(1), torch.nan)

    @abstractmethod
    def _strange(self, logits: Tensor) -> Tensor:
        """Return the score [m] of logits [m, classes], higher for stranger rows."""


class MaxSoftmax(Output):
    """The largest probability p (MSP: Hendrycks & Gimpel 2017), as the log odds against it, log((1 - p) / p).

    They rank rows as -p does, and also distinguish rows whose p is rounded to 1.

    Example:
        >>> density = MaxSoftmax()
        >>> density.fit([], torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
        >>> sure, unsure = density([], torch.tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]]))
        >>> bool(sure < unsure)
        True
    """

    def _strange(self, logits: Tensor) -> Tensor:
        ordered = logits.sort(1, descending=True).values
        return ordered[:, 1:].logsumexp(1) - ordered[:, 0]


class GeneralizedEntropy(Output):
    """Generalized entropy of the probabilities, sum_c p_c^g (1 - p_c)^g over the 100 largest (GEN: Liu et al. 2023).

    Args:
        gamma: g in (0, 1); the smaller, the more small probabilities count.

    Example:
        >>> density = GeneralizedEntropy()
        >>> density.fit([], torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
        >>> sure, unsure = density([], torch.tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]]))
        >>> bool(sure < unsure)
        True
    """

    def __init__(self, *, gamma: float = 0.1) -> None:
        super().__init__()
        if not 0 < gamma < 1:
            raise ValueError(f"gamma must lie strictly between 0 and 1, got {gamma}")
        self.gamma = gamma

    def _strange(self, logits: Tensor) -> Tensor:
        ordered = logits.sort(1, descending=True).values
        log_p = ordered.log_softmax(1)
        # log(1 - p) of the largest, whose p may be rounded to 1, is computed from the others
        log_rest = torch.cat(
            [ordered[:, 1:].logsumexp(1, True) - ordered.logsumexp(1, True), (-log_p[:, 1:].exp()).log1p()], 1
        )
        return (self.gamma * (log_p + log_rest))[:, :_MAX_CLASSES].exp().sum(1)


class Energy(Output):
    """Free energy of the logits, -log sum_c exp(logit_c) (Liu et al. 2020, at temperature 1).

    Example:
        >>> density = Energy()
        >>> density.fit([], torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) + 9)
        >>> sure, unsure = density([], torch.tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]]))
        >>> bool(sure < unsure)
        True
    """

    takes_probs: ClassVar[bool] = False

    def _strange(self, logits: Tensor) -> Tensor:
        return -logits.logsumexp(1)


class MaxLogit(Output):
    """Minus the largest logit (Hendrycks et al. 2022).

    Example:
        >>> density = MaxLogit()
        >>> density.fit([], torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) + 9)
        >>> sure, unsure = density([], torch.tensor([[9.0, 0.0, 0.0], [0.1, 0.0, 0.0]]))
        >>> bool(sure < unsure)
        True
    """

    takes_probs: ClassVar[bool] = False

    def _strange(self, logits: Tensor) -> Tensor:
        return -logits.amax(1)


def _logits(rows: Rows) -> Tensor:
    assert rows.logits is not None  # `needs_logits`
    return rows.logits


__all__ = ["Energy", "GeneralizedEntropy", "MaxLogit", "MaxSoftmax"]
