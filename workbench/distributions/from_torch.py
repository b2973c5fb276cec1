"""Classes of torch.distributions as output distributions, with one head per parameter, constrained by `transform_to`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributions as families
from torch import Tensor
from torch.distributions import constraints, transform_to

from workbench.distributions.base import wide_dtype
from workbench.distributions.parametric import Parametric, raw_of, refuse_unless
from workbench.errors import require

# larger raw values would make differences of log-gammas lose all digits of float64
LARGEST_RAW_OF_SHAPES = 20.0
SHAPES = ("concentration", "concentration0", "concentration1", "total_count", "df")
# families that have a density on the boundary of their support
CLOSED = ("Exponential", "HalfNormal", "ContinuousBernoulli", "Poisson", "NegativeBinomial", "Geometric")
CLASSES = 'for class labels the model returns scores: wrap it with output="logits" or "binary", and sculpt.Wrapper(LogitNormal)'
ALTERNATIVES = {
    **dict.fromkeys(("Bernoulli", "Categorical", "OneHotCategorical", "OneHotCategoricalStraightThrough"), CLASSES),
    **dict.fromkeys(("Binomial", "Multinomial", "RelaxedBernoulli", "RelaxedOneHotCategorical"), CLASSES),
    **dict.fromkeys(
        ("MultivariateNormal", "LowRankMultivariateNormal"),
        "for several targets with a covariance, use sculpt.Wrapper(Normal(joint=True))",
    ),
    "MixtureSameFamily": "for a mixture density of k Normals, use sculpt.Wrapper(MixtureDensity(k))",
    "StudentT": "it has no standard deviation for df up to 2; use workbench.distributions.StudentT",
    "Cauchy": "it has neither a mean nor a standard deviation; use workbench.distributions.Cauchy, which gives its median and scale",
    "VonMises": "its variance is that on the circle, not in the units of the targets",
}
_SCIPY: dict[str, Callable[[Any], tuple[str, tuple[Any, ...], dict[str, Any]]]] = {
    "Poisson": lambda d: ("poisson", (d.rate,), {}),
    "NegativeBinomial": lambda d: ("nbinom", (d.total_count, (-d.logits).sigmoid()), {}),
    "Geometric": lambda d: ("nbinom", (1, d.logits.sigmoid()), {}),
    "Beta": lambda d: ("beta", (d.concentration1, d.concentration0), {}),
    "Gamma": lambda d: ("gamma", (d.concentration,), {"scale": 1 / d.rate}),
    "Chi2": lambda d: ("chi2", (d.df,), {}),
}


@dataclass(frozen=True)
class FromTorch(Parametric):
    """A class of torch.distributions with learned parameters, one head for each: Poisson, NegativeBinomial, Gamma, Beta, Dirichlet, ...

    The raw output of the model itself is the first parameter (`loc` or `logits` if there is one), and a risk head predicts each other one;
    `torch.distributions.transform_to` maps them to the constraints of the parameters, by exp to positive ones. Therefore the model must end in
    a linear layer, not in softplus or softmax. The prediction is the mean of the distribution, its risk the standard deviation.

    Methods take the raw outputs in place of a prediction and a risk.

    Args:
        family: class or its name; its mean and variance must exist for all parameters, and its support must not depend on them.

    Raises:
        ValueError: if the class does not qualify; the message says what to use instead.

    Example:
        >>> import torch
        >>> counts = FromTorch(torch.distributions.Poisson)
        >>> log_rate, none = torch.zeros(1, 1), torch.zeros(0, 1, 1)
        >>> counts.log_prob(torch.tensor([[2.0]]), log_rate, none)
        tensor([[-1.6931]])
        >>> counts.loss_function(torch.tensor([[0.5]]), log_rate, none)
        Traceback (most recent call last):
        ValueError: torch.distributions.Poisson is for counts, whole numbers from 0, found a target of 0.5; choose a distribution of such values
    """

    family: str | type = field(default="Gamma", metadata={"help": "a class of torch.distributions, or its name"})

    own_prediction: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = self.family if isinstance(self.family, str) else getattr(self.family, "__name__", "")
        cls = getattr(families, name, None)
        if not isinstance(self.family, str) and cls is not self.family:
            raise ValueError(
                f"{name or self.family!r} is not a class of torch.distributions; to define a new family, subclass "
                "workbench.distributions.Distribution"
            )
        if not isinstance(cls, type) or not issubclass(cls, families.Distribution):
            raise ValueError(f"there is no class {self.family!r} in torch.distributions")
        object.__setattr__(self, "family", name)
        if reason := ALTERNATIVES.get(name) or _problem(getattr(families, name)):
            raise ValueError(f"torch.distributions.{name} cannot be the distribution of a model's targets: {reason}")

    def __str__(self) -> str:
        return f"torch.distributions.{self.family}"

    @property
    def n_heads(self) -> int:
        return len(_parameters(self._class)) - 1

    def structure(self) -> dict[str, Any]:
        return {"family": self.family}

    @property
    def location_scale(self) -> bool:  # type: ignore[override]
        return self.standardizable

    @property
    def event_dims(self) -> int:  # type: ignore[override]
        return self._class.support.event_dim

    @property
    def standardizable(self) -> bool:  # type: ignore[override]
        return self._class.support is constraints.real and {"loc", "scale"} == set(self._class.arg_constraints)

    @property
    def support(self) -> constraints.Constraint:  # type: ignore[override]
        return self._class.support

    @property
    def has_start(self) -> bool:
        """Whether `start` supports the family, which holds for counts and positive values."""
        return self.family in _STARTS

    def start(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return raw outputs with a given mean and approximately a given variance (the mean only, for families of one parameter).

        Args:
            mean, variance: [...], above 0.

        Returns:
            The raw output of the model, followed by those of the heads, [1 + n_heads, ...].

        Example:
            >>> import torch
            >>> FromTorch("Poisson").start(torch.tensor(150.0), torch.tensor(400.0)).exp()
            tensor([150.0000])
        """
        raw = _STARTS[str(self.family)](mean, variance)
        return torch.stack([raw[name] for name in _parameters(self._class)])

    @property
    def _class(self) -> Any:
        return getattr(families, str(self.family))

    def at(self, y_pred: Tensor, y_risk: Tensor) -> families.Distribution:
        return _construct(self._class, [y_pred.to(wide_dtype(y_pred)), *y_risk.to(wide_dtype(y_risk))])

    def rescaled(self, loc: Tensor, heads: Tensor, scaling: Any) -> tuple[Tensor, Tensor]:
        if not self.standardizable:
            return super().rescaled(loc, heads, scaling)
        return scaling.prediction(loc), heads + scaling.y_scale.log().to(heads)

    def check_targets(self, y: Tensor) -> None:
        support = self._class.support
        remedy = "choose a distribution of such values"
        if support is constraints.nonnegative_integer:
            whole = (y >= 0) & (y == y.round()) & y.isfinite()
            refuse_unless(whole, y, f"{self} is for counts, whole numbers from 0", remedy)
        elif support is constraints.simplex:
            refuse_unless(y > 0, y, f"{self} is for proportions above 0", "replace zeros by a small proportion")
            total = y.double().sum(-1)
            refuse_unless(
                (total - 1).abs() < 1e-4,
                total,
                f"{self} is for proportions that sum to 1",
                "divide each row by its sum",
            )
        elif support is constraints.unit_interval:
            inside = (y >= 0) & (y <= 1) if self.family in CLOSED else (y > 0) & (y < 1)
            interval = "from 0 to 1" if self.family in CLOSED else "strictly between 0 and 1"
            refuse_unless(inside, y, f"{self} is for values {interval}", remedy)
        elif support is constraints.real:
            refuse_unless(y.isfinite(), y, f"{self} is for finite values", remedy)
        else:
            above = y >= 0 if self.family in CLOSED else y > 0
            refuse_unless(
                above & y.isfinite(),
                y,
                f"{self} is for values {'from' if self.family in CLOSED else 'above'} 0",
                remedy,
            )

    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        if self.family != "Weibull":
            return super()._log_prob(y, loc, risk)
        self.check_targets(y)
        return log_density_of_weibull(self.at(loc, risk), y).to(loc.dtype)

    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        if self.support is constraints.real:
            return self._by_scipy("cdf", y, loc, risk)
        # torch returns NaN outside the support
        inside = y.clamp(0, 1 if self.support is constraints.unit_interval else None)
        return self._by_scipy("cdf", inside, loc, risk).masked_fill(y < 0, 0.0)

    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return self._by_scipy("ppf", q, loc, risk)

    def _by_scipy(self, function: str, values: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        """Compute a function ("cdf" or "ppf") by scipy, without gradients, if torch lacks it."""
        distribution: Any = self.at(loc, risk)
        if self.family not in _SCIPY or (self.family == "Gamma" and function == "cdf"):
            values = values.to(wide_dtype(loc))
            return self._closed(
                "cdf" if function == "cdf" else "icdf", getattr(distribution, {"ppf": "icdf"}.get(function, function))
            )(values).to(loc.dtype)
        name, arguments, options = _SCIPY[str(self.family)](distribution)
        frozen = getattr(require("scipy.stats"), name)(
            *map(_numpy, arguments), **{k: _numpy(v) for k, v in options.items()}
        )
        return torch.as_tensor(getattr(frozen, function)(_numpy(values))).to(loc)

    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        distribution: Any = self.at(loc, risk)
        if self.family not in _CRPS:
            raise self._no_closed_form("crps")
        self.check_targets(y)
        return _CRPS[str(self.family)](y, distribution).to(loc.dtype)


def _parameters(cls: Any) -> tuple[str, ...]:
    """Return the names of the parameters, that of the model's own output first; logits rather than probabilities."""
    names = [name for name in cls.arg_constraints if name != "probs"]
    return tuple(sorted(names, key=lambda name: name not in ("loc", "logits")))


def _construct(cls: Any, raw: list[Tensor]) -> families.Distribution:
    values = {}
    for name, value in zip(_parameters(cls), raw, strict=True):
        if name in SHAPES:
            value = value.clamp(-LARGEST_RAW_OF_SHAPES, LARGEST_RAW_OF_SHAPES)
        elif name != "loc":
            value = raw_of(value)
        values[name] = transform_to(cls.arg_constraints[name])(value)
    return cls(**values, validate_args=False)


@cache
def _problem(cls: Any) -> str:
    """Return why the class cannot be fitted, "" if it can, found by constructing some instances."""
    support = cls.support
    if (
        isinstance(support, property)
        or not isinstance(support, constraints.Constraint)
        or constraints.is_dependent(support)
    ):
        return "its support depends on its parameters"
    try:
        for raw in (-1.0, 0.0, 1.0):
            made = _construct(cls, [torch.full((3,), raw, dtype=torch.float64)] * len(_parameters(cls)))
            if made.batch_shape + made.event_shape != (3,):
                return "its events are matrices, not the elements of a prediction"
            if not bool(made.mean.isfinite().all() and made.variance.isfinite().all()):
                return "it has no mean or no standard deviation for some of its parameters"
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"it has a parameter that is not one number per element, or has no mean and variance ({error or type(error).__name__})"
    return ""


def log_density_of_weibull(distribution: Any, y: Tensor) -> Tensor:
    """Return log k - log y + z - exp(z) with z = k log(y / scale): that of torch is NaN or -inf where (y / scale)^k is infinite or 0."""
    z = distribution.concentration * (y.log() - distribution.scale.log())
    return distribution.concentration.log() - y.log() + z - z.exp()


def _numpy(values: Any) -> Any:
    return values.detach().double().cpu().numpy() if isinstance(values, Tensor) else values


# ---- raw parameters by the method of moments
def _start_negative_binomial(mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    total = mean.square() / (variance - mean).maximum(mean / 100)  # the variance may be no larger than a Poisson's
    return {"logits": (mean / total).log(), "total_count": total.log()}


def _start_log_normal(mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    square = torch.log1p(variance / mean.square())
    return {"loc": mean.log() - square / 2, "scale": square.log() / 2}


def _start_weibull(mean: Tensor, variance: Tensor) -> dict[str, Tensor]:
    shape = (variance.sqrt() / mean).pow(-1.086)  # Justus et al. 1978
    return {"concentration": shape.log(), "scale": mean.log() - torch.lgamma(1 + 1 / shape)}


_STARTS: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {
    "Poisson": lambda mean, variance: {"rate": mean.log()},
    "NegativeBinomial": _start_negative_binomial,
    "Geometric": lambda mean, variance: {"logits": -mean.log()},
    "Exponential": lambda mean, variance: {"rate": -mean.log()},
    "Gamma": lambda mean, variance: {
        "concentration": (mean.square() / variance).log(),
        "rate": (mean / variance).log(),
    },
    "HalfNormal": lambda mean, variance: {"scale": mean.log() + math.log(math.pi / 2) / 2},
    "LogNormal": _start_log_normal,
    "Weibull": _start_weibull,
}


# ---- continuous ranked probability scores in closed form (Jordan et al. 2019)
def _crps_poisson(y: Tensor, d: Any) -> Tensor:
    rate = d.rate
    mass, upto = d.log_prob(y).exp(), torch.special.gammaincc(y + 1, rate)
    return (y - rate) * (2 * upto - 1) + rate * (2 * mass - torch.special.i0e(2 * rate) - torch.special.i1e(2 * rate))


def _crps_gamma(y: Tensor, d: Any) -> Tensor:
    a, rate = d.concentration, d.rate
    x = rate * y
    beta = (torch.lgamma(a + 0.5) - torch.lgamma(a)).exp() / math.sqrt(math.pi)  # 1 / B(1/2, a)
    below, above = torch.special.gammainc(a, x), torch.special.gammainc(a + 1, x)
    return (x * (2 * below - 1) - a * (2 * above - 1) - beta) / rate


def _crps_exponential(y: Tensor, d: Any) -> Tensor:
    return y - (2 * d.cdf(y) - 0.5) / d.rate


_CRPS = {"Poisson": _crps_poisson, "Gamma": _crps_gamma, "Exponential": _crps_exponential}

__all__ = ["FromTorch"]
