"""Distributions of real values: Normal, Laplace, StudentT, Cauchy and LogNormal."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from workbench.distributions.base import Distribution, same_shape, wide_dtype
from workbench.distributions.joint import JointNormal
from workbench.engine.tree import holds
from workbench.errors import require

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
SQRT2 = math.sqrt(2)


class _LocationScale(Distribution):
    """Family y = loc + scale * noise, defined by its standard form (location 0, scale 1) and the scale that belongs to a risk."""

    def _scale(self, risk: Tensor) -> Tensor:
        return risk

    def _z(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        # at risk 0, divide by the smallest normal number: z is 0 at the location and huge elsewhere, never 0 / 0
        return (y - loc) / self._scale(risk).clamp_min(torch.finfo(risk.dtype).tiny)

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return self._standard_log_prob(self._z(y, loc, risk)) - self._scale(risk).log()

    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return self._standard_cdf(self._z(y, loc, risk))

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return loc + self._scale(risk) * self._standard_icdf(q)

    def _draw(self, loc: Tensor, risk: Tensor, generator: torch.Generator | None) -> Tensor:
        return loc + self._scale(risk) * self._noise(loc, generator)

    @abstractmethod
    def _standard_log_prob(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _standard_cdf(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _standard_icdf(self, q: Tensor) -> Tensor: ...

    @abstractmethod
    def _noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor: ...


@dataclass(frozen=True)
class Normal(_LocationScale):
    """Normal distribution; risk is its standard deviation.

    loss = log(risk) + z^2 / 2 + log(2 pi) / 2 with z = (y - loc) / risk, times risk^(2 beta) held constant (Seitzer et
    al. 2022: beta > 0 keeps hard rows from being explained away as noise; 1 weights rows as squared error does).
    crps = risk * (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)) (Gneiting & Raftery 2007).

    Args:
        beta: Exponent of the variance in the loss, from 0 to 1.
        joint: Whether the targets of a row have a full covariance; then the result is a `JointNormal`.
        n_targets: Number of targets of a joint distribution; by default the number of outputs of the last layer.

    Example:
        >>> import torch
        >>> one = torch.ones(1, 1)
        >>> Normal.log_prob(one, one, one)
        tensor([[-0.9189]])
        >>> Normal(beta=0.5).crps(0 * one, one, one)
        tensor([[0.6024]])
    """

    beta: float = field(default=0.0, metadata={"help": "exponent of the variance in the loss, from 0 to 1"})

    def __new__(cls, beta: float = 0.0, joint: bool = False, n_targets: int | None = None) -> Any:
        if not joint and n_targets is None:
            return super().__new__(cls)
        if beta or not joint:
            raise ValueError("beta is for single targets, and n_targets for joint=True: give one of them")
        return JointNormal(n_targets)

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta must lie in [0, 1], found {self.beta}")

    def _loss(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        loss = super()._loss(y, loc, risk)
        return loss * risk.detach() ** (2 * self.beta) if self.beta else loss

    def _standard_log_prob(self, z: Tensor) -> Tensor:
        return -0.5 * z**2 - LOG_SQRT_2PI

    def _standard_cdf(self, z: Tensor) -> Tensor:
        return normal_cdf(z)

    def _standard_icdf(self, q: Tensor) -> Tensor:
        return torch.special.ndtri(q)

    def _noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        z = self._z(y, loc, risk)
        density = (-0.5 * z**2 - LOG_SQRT_2PI).exp()
        return (y - loc) * torch.erf(z / SQRT2) + risk * (2 * density - 1 / math.sqrt(math.pi))


@dataclass(frozen=True)
class Laplace(_LocationScale):
    """Laplace distribution with scale b = risk / sqrt(2): absolute error as a likelihood, robust to outliers.

    loss = log(2 b) + |z| with z = (y - loc) / b; crps = b * (|z| + exp(-|z|) - 3/4) (Jordan et al. 2019).

    Example:
        >>> import torch
        >>> Laplace.icdf(0.5, torch.tensor([[3.0]]), torch.tensor([[1.0]]))
        tensor([[3.]])
    """

    def _scale(self, risk: Tensor) -> Tensor:
        return risk / SQRT2

    def _standard_log_prob(self, z: Tensor) -> Tensor:
        return -z.abs() - math.log(2)

    def _standard_cdf(self, z: Tensor) -> Tensor:
        tail = 0.5 * torch.exp(-z.abs())
        return torch.where(z < 0, tail, 1 - tail)

    def _standard_icdf(self, q: Tensor) -> Tensor:
        return -torch.sign(q - 0.5) * torch.log(2 * torch.minimum(q, 1 - q))

    def _noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        return _exponential(like, generator) - _exponential(like, generator)

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return (y - loc).abs() + self._scale(risk) * (torch.exp(-self._z(y, loc, risk).abs()) - 0.75)


class _HeavyTailed(_LocationScale):
    """Family whose density falls so slowly that its logarithm is an ordinary number even where (y - loc) / scale overflows."""

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        scale = self._scale(risk)
        return self._standard_log_prob(y - loc, scale=scale) - scale.log()

    @abstractmethod
    def _standard_log_prob(self, z: Tensor, *, scale: Tensor | None = None) -> Tensor:
        """Return the logarithm of the standard density at z, or at z / scale."""


class _StudentCdf(torch.autograd.Function):
    """Student's cdf by scipy (torch has no incomplete beta function); differentiable in z, not in df."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, distribution: StudentT) -> Tensor:
        stdtr = require("scipy.special").stdtr
        ctx.save_for_backward(z)
        ctx.distribution = distribution
        return torch.as_tensor(stdtr(distribution._numpy_df(), z.detach().double().cpu().numpy())).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return grad * ctx.distribution._standard_log_prob(z).exp(), None


