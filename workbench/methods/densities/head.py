"""Scores that use the last layer's weights: the features outside their subspace, and the distance to the decision boundaries."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from workbench.methods.densities.base import Density, refuse_size
from workbench.methods.densities.features import Head, Rows
from workbench.methods.densities.moments import double, full_precision


class Headed(Density):
    """Score of the features before the last layer that uses the weights of that layer."""

    last_only: ClassVar[bool] = True
    needs_logits: ClassVar[bool] = True
    needs_head: ClassVar[bool] = True
    takes_probs: ClassVar[bool] = False
    by_position: ClassVar[bool] = False

    learned: ClassVar[tuple[str, ...]] = ("head_weight", "head_bias")

    head_weight: Tensor
    head_bias: Tensor

    @property
    def wants_logits(self) -> bool:
        return not self.fitted  # the fitted density computes them itself

    def _check_sizes(self, rows: Rows) -> None:
        refuse_size(self, rows.layers[-1].shape[1], self.head_weight.shape[1], "last features")

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        assert rows.head is not None  # `needs_head`
        dtype = self.head_weight.dtype
        with full_precision(rows.layers[-1]):
            self._learn_features(double(rows.layers[-1]), double(rows.head[0]), double(rows.head[1]))
        # copies, as the model's own weights may be trained further
        self.head_weight, self.head_bias = (part.to(rows.device, dtype, copy=True) for part in rows.head)
        self.to(rows.device)

    def _score(self, rows: Rows) -> Tensor:
        x = rows.layers[-1].to(torch.promote_types(self.head_weight.dtype, torch.float32))
        with full_precision(x):
            return self._strange(x).where(x.isfinite().all(1), torch.nan)

    def _logits(self, x: Tensor) -> Tensor:
        """Return class scores [m, classes] of features [m, d]."""
        return x @ self.head_weight.to(x.dtype).mT + self.head_bias.to(x.dtype)

    def _learn_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        """Learn from features and the last layer, all float64."""

    @abstractmethod
    def _strange(self, x: Tensor) -> Tensor:
        """Return the score [m] of features [m, d], higher for stranger rows."""


class VirtualLogit(Headed):
    """Virtual logit of the features outside their principal subspace, against the class logits (ViM: Wang et al. 2022).

    With the last layer's weight W and bias b, the features are centred at o = -W^+ b; R are the principal axes of the centred training features
    after the first D, and score = a |R' (x - o)| - log sum_c exp(logit_c), with a = (sum of the largest logits) / (sum of |R' (x - o)|) over
    the training rows. It is the log odds of the paper's probability. D is as in the paper: 1000 for 1500 or more features, 512 for 768 or
    more, otherwise half of them.

    Args:
        n_components: D; None: see above.

    Example:
        >>> x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([5.0, 5.0, 0.1, 0.1])
        >>> weight = torch.eye(2, 4)
        >>> density = VirtualLogit()
        >>> density.fit(x, x @ weight.T, head=(weight, torch.zeros(2)))
        >>> usual, off = density(torch.tensor([[5.0, 0.0, 0.0, 0.0], [5.0, 0.0, 2.0, 2.0]]))
        >>> bool(usual < 2 < 10 < off)
        True
    """

    learned: ClassVar[tuple[str, ...]] = (*Headed.learned, "origin", "axes")

    origin: Tensor
    axes: Tensor

    def __init__(self, *, n_components: int | None = None) -> None:
        super().__init__()
        if n_components is not None and n_components < 0:
            raise ValueError(f"n_components must not be negative, got {n_components}")
        self.n_components = n_components

    def _learn_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        d = x.shape[1]
        used = (
            self.n_components if self.n_components is not None else 1000 if d >= 1500 else 512 if d >= 768 else d // 2
        )
        if used >= d:
            raise ValueError(
                f"VirtualLogit keeps {used} principal axes of {d} features, so that none are left; give a smaller n_components"
            )
        origin = -torch.linalg.pinv(weight) @ bias
        centred = x - origin
        _, axes = torch.linalg.eigh(centred.mT @ centred / len(centred))
        residual_axes = axes[:, : d - used]  # eigenvalues are in ascending order
        length = (centred @ residual_axes).norm(dim=1).sum()
        largest = (x @ weight.mT + bias).amax(1).sum()
        factor = torch.where(length > 0, largest / length, 0)
        dtype, device = self.head_weight.dtype, self.head_weight.device
        self.origin, self.axes = origin.to(device, dtype), (factor * residual_axes).to(device, dtype).contiguous()

    def _strange(self, x: Tensor) -> Tensor:
        return ((x - self.origin) @ self.axes.to(x.dtype)).norm(dim=1) - self._logits(x).logsumexp(1)


class BoundaryDistance(Headed):
    """Minus the mean distance to the decision boundaries, in units of the distance to the training mean (fDBD: Liu & Qin 2024).

    score = -mean over classes c other than the predicted p of (logit_p - logit_c) / (|w_p - w_c| |x - m|), with the rows w of the last layer's
    weight and the mean m of the training features.

    Example:
        >>> x = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
        >>> x[:, 0] += 8 * (torch.arange(1000) % 2) - 4
        >>> weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> density = BoundaryDistance()
        >>> density.fit(x, x @ weight.T, head=(weight, torch.zeros(2)))
        >>> usual, between = density(torch.tensor([[4.0, 0.0], [0.1, 4.0]]))
        >>> bool(usual < 2 < between)
        True
    """

    learned: ClassVar[tuple[str, ...]] = (*Headed.learned, "location")

    location: Tensor

    def _learn_features(self, x: Tensor, weight: Tensor, bias: Tensor) -> None:
        self.location = x.mean(0).to(self.head_weight)

    def _strange(self, x: Tensor) -> Tensor:
        logits, weight = self._logits(x), self.head_weight.to(x.dtype)
        largest, predicted = logits.max(1)
        between = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
        others = torch.ones_like(logits).scatter(1, predicted[:, None], 0)
        # classes with equal weights have no boundary: their logits differ by a constant
        others = others * (between > 0)[predicted]
        distance = (largest[:, None] - logits) / between[predicted].where(others > 0, 1) * others
        return -distance.sum(1) / others.sum(1).clamp_min(1) / (x - self.location).norm(dim=1)


def find_head(pairs: Iterable[tuple[Tensor, Tensor | None]], features: Tensor, logits: Tensor) -> Head | None:
    """Find the layer that maps the features to the class scores.

    Args:
        pairs: Weights [classes, ...] and biases of the layers of a model.
        features: Inputs of the last layer [n, d], n >= 1.
        logits: Its outputs [n, classes].

    Returns:
        Weight [classes, d] and bias [classes]; None if no pair reproduces the class scores.
    """
    shape = (logits.shape[1], features.shape[1])
    coarse = min(logits.dtype.itemsize, features.dtype.itemsize) < 4
    finite = features.isfinite().all(1) & logits.isfinite().all(1)
    x, y = features[finite][:256].float(), logits[finite][:256].float()
    for weight, bias in pairs:
        scores = weight.shape[0]
        if weight.dim() < 2 or not weight.is_floating_point() or weight.numel() != scores * shape[1]:
            continue
        if scores not in ({1, 2} if shape[0] == 2 else {shape[0]}) or (bias is not None and bias.shape != (scores,)):
            continue
        w = weight.detach().reshape(scores, shape[1])
        b = w.new_zeros(scores) if bias is None else bias.detach()
        if scores < shape[0]:  # binary: one score, compared with a score of 0
            w, b = torch.cat([torch.zeros_like(w), w]), torch.cat([torch.zeros_like(b), b])
        # allows for rounding of sums of d terms, also in TF32
        tolerance = 3e-2 if coarse or weight.dtype.itemsize < 4 else 2e-3
        with full_precision(x):
            error = (x @ w.float().mT + b.float() - y).abs().amax() if len(x) else y.new_zeros(())
        if error <= tolerance * y.abs().amax().clamp_min(1e-6):
            return w, b
    return None


__all__ = ["BoundaryDistance", "VirtualLogit", "find_head"]
