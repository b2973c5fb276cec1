"""What every density shares: reducing, whitening, standardising, and being trained as a label-free loss."""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import NotFittedError, WorkbenchWarning
from workbench.wrappers.densities.reduce import Growing, Reduce, units

_DECAY = 0.95  # of the running centre and scale: about the last twenty batches count
_MIN_SHRINKAGE = 1e-4  # keeps features that are copies of one another from having infinite density
ENOUGH = 50  # rows for a single held-out part to tell centre and scale

Features = Tensor | Sequence[Tensor]


class Density(Growing, ABC):
    """A density over features whose standardised negative log likelihood is the vacuitic risk of a row.

    Features x are whitened in closed form, z = W (x - location), and transported to a standard normal u = T(z) by what
    a subclass learns: nll(x) = |u|^2 / 2 + d/2 log(2 pi) - log |det dT/dz| - log |det W|. The risk is
    (nll - centre) / scale.

    Two ways to learn it, and both give a state that `state_dict` keeps:

    - `fit(features)`: closed form (and a short training loop where there is more to learn). Centre and scale are what
      mean and standard deviation of the nll are expected to be on new rows, from 20 % held-out rows (with fewer than 50
      rows: of all rows, each held out once in five folds), for training rows look more usual than they are when
      features are many. Values further than ten robust standard deviations (1.4826 MAD) from the median are first
      clipped to there: a few wild rows would otherwise inflate the scale until the risk says nothing, and of normal
      data nearly nothing is clipped.
    - `risk.mean()` as a loss in training mode: the first batch sets the whitening, and centre and scale follow the nll
      of the training batches (bias-corrected exponential moving averages). They are constants to autograd: a risk
      standardised by its own batch would have mean 0 and no gradient. Detach the features: otherwise the network learns
      to shrink them. After `fit` they stay as they are, in training mode too.

    Args:
        d: Number of features after reduction, if known; else the first features tell.
        n_components: Largest number of principal scores for each layer, where a list of layers is given.
        shrinkage: Share in [0, 1] of the identity in the covariance of the standardised features; None: the optimal
            one of Ledoit & Wolf (2004), at least 1e-4.
    """

    location: Tensor
    whitening: Tensor
    centre: Tensor
    scale: Tensor
    weight: Tensor
    reductions: nn.ModuleList

    def __init__(self, d: int | None = None, *, n_components: int = 64, shrinkage: float | None = None) -> None:
        super().__init__()
        if shrinkage is not None and not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage is a share between 0 and 1, got {shrinkage}")
        if n_components < 1 or (d is not None and d < 1):
            raise ValueError(f"n_components and d must be at least 1, got n_components={n_components} and d={d}")
        self.n_components = n_components
        self.shrinkage = shrinkage
        self.reductions = nn.ModuleList()
        self.register_buffer("location", torch.empty(0))
        self.register_buffer("whitening", torch.empty(0))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("weight", torch.zeros(()))  # of all batches in the running centre and scale
        for name in self._start(1, torch.Generator()):
            self.register_parameter(name, nn.Parameter(torch.empty(0)))
        if d is not None:
            self._grow(self._start(d, torch.Generator().manual_seed(0)))

    @abstractmethod
    def _start(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Parameters for d features with which the transport is the identity."""

    @abstractmethod
    def _transport(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Map whitened features [m, d] to a standard normal; also the log determinant, [m] or a scalar."""

    @property
    def fitted(self) -> bool:
        """Whether training data were seen, by `fit` or by a batch in training mode."""
        return self.location.numel() > 0

    def fit(self, features: Features, *, generator: torch.Generator | None = None, seed: int = 0) -> None:
        """Standardise the density on held-out rows, then learn it from all rows in closed form.

        Args:
            features: Matrix [n, d], taken as it is, or a list with one matrix [n, d_l] per layer (see `pool`), each
                standardised and reduced to at most n_components scores and a residual. Rows with a value that is not
                finite are left out, with a warning. No gradient flows.
            generator: Deals out the held-out rows; the global random state is never used.
            seed: Of a new generator, where none is given.

        Raises:
            TypeError: If the features are not floating-point tensors.
            ValueError: If fewer than 2 finite rows are left, the sizes differ from those fitted before, or the
                covariance is singular because shrinkage is 0.
        """
        layers, reduced = self._check(features)
        layers = self._training_rows(layers)
        held_out, optimism = [], []
        for kept, held in deal(layers, generator or torch.Generator().manual_seed(seed)):
            trial = copy.deepcopy(self)  # an error leaves the density as it was
            trial._start_from(kept, reduced)
            held_out.append(trial.nll(held if reduced else held[0]).detach())
            own = trial.nll(kept if reduced else kept[0]).detach()
            optimism.append(robust_moments(held_out[-1])[0] - robust_moments(own)[0])
        self._start_from(layers, reduced)
        # the densities of parts and of all rows differ in level where features are degenerate, so the level is that of
        # the training rows under the final density, corrected for how much more usual they look than held-out ones
        level, scale = robust_moments(torch.cat(held_out))
        if len(layers[0]) >= ENOUGH:
            level = (
                robust_moments(self.nll(layers if reduced else layers[0]).detach())[0] + torch.stack(optimism).mean()
            )
        self._standardise(level, scale)

    def forward(self, features: Features) -> Tensor:
        """Vacuitic risk of each row.

        Args:
            features: As in `fit`, with m rows.

        Returns:
            Tensor [m], differentiable, in standard deviations above the mean of the training data. Rows with a value
            that is not finite get NaN.

        Raises:
            NotFittedError: In eval mode, if no training data were seen.
            TypeError: If the features are not floating-point tensors.
            ValueError: If the sizes differ from those fitted.
        """
        if not self.fitted:
            if not self.training:
                raise NotFittedError(
                    f"{type(self).__name__} has seen no training data, so no risk is known: call wrapped.fit(loader), "
                    "or train in training mode with wrapped(x, return_risk=True)[1].mean() as the loss"
                )
            layers, reduced = self._check(features)
            self._start_from(self._finite(layers), reduced)
        nll = self.nll(features)
        if self.training and self.weight.isfinite():
            self._follow(nll.detach())
        # copies: the next batch updates the buffers in place, and this one may be waiting for its backward pass
        return (nll - self.centre.clone()) / self.scale.clone()

    def nll(self, features: Features) -> Tensor:
        """Negative log likelihood of each row, in nats.

        Args:
            features: As in `fit`, with m rows. For a list of layers it is the likelihood of the reduced features.

        Returns:
            Tensor [m], differentiable, at least float32 (also under autocast).

        Raises:
            NotFittedError: If no training data were seen.
            ValueError: If the sizes differ from those fitted.
        """
        layers, _ = self._check(features)
        if not self.fitted:
            raise NotFittedError(f"{type(self).__name__} has seen no training data: call fit(features)")
        finite = torch.stack([v.isfinite().all(1) for v in layers]).all(0)
        layers = [v.where(finite[:, None], 0) for v in layers]  # 0 * NaN would reach the gradient of all parameters
        with full_precision(layers[0]):
            z = self._whiten(layers)
            u, log_det = self._transport(z)
        log_det = log_det + self.whitening.diagonal().to(z.dtype).log().sum()
        nll = 0.5 * u.square().sum(1) + 0.5 * u.shape[1] * math.log(2 * math.pi) - log_det
        return nll.where(finite, torch.nan)

    def _whiten(self, layers: Sequence[Tensor]) -> Tensor:
        dtype = torch.promote_types(self.location.dtype, torch.float32)
        x = torch.cat([r(v) for r, v in zip(self.reductions, layers, strict=True)], 1) if self.reductions else layers[0]
        return (x.to(dtype) - self.location) @ self.whitening.to(dtype).T

    @torch.no_grad()
    def _start_from(self, layers: Sequence[Tensor], reduced: bool) -> None:
        """Set reduction and whitening in closed form and the transport to the identity; all or nothing."""
        device, dtype = layers[0].device, self.location.dtype
        reductions = nn.ModuleList()
        with full_precision(layers[0]):
            for v in layers if reduced else []:
                reduce = Reduce(self.n_components).to(device, dtype)
                reduce.fit(v)
                reductions.append(reduce)
            x = torch.cat([r(v) for r, v in zip(reductions, layers, strict=True)], 1) if reduced else layers[0]
            location, whitening = whiten(x, self.shrinkage)
        start = self._start(x.shape[1], torch.Generator().manual_seed(0))
        for name, value in start.items():
            found = self.get_parameter(name).shape
            if found.numel() and found != value.shape:
                raise ValueError(
                    f"{x.shape[1]} features, but {type(self).__name__} has parameters of shape {list(found)}, made for "
                    "another number of features: build a new one"
                )
        self.reductions = reductions
        self.location = location.to(device, dtype)
        # contiguous as a loaded one is, for the same numbers to the last bit
        self.whitening = whitening.to(device, dtype).contiguous()
        self.centre, self.scale, self.weight = (t.to(device) for t in (self.centre, self.scale, self.weight))
        self._grow(start, device)

    def _grow(self, values: dict[str, Tensor], device: torch.device | None = None) -> None:
        for name, value in values.items():
            parameter = self.get_parameter(name)
            value = value.to(device or parameter.device, parameter.dtype)
            if (parameter.shape, parameter.device) == (value.shape, value.device):
                parameter.data.copy_(value)
            else:
                parameter.data = value  # the same object, so that an optimizer made before trains it

    @torch.no_grad()
    def _follow(self, nll: Tensor) -> None:
        """Move centre and scale to the nll of a training batch, as a bias-corrected moving average of its moments."""
        nll = nll[nll.isfinite()]
        if not len(nll):
            return
        mean, sd = robust_moments(nll)
        self.weight.mul_(_DECAY).add_(1)
        step = 1 / self.weight
        shift = mean - self.centre
        variance = (1 - step) * (self.scale.square() + step * shift.square()) + step * sd.square()
        self.centre.add_(step * shift)
        self.scale.copy_(variance.sqrt())

    def _standardise(self, centre: Tensor, scale: Tensor) -> None:
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.weight.fill_(torch.inf)  # no batch counts against them

    def _check(self, features: Features) -> tuple[list[Tensor], bool]:
        """The matrices of all layers, and whether they are to be reduced."""
        reduced = not isinstance(features, Tensor)
        layers = list(features) if not isinstance(features, Tensor) else [features]
        shapes = [list(v.shape) for v in layers]
        if not layers or any(not v.is_floating_point() for v in layers):
            raise TypeError(f"features must be floating-point tensors, got {[v.dtype for v in layers]}")
        if any(len(s) != 2 or s[0] != shapes[0][0] or not s[1] for s in shapes):
            raise ValueError(f"features must be matrices [rows, d] with the same rows, got shapes {shapes}; see pool")
        if self.fitted:
            known = [r.get_buffer("mean").numel() for r in self.reductions] or self.location.numel()
            found = [s[1] for s in shapes] if reduced else shapes[0][1]
            if known != found:
                raise ValueError(
                    f"features of size {found}, but {type(self).__name__} was fitted on size {known} (a list: one per "
                    "layer): give the same layers of the same model, or build a new density"
                )
        return layers, reduced

    def _finite(self, layers: list[Tensor]) -> list[Tensor]:
        """Finite rows only, at least two of them."""
        finite = torch.stack([v.isfinite().all(1) for v in layers]).all(0)
        kept = int(finite.sum())
        if kept < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least 2 rows of finite features to start from, got {kept} of "
                f"{len(finite)}: use more data or larger batches"
            )
        return layers if kept == len(finite) else [v[finite] for v in layers]

    def _training_rows(self, layers: list[Tensor]) -> list[Tensor]:
        """Finite rows for `fit`, detached and where the density is."""
        finite = self._finite(layers)
        n, left_out = len(layers[0]), len(layers[0]) - len(finite[0])
        if left_out:
            warnings.warn(
                f"{left_out} of {n} rows have features that are NaN or infinite; fitted without them. Find out which "
                "inputs give them",
                WorkbenchWarning,
                stacklevel=3,
            )
        device = self.location.device if self.fitted else layers[0].device
        return [v.detach().to(device) for v in finite]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        start = f"{prefix}reductions."
        count = len({key[len(start) :].split(".")[0] for key in state_dict if key.startswith(start)})
        if not self.fitted:  # children are loaded after their parent, so they only have to exist by then
            self.reductions = nn.ModuleList(Reduce(self.n_components).to(self.location) for _ in range(count))
        super()._load_from_state_dict(state_dict, prefix, *args)


