"""Base class of output distributions, which handles trees, shapes and precision; a family adds only its formulas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.engine.tree import children, flatten, holds

P = ParamSpec("P")
R = TypeVar("R")

RISK_FLOOR = 1e-9


class on_class_or_instance(Generic[P, R]):
    """Decorator of methods that can also be called on the class, and then act on an instance with default options."""

    def __init__(self, function: Callable[Concatenate[Any, P], R]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[P, R]:
        if instance is None:
            return MethodType(self.function, owner())
        return partial(self.function, instance)  # not a bound method: torch.compile can trace a partial


class _FiniteGradient(torch.autograd.Function):
    """Identity whose gradient saturates at the largest finite number instead of overflowing to infinity."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        limits = torch.finfo(grad.dtype)
        return grad.clamp(limits.min, limits.max)  # clamp keeps NaN visible


class Distribution(ABC):
    """Family of distributions, one for every element of a prediction, given by a location and a risk.

    The risk is a standard deviation in the units of the prediction (the scale for Cauchy, which has no standard deviation; of the logits for
    LogitNormal). Every public method works on the class (with default options) and on an instance (with its options).
    """

    location_scale: ClassVar[bool] = True
    """Whether y is distributed as location + risk * noise, so that a linear change of units applies to both."""
    by_risk: ClassVar[bool] = True
    """Whether a prediction and one risk for each of its elements determine the distribution."""
    standardizable: ClassVar[bool] = True
    """Whether targets may be standardized, unlike counts and proportions."""
    own_prediction: ClassVar[bool] = True
    """Whether the prediction is the model's own output; otherwise it depends on the heads as well."""
    trains_prediction: ClassVar[bool] = True
    """Whether the loss alone determines the prediction; otherwise it needs a loss of its own."""
    event_dims: ClassVar[int] = 0
    """Number of last dimensions of a prediction that form one event, with a single log_prob."""

    @property
    def n_heads(self) -> int:
        """Number of risk heads; if not one, their outputs are stacked to [n_heads, *prediction]."""
        return 1

    def for_targets(self, n: int | None) -> Distribution:
        """Return the family for a model whose last layer has n outputs (None if unknown), on which the number of heads may depend."""
        return self

    def structure(self) -> dict[str, Any]:
        """Return the options that determine the meaning of the heads, by name; a saved state needs the same options to be loaded."""
        return {}

    @on_class_or_instance
    def loss_function(self, y: Any, y_pred: Any, y_risk: Any, reduction: str = "mean") -> Any:
        """Compute the negative log-likelihood in nats, fully normalized.

        Gradients saturate at the largest finite number of their dtype, so that a single extreme row cannot make weights NaN.

        Args:
            y: Target, shaped like y_pred (LogitNormal: labels); a tensor or a tree (tuple, list, dict) like y_pred.
            y_pred: Prediction; leaves that are not floating-point tensors are skipped.
            y_risk: Risk > 0, shaped like y_pred and in its units; or an object with the attribute `aleatoric`.
                Leaves without risk (None) are skipped.
            reduction: "mean" (over the elements of a leaf, then over the leaves), "sum", or "none" (a tree of losses,
                None where skipped).

        Returns:
            The loss: a 0-dim tensor, or elementwise for "none". Half precision is computed and returned in float32.

        Raises:
            ValueError: If shapes or trees do not match, a value is outside the support, or there is nothing to score.
        """
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', found {reduction!r}")
        losses: list[Tensor | None] = []
        for where, loc, risk, target in _matching(y_pred, y_risk=aleatoric_of(y_risk), y=y):
            if risk is None or not (isinstance(loc, Tensor) and loc.is_floating_point()):
                losses.append(None)
                continue
            loc, risk, target = self._checked(where, loc, risk, target)
            losses.append(self._loss(target, _FiniteGradient.apply(loc), _FiniteGradient.apply(risk)))
        scored = [loss for loss in losses if loss is not None]
        if not scored or any(loss.numel() == 0 for loss in scored):
            raise ValueError("nothing to score: y_pred has no floating-point tensor with elements and a risk")
        if reduction == "none":
            return flatten(y_pred)[1](losses)
        if reduction == "sum":
            return torch.stack([loss.sum() for loss in scored]).sum()
        return torch.stack([loss.mean() for loss in scored]).mean()

    @on_class_or_instance
    def sample(self, prediction: tuple[Any, Any], generator: torch.Generator | None = None) -> Any:
        """Draw one value for every element, by the reparameterization trick (gradients reach prediction and risk).

        Args:
            prediction: The pair (y_pred, y_risk) that a wrapped model returns: tensors or matching trees; y_risk may be an
                object with the attribute `aleatoric`. Leaves without risk (None) or that are not floating-point are returned
                unchanged.
            generator: Source of the noise, on the device of y_pred; None for torch's global generator.

        Returns:
            The draw, with the structure, shapes and dtypes of y_pred.

        Raises:
            TypeError: If prediction is not a pair.
            ValueError: If shapes or trees do not match.
        """
        if not isinstance(prediction, tuple | list) or len(prediction) != 2:
            raise TypeError(f"sample takes one pair (y_pred, y_risk), found {type(prediction).__name__}")
        y_pred, y_risk = prediction
        draws = []
        for where, leaf, risk in _matching(y_pred, y_risk=aleatoric_of(y_risk)):
            if risk is None or not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
                draws.append(leaf)
                continue
            loc, risk = self._checked(where, leaf, risk)
            draws.append(self._draw(loc, risk, generator).to(leaf.dtype))
        return flatten(y_pred)[1](draws)

    @on_class_or_instance
    def log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the logarithm of the density (LogitNormal: of the probability) at y, elementwise, in nats; risk > 0."""
        loc, risk, y = self._checked("", loc, aleatoric_of(risk), y)
        return self._log_prob(y, loc, risk)

    @on_class_or_instance
    def cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the probability of a value up to y, elementwise; at risk 0, a step at the location, with one half on it."""
        loc, risk, y = self._checked("", loc, aleatoric_of(risk), y, zero_risk=True)
        return self._cdf(y, loc, risk)

    @on_class_or_instance
    def icdf(self, q: Tensor | float, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the quantile at probability q, the inverse of `cdf`, elementwise.

        Args:
            q: Probabilities in [0, 1], a number or a tensor that broadcasts against loc.
            loc: Location.
            risk: Risk >= 0, shaped like loc.
        """
        loc, risk = self._checked("", loc, aleatoric_of(risk), zero_risk=True)
        try:
            # float32 has no number between 1 - 6e-8 and 1
            wide = not isinstance(q, Tensor) or q.dtype == torch.float64
            q = torch.as_tensor(q, dtype=wide_dtype(loc) if wide else loc.dtype, device=loc.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"q must be a number or a tensor, found {type(q).__name__}") from error
        if not _broadcasts(q.shape, loc.shape):
            raise ValueError(
                f"q has shape {tuple(q.shape)}, which does not broadcast against loc of shape {tuple(loc.shape)}"
            )
        if not holds((q >= 0) & (q <= 1)):
            raise ValueError(f"q must lie in [0, 1], found values from {q.min().item()} to {q.max().item()}")
        return self._icdf(q, loc, risk).to(loc.dtype)

    @on_class_or_instance
    def crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the continuous ranked probability score in closed form, elementwise, in units of y; lower is better.

        The integral of (cdf(t) - 1[t >= y])^2 over t (Gneiting & Raftery 2007); at risk 0 it is the absolute error.
        """
        loc, risk, y = self._checked("", loc, aleatoric_of(risk), y, zero_risk=True)
        return self._crps(y, loc, risk)

    @on_class_or_instance
    def mean(self, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the expected value, elementwise, in the units of loc."""
        return self._mean(*self._checked("", loc, aleatoric_of(risk), zero_risk=True))

    @on_class_or_instance
    def stddev(self, loc: Tensor, risk: Tensor) -> Tensor:
        """Return the standard deviation, elementwise, in the units of loc."""
        return self._stddev(*self._checked("", loc, aleatoric_of(risk), zero_risk=True))

    @on_class_or_instance
    def to_risk(self, raw: Tensor) -> Tensor:
        """Map an unconstrained network output to a risk: softplus(raw) + 1e-9.

        The floor of 1e-9 (in units of the prediction) keeps densities finite where the network predicts no noise. Half
        precision cannot represent it: there the risk is computed and returned in float32.
        """
        if not isinstance(raw, Tensor) or raw.is_complex():
            raise TypeError(
                f"raw must be a real tensor, found {raw.dtype if isinstance(raw, Tensor) else type(raw).__name__}"
            )
        return F.softplus(raw.to(common_dtype(raw))) + RISK_FLOOR

    @on_class_or_instance
    def variances(self, risk: Tensor) -> dict[str, Tensor]:
        """Return the variances of a risk by kind ("aleatoric", ...), each shaped like the prediction, in its units squared."""
        return self._variances(risk)

    def moments(self, y_pred: Tensor, y_risk: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the prediction and the variances by kind, from the outputs of a model and its risk heads."""
        return y_pred, self.variances(y_risk)

    def check_targets(self, y: Tensor) -> None:  # noqa: B027  # by default every number has a density
        """Raise ValueError for targets that have no density for any parameters.

        Args:
            y: targets [rows, ...] on any device; their values are read.
        """

    def _checked(self, where: str, loc: Any, risk: Any, *y: Any, zero_risk: bool = False) -> list[Tensor]:
        """Check shapes and signs, and return location, risk (and target) in one dtype, at least float32."""
        names = ("y_pred", "y_risk", "y")
        for name, value in zip(names, (loc, risk, *y), strict=False):
            _check_tensor(f"{name}{where}", value)
        dtype = common_dtype(loc, risk, *(target for target in y if target.is_floating_point()))
        loc, risk = loc.to(dtype), risk.to(dtype)
        same_shape(**{f"y_risk{where}": risk, f"y_pred{where}": loc})
        if not holds((risk >= 0 if zero_risk else risk > 0) | risk.isnan()):
            bound = ">= 0" if zero_risk else "> 0"
            raise ValueError(f"y_risk{where} must be {bound}, found {risk.min().item()}; map raw outputs with to_risk")
        return [loc, risk, *(self._target(where, target, loc) for target in y)]

    def _target(self, where: str, y: Tensor, loc: Tensor) -> Tensor:
        same_shape(**{f"y{where}": y, f"y_pred{where}": loc})
        return y.to(loc.dtype)

    def _loss(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor:
        return -self._log_prob(y, loc, risk)

    @abstractmethod
    def _log_prob(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor: ...

    @abstractmethod
    def _cdf(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor: ...

    @abstractmethod
    def _icdf(self, q: Tensor, loc: Tensor, risk: Tensor) -> Tensor: ...

    @abstractmethod
    def _crps(self, y: Tensor, loc: Tensor, risk: Tensor) -> Tensor: ...

    @abstractmethod
    def _draw(self, loc: Tensor, risk: Tensor, generator: torch.Generator | None) -> Tensor: ...

    def _mean(self, loc: Tensor, risk: Tensor) -> Tensor:
        return loc

    def _stddev(self, loc: Tensor, risk: Tensor) -> Tensor:
        return risk

    def _variances(self, risk: Tensor) -> dict[str, Tensor]:
        return {"aleatoric": risk.square()}


class ManyHeads(Distribution):
    """Family with several numbers for every element of a prediction, stacked to [n_heads, *prediction]."""

    by_risk: ClassVar[bool] = False
    needs: ClassVar[str]
    """Description of these numbers, for error messages."""

    def _checked(self, where: str, loc: Any, risk: Any, *y: Any, zero_risk: bool = False) -> list[Tensor]:
        for name, value in (("y_pred", loc), ("y_risk", risk), *(("y", target) for target in y)):
            _check_tensor(f"{name}{where}", value)
        if risk.shape != (self.n_heads, *loc.shape):
            raise ValueError(
                f"y_risk{where} has shape {tuple(risk.shape)}, but {type(self).__name__} needs {(self.n_heads, *loc.shape)}, "
                f"{self.needs} of every element of y_pred{where}, shape {tuple(loc.shape)}. A Risk holds standard deviations, "
                "which do not determine them: train with wrapped.loss(criterion, x, y), or give to_risk of the raw heads"
            )
        dtype = common_dtype(loc, risk, *(target for target in y if target.is_floating_point()))
        loc, risk = loc.to(dtype), risk.to(dtype)
        return [loc, risk, *(self._target(where, target, loc) for target in y)]


def same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless both named tensors have the same shape: [n] and [n, 1] would broadcast silently."""
    (name, tensor), (other, expected) = tensors.items()
    if tensor.shape != expected.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but {other} has shape {tuple(expected.shape)}; shapes must be equal, "
            f"reshape {name} first (for example with unsqueeze(-1))"
        )


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(value).__name__}")
    if value.is_complex() or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor of real numbers, found {value.layout} of {value.dtype}")


def _broadcasts(first: torch.Size, second: torch.Size) -> bool:
    return all(1 in (a, b) or a == b for a, b in zip(reversed(first), reversed(second), strict=False))


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to which tensors are promoted together, float32 at least."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def wide_dtype(like: Tensor) -> torch.dtype:
    """Return float64, or float32 if the device does not support it."""
    return torch.float32 if like.device.type == "mps" else torch.float64


def aleatoric_of(risk: Any) -> Any:
    """Return the aleatoric part of a Risk; anything else unchanged."""
    return getattr(risk, "aleatoric", risk)


def _matching(y_pred: Any, where: str = "", **others: Any) -> Iterator[tuple[Any, ...]]:
    """Iterate over the leaves of y_pred, each as (path, leaf, the part of every other tree at the same path)."""
    parts = children(y_pred)
    if parts is None:
        yield (where, y_pred, *others.values())
        return
    paths = [path for path, _ in parts]
    columns = []
    for name, other in others.items():
        entries = children(other) or []
        # sequences match by position, so that the list that a data loader makes of a tuple still matches
        columns.append(
            dict(entries) if isinstance(y_pred, Mapping) else dict(zip(paths, (v for _, v in entries), strict=False))
        )
        if len(entries) != len(parts) or columns[-1].keys() != set(paths):
            raise ValueError(
                f"{name}{where} does not match y_pred{where}: "
                f"expected {type(y_pred).__name__} with {', '.join(paths)}; "
                f"found {type(other).__name__} with {', '.join(path for path, _ in entries) or 'no parts'}"
            )
    for path, value in parts:
        yield from _matching(value, where + path, **{n: c[path] for n, c in zip(others, columns, strict=True)})