@dataclass(frozen=True)
class StudentT(_HeavyTailed):
    """Student's t distribution with df > 2, scaled to standard deviation risk: s = risk * sqrt((df - 2) / df).

    loss = (df + 1) / 2 * log(1 + z^2 / df) + log(s) + log(sqrt(df) B(1/2, df/2)) with z = (y - loc) / s.
    crps = s * (z (2 F(z) - 1) + 2 (df + z^2) f(z) / (df - 1)
    - 2 sqrt(df) / (df - 1) * B(1/2, df - 1/2) / B(1/2, df/2)^2) (Jordan et al. 2019). Draws follow Bailey (1994).

    Args:
        df: Degrees of freedom > 2: a number, a 0-dim tensor, or one for each element, shaped like the prediction. An
            nn.Parameter is learned through loss_function and sample (cdf, icdf and crps give it no gradient): sculpt
            registers it in the wrapped model, so that optimizers and states include it. `fit` finds one number for given
            residuals.

    Example:
        >>> import torch
        >>> StudentT(df=4.0).cdf(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[0.5000]])
    """

    df: float | Tensor = field(default=5.0, metadata={"help": "degrees of freedom, above 2"})

    def __post_init__(self) -> None:
        if not holds((df := torch.as_tensor(self.df)) > 2):
            raise ValueError(
                f"df must be above 2, so that the standard deviation exists, found {df.min()}; use Cauchy for df = 1"
            )

    def structure(self) -> dict[str, Any]:
        if isinstance(self.df, nn.Parameter):
            return {"df": "learned"}
        return {"df": self.df.tolist() if isinstance(self.df, Tensor) else self.df}

    @classmethod
    def fit(cls, y: Tensor, loc: Tensor, risk: Tensor) -> StudentT:
        """Find the maximum-likelihood degrees of freedom for given targets, predictions and risks (preferably of held-out rows).

        Args:
            y: Target.
            loc: Prediction, shaped like y.
            risk: Standard deviation > 0, shaped like y.

        Returns:
            StudentT with df between 2.01 and 1000 (practically a Normal).
        """
        minimize_scalar = require("scipy.optimize").minimize_scalar
        y, loc, risk = (t.detach().double().cpu() for t in (y, loc, risk))

        def loss(log_excess: float) -> float:
            return cls(2 + math.exp(log_excess)).loss_function(y, loc, risk).item()

        optimum = minimize_scalar(
            loss, bounds=(math.log(0.01), math.log(998)), method="bounded", options={"xatol": 1e-4}
        )
        return cls(2 + math.exp(optimum.x))

    def _checked(self, where: str, loc: Any, risk: Any, *y: Any, zero_risk: bool = False) -> list[Tensor]:
        checked = super()._checked(where, loc, risk, *y, zero_risk=zero_risk)
        if isinstance(self.df, Tensor) and self.df.ndim:
            same_shape(**{"df": self.df, f"y_pred{where}": checked[0]})
        return checked

    def _scale(self, risk: Tensor) -> Tensor:
        ratio = (self.df - 2) / self.df
        return risk * (ratio**0.5 if isinstance(ratio, float) else ratio.sqrt().to(risk))

    def _standard_log_prob(self, z: Tensor, shift: int = 1, *, scale: Tensor | None = None) -> Tensor:
        # in float64 if the device supports it, because the two lgamma are large and nearly cancel for large df
        df: Any = self.df
        constant: Any
        if isinstance(df, Tensor):
            df = df if df.device.type == "mps" else df.double()
            constant = (torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * torch.log(math.pi * df)).to(z)
            df = df.to(z)
        else:
            constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi * df)
        return constant - (df + shift) / 2 * _log1p_square(z, df, scale)

    def _standard_cdf(self, z: Tensor) -> Tensor:
        return _StudentCdf.apply(z, self)

    def _standard_icdf(self, q: Tensor) -> Tensor:
        stdtrit = require("scipy.special").stdtrit
        return torch.as_tensor(stdtrit(self._numpy_df(), q.detach().double().cpu().numpy())).to(q)

    def _numpy_df(self) -> Any:
        return torch.as_tensor(self.df).detach().double().cpu().numpy()

    def _noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        angle = 2 * math.pi * torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
        df = torch.as_tensor(self.df).to(like)
        return torch.sqrt(df * torch.expm1(2 / df * _exponential(like, generator))) * torch.cos(angle)

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        betaln = require("scipy.special").betaln
        exact = self._numpy_df()
        df, z = torch.as_tensor(exact).to(risk), self._z(y, loc, risk)
        ratio = torch.as_tensor(betaln(0.5, exact - 0.5) - 2 * betaln(0.5, exact / 2)).exp().to(risk)
        limit = 2 * df.sqrt() / (df - 1) * ratio
        peak = df * self._standard_log_prob(z, shift=-1).exp()  # (df + z^2) f(z)
        return (y - loc) * (2 * self._standard_cdf(z) - 1) + self._scale(risk) * (2 * peak / (df - 1) - limit)