def full_precision(like: Tensor) -> torch.autocast:
    """Context without autocast on the device of a tensor: half precision is too coarse for covariances and sums."""
    return torch.autocast(like.device.type, enabled=False)


def deal(layers: Sequence[Tensor], generator: torch.Generator) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Deal out the rows into kept (80 %) and held-out parts: once, or five times where rows are few.

    Args:
        layers: Tensors [n, d_l] with the same rows, n >= 2.
        generator: Shuffles the rows.

    Yields:
        Kept and held-out rows of all layers. With fewer than 50 rows every row is held out once.
    """
    n = len(layers[0])
    order = torch.randperm(n, generator=generator, device=generator.device).to(layers[0].device)
    parts = order.chunk(5)
    for held in parts[:1] if n >= ENOUGH else parts:
        kept = torch.cat([part for part in parts if part is not held])
        yield [v[kept] for v in layers], [v[held] for v in layers]


def ledoit_wolf(z: Tensor) -> float:
    """Shrinkage towards mu I that minimises the expected squared error of the covariance, mu = trace / d.

    rho = min(b, delta) / delta with delta = |S - mu I|^2 and b = sum_i |z_i z_i' - S|^2 / n^2, in Frobenius norms
    (Ledoit & Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004).

    Args:
        z: Centred float tensor [n, d].

    Returns:
        rho in [0, 1].

    Example:
        >>> ledoit_wolf(torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]))
        0.0
    """
    n, d = z.shape
    covariance = z.T @ z / n
    delta = covariance.square().sum() - covariance.trace().square() / d
    error = (z.square().sum(1).square().sum() / n - covariance.square().sum()) / n
    return float((error / delta).clamp(0, 1)) if delta > 0 else 0.0


def whiten(features: Tensor, shrinkage: float | None) -> tuple[Tensor, Tensor]:
    """Mean m and lower-triangular W with W' W = S^-1, S the shrunk covariance.

    Constant columns have no covariance. They are given the standard deviation that a single row among the n, off by
    the largest one, would have caused: silent in training, but heard when a dead feature comes to life.

    Args:
        features: Float tensor [n, d].
        shrinkage: Share of the identity in the covariance of the standardised columns; None: Ledoit-Wolf,
            at least 1e-4.

    Returns:
        m [d] and W [d, d], float64.

    Raises:
        ValueError: If the covariance is singular (shrinkage 0 and dependent columns).
    """
    n, d = features.shape
    x = features.to("cpu" if features.device.type == "mps" else features.device).double()  # mps has no float64
    mean, unit, constant = units(x)
    unit = torch.where(constant, unit / math.sqrt(n), unit)
    z = ((x - mean) / unit)[:, ~constant]
    covariance = torch.eye(d, dtype=x.dtype, device=x.device)
    if z.shape[1]:
        rho = max(ledoit_wolf(z), _MIN_SHRINKAGE) if shrinkage is None else shrinkage
        shrunk = (1 - rho) * (z.T @ z / n)
        shrunk.diagonal().add_(rho * z.square().mean())
        active = (~constant).nonzero()[:, 0]
        covariance[active[:, None], active] = shrunk
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        raise ValueError(
            f"the covariance of {d} features is singular on {n} rows and shrinkage={shrinkage} does not mend it: "
            "use shrinkage=None, or more rows"
        )
    inverse = torch.linalg.solve_triangular(factor, torch.eye(d, dtype=x.dtype, device=x.device), upper=False)
    return mean, inverse / unit


def robust_moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation after clipping to median +- 10 robust standard deviations (1.4826 MAD).

    Args:
        values: Float tensor [n], n >= 1.

    Returns:
        Two scalars; the standard deviation is 1 where all values are (numerically) equal.
    """
    median = values.median()
    mad = (values - median).abs().median()
    reach = torch.where(mad > 0, 14.826 * mad, torch.inf)
    variance, mean = torch.var_mean(values.clamp(median - reach, median + reach), correction=0)
    sd = variance.sqrt()
    return mean, torch.where(sd > 1e-6 * (1 + mean.abs()), sd, torch.ones_like(sd))
