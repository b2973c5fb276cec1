"""Densities with a likelihood: whitened features transported to a standard normal distribution."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workbench.methods.densities.base import Density, refuse_size
from workbench.methods.densities.features import Features, Rows
from workbench.methods.densities.moments import check_shrinkage, full_precision, whiten
from workbench.methods.densities.reduce import Reduce


class Likelihood(Density):
    """A density whose score is the negative log likelihood of the features, in nats.

    Features x are whitened in closed form, z = W (x - location), and transported to a standard normal u = T(z) that a
    subclass learns: nll(x) = |u|^2 / 2 + d/2 log(2 pi) - log |det dT/dz| - log |det W|.

    There are two ways to learn it, and `state_dict` holds the result of either: `fit(features)`, see `Density`, and

    - `risk.mean()` as a loss in training mode: the first batch sets the whitening, and centre and scale follow the nll
      of the training batches (bias-corrected exponential moving averages). They are constants to autograd: a risk
      standardized by its own batch would have mean 0 and no gradient. Detach the features, otherwise the network learns
      to shrink them. After `fit`, centre and scale stay fixed, in training mode too.

    The parameters of T are empty, and cost no time, as long as T is the identity and nothing trains it.

    Args:
        d: Number of features after reduction; None: known from the first features.
        n_components: Largest number of principal scores for each layer, where a list of layers is given.
        shrinkage: Share in [0, 1] of the identity in the covariance of the standardized features; None: the optimal
            one of Ledoit & Wolf (2004), at least 1e-4.
    """

    trainable: ClassVar[bool] = True

    learned: ClassVar[tuple[str, ...]] = ("location", "whitening")

    location: Tensor
    whitening: Tensor

    def __init__(self, d: int | None = None, *, n_components: int = 64, shrinkage: float | None = None) -> None:
        super().__init__()
        check_shrinkage(shrinkage)
        if n_components < 1 or (d is not None and d < 1):
            raise ValueError(f"n_components and d must be at least 1, got n_components={n_components} and d={d}")
        self.n_components = n_components
        self.shrinkage = shrinkage
        self._parameter_names = list(self._identity(1, torch.Generator()))
        for name in self._parameter_names:
            self.register_parameter(name, nn.Parameter(torch.empty(0)))
        if d is not None:
            self._grow(self._identity(d, torch.Generator().manual_seed(0)))

    @abstractmethod
    def _identity(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return parameters for d features with which the transport is the identity."""

    @abstractmethod
    def _transport(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Map whitened features [m, d] to a standard normal; also the log determinant, [m] or a scalar."""

    @property
    def _grown(self) -> bool:
        # not get_parameter: in a functional call they are plain tensors
        return all(getattr(self, name).numel() for name in self._parameter_names)

    def nll(self, features: Features) -> Tensor:
        """Return the negative log likelihood of each row, in nats.

        Args:
            features: As in `fit`, with m rows. For a list of layers, the likelihood is that of the reduced features.

        Returns:
            Tensor [m], differentiable, at least float32 (also under autocast).

        Raises:
            NotFittedError: If no training data were seen.
            ValueError: If the sizes differ from those fitted.
        """
        return self.score(features)

    def forward(self, features: Features, logits: Tensor | None = None) -> Tensor:
        trains = self.training and torch.is_grad_enabled()
        if trains and self.fitted and not self._grown and any(p.requires_grad for p in self.parameters()):
            self._grow(self._identity(len(self.location), torch.Generator().manual_seed(0)), self.location.device)
        return super().forward(features, logits)

    def _start(self, rows: Rows) -> None:
        super()._start(rows)
        self._learn(self._finite(rows))
        self._grow(self._identity(len(self.location), torch.Generator().manual_seed(0)), self.location.device)

    def _score(self, rows: Rows) -> Tensor:
        with full_precision(rows.layers[0]):
            return self._nll(self._reduced(rows))

    def _reduced(self, rows: Rows) -> Tensor:
        """Return the features [m, d] that the whitening takes, reduced if there are several layers."""
        dtype = torch.promote_types(self.location.dtype, torch.float32)
        if not self.reductions:
            return rows.layers[0].to(dtype)
        return torch.cat([r(v) for r, v in zip(self.reductions, rows.layers, strict=True)], 1).to(dtype)

    def _nll(self, x: Tensor) -> Tensor:
        whitening = self.whitening
        z = (x - self.location) @ whitening.to(x.dtype).T
        finite = z.isfinite().all(1)
        z = z.where(finite[:, None], 0)  # 0 * NaN would make the gradients of all parameters NaN
        u, log_det = self._transport(z) if self._grown else (z, 0.0)
        log_det = log_det + whitening.diagonal().to(z.dtype).log().sum()
        nll = 0.5 * u.square().sum(1) + 0.5 * u.shape[1] * math.log(2 * math.pi) - log_det
        return nll.where(finite, torch.nan)

    @torch.no_grad()
    def _learn(self, rows: Rows) -> None:
        device, dtype = rows.device, self.location.dtype
        reductions = nn.ModuleList()
        with full_precision(rows.layers[0]):
            for v in rows.layers if rows.reduced else []:
                reduce = Reduce(self.n_components).to(device, dtype)
                reduce.fit(v)
                reductions.append(reduce)
            x = (
                torch.cat([r(v) for r, v in zip(reductions, rows.layers, strict=True)], 1)
                if rows.reduced
                else rows.layers[0]
            )
            location, whitening = whiten(x.detach(), self.shrinkage)
        if self._grown:  # reset the trained parameters, but keep their sizes, which an optimizer may rely on
            start = self._identity(x.shape[1], torch.Generator().manual_seed(0))
            for name, value in start.items():
                present = self.get_parameter(name).shape
                if present != value.shape:
                    raise ValueError(
                        f"{x.shape[1]} features, but {type(self).__name__} has parameters of shape {list(present)}, made for "
                        "another number of features: build a new one"
                    )
            self._grow(start, device)
        self.reductions = reductions.train(self.training)
        self.location = location.to(device, dtype)
        # contiguous like a loaded one, so that results are bitwise equal
        self.whitening = whitening.to(device, dtype).contiguous()
        self.centre, self.scale, self.weight = (t.to(device) for t in (self.centre, self.scale, self.weight))

    def _grow(self, values: dict[str, Tensor], device: torch.device | None = None) -> None:
        for name, value in values.items():
            parameter = self.get_parameter(name)
            value = value.to(device or parameter.device, parameter.dtype)
            if (parameter.shape, parameter.device) == (value.shape, value.device):
                parameter.data.copy_(value)
            else:
                parameter.data = value  # keep the object, so that an existing optimizer trains it

    def _check_sizes(self, rows: Rows) -> None:
        known = [r.get_buffer("mean").numel() for r in self.reductions] or self.location.numel()
        sizes = [v.shape[1] for v in rows.layers]
        refuse_size(self, sizes if rows.reduced else sizes[0], known)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        location = state_dict.get(f"{prefix}location")
        names = [name for name in self._parameter_names if f"{prefix}{name}" in state_dict]
        if location is not None and location.numel() and self._grown:
            identity = self._identity(len(location), torch.Generator().manual_seed(0))
            for name in names:  # untrained in the state, but an optimizer may rely on the sizes here
                if not state_dict[f"{prefix}{name}"].numel():
                    state_dict[f"{prefix}{name}"] = identity[name]
        super()._load_from_state_dict(state_dict, prefix, *args)