@dataclass(frozen=True)
class Cauchy(_HeavyTailed):
    """Cauchy distribution; risk is its scale (half the interquartile range), since it has no standard deviation.

    loss = log(pi risk) + log(1 + z^2) with z = (y - loc) / risk.

    Example:
        >>> import torch
        >>> Cauchy.icdf(0.75, torch.tensor([[0.0]]), torch.tensor([[2.0]]))
        tensor([[2.]])
    """

    def _standard_log_prob(self, z: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return -_log1p_square(z, scale=scale) - math.log(math.pi)

    def _standard_cdf(self, z: Tensor) -> Tensor:
        return torch.atan2(torch.ones_like(z), -z) / math.pi

    def _standard_icdf(self, q: Tensor) -> Tensor:
        return torch.sign(q - 0.5) / torch.tan(math.pi * torch.minimum(q, 1 - q))

    def _noise(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        uniform = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
        return torch.tan(math.pi * (uniform - 0.5))

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        raise ValueError(
            "Cauchy has no crps: the expected absolute error is infinite; use StudentT or score by log_prob"
        )

    def _mean(self, loc: Tensor, risk: Tensor) -> Tensor:
        raise ValueError("Cauchy has no mean; its location is the median")

    def _stddev(self, loc: Tensor, risk: Tensor) -> Tensor:
        raise ValueError("Cauchy has no standard deviation; its risk is the scale, half the interquartile range")


@dataclass(frozen=True)
class LogNormal(Distribution):
    """Log-normal distribution of values > 0; loc is its mean > 0, risk its standard deviation, both in units of y.

    To train a model, use `sculpt.Wrapper(torch.distributions.LogNormal)`: here its prediction would have to end in softplus or exp, which the
    risk head repeats, so that no risk is below 0.69.

    log y is normal with variance s^2 = log(1 + (risk / loc)^2) and mean mu = log(loc) - s^2 / 2 (moment matching).
    crps = y (2 Phi(z) - 1) - 2 loc (Phi(z - s) + Phi(s / sqrt(2)) - 1) with z = (log y - mu) / s (Baran & Lerch 2015).

    Example:
        >>> import torch
        >>> LogNormal.icdf(0.5, torch.tensor([[2.0]]), torch.tensor([[2.0]]))
        tensor([[1.4142]])
    """

    location_scale: ClassVar[bool] = False
    support: ClassVar[constraints.Constraint] = constraints.positive

    def _checked(self, where: str, loc: Any, risk: Any, *y: Any, zero_risk: bool = False) -> list[Tensor]:
        loc, risk, *target = super()._checked(where, loc, risk, *y, zero_risk=zero_risk)
        if not holds((loc > 0) | loc.isnan()):
            raise ValueError(
                f"LogNormal needs predictions > 0, found y_pred{where} = {loc.min().item()}; "
                "use sculpt.Wrapper(torch.distributions.LogNormal), for which the model ends in a linear layer, or choose Normal"
            )
        return [loc, risk, *target]

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        if not holds((y > 0) | y.isnan()):
            raise ValueError(
                f"LogNormal needs targets > 0, found {y.min().item()}; choose Normal for values of any sign"
            )
        mu, s = self._log_moments(loc, risk)
        log_y = y.to(mu).log()
        z = (log_y - mu) / s
        return (-0.5 * z**2 - LOG_SQRT_2PI - s.log() - log_y).to(loc.dtype)

    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return normal_cdf(self._z(y, *self._log_moments(loc, risk))).to(loc.dtype)

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        mu, s = self._log_moments(loc, risk)
        return torch.exp(mu + s * torch.special.ndtri(q.to(mu))).to(loc.dtype)

    def _draw(self, loc: Tensor, risk: Tensor, generator: torch.Generator | None) -> Tensor:
        mu, s = self._log_moments(loc, risk)
        return torch.exp(mu + s * torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device))

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        mu, s = self._log_moments(loc, risk)
        z = self._z(y, mu, s)
        # the formula of the class, rearranged so that large equal terms cancel exactly
        upper, lower = torch.erf(z / SQRT2), torch.erf((z - s) / SQRT2)
        return ((y - loc) * upper + loc * (upper - lower) - loc * torch.erf(s / 2)).to(loc.dtype)

    def _log_moments(self, loc: Tensor, risk: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of log y, in float64: the square of a risk far below or above loc leaves the range of float32."""
        loc, risk = loc.to(wide_dtype(loc)), risk.to(wide_dtype(risk))
        variance = torch.log1p((risk / loc) ** 2)
        return loc.log() - variance / 2, variance.sqrt()

    def _z(self, y: Tensor, mu: Tensor, s: Tensor) -> Tensor:
        return (y.to(mu).clamp_min(0).log() - mu) / s.clamp_min(torch.finfo(s.dtype).tiny)


def _exponential(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw from the standard exponential distribution; finite, because rand is never 1."""
    return -torch.log1p(-torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device))


def _log1p_square(z: Tensor, df: Any = 1.0, scale: Tensor | None = None) -> Tensor:
    """Return log(1 + z^2 / df) of z, or of z / scale, also where the square or the quotient overflows and the 1 is negligible."""
    far = (z if scale is None else z / scale).abs() > 2.0**60
    squared = 2 * z.abs().where(far, 1.0).log() - (df.log() if isinstance(df, Tensor) else math.log(df))
    z = z.where(~far, 0.0)  # before the division, whose gradient would be infinite
    if scale is not None:
        squared, z = squared - 2 * scale.log(), z / scale
    return torch.where(far, squared, torch.log1p(z**2 / df))


def normal_cdf(z: Tensor) -> Tensor:
    """Return the standard normal cdf, accurate also in the far lower tail, where torch.special.ndtr rounds to 0."""
    return 0.5 * torch.erfc(-z / SQRT2)
