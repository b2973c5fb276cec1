"""Sculpt: a second head predicts the spread of the noise in the data (aleatoric risk)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..distributions import Cauchy, Laplace, LogitNormal, LogNormal, Normal, StudentT
from ..distributions.base import Distribution
from ..engine.plan import Axis, Shared, Split
from ..engine.tree import is_float, tree_map
from ..initial import Draws
from ..method import Call, Method
from ..wrapping import Wrapper as _Wrapper

if TYPE_CHECKING:
    from ..table import Table


class Wrapper(_Wrapper):
    """Aleatoric risk from a risk head beside the model's own last layers (Nix & Weigend 1994).

    The risk head is a copy of the last layers, its very last one initialised anew; what it gives is mapped to a standard deviation by
    softplus. The model's own prediction is untouched. Train it by `wrapped.loss`, or add `distribution.loss_function(y, y_pred, y_risk)` to
    your loss, or put `distribution.sample((y_pred, y_risk))` into it.

    Args:
        distribution: of the targets, a class or an instance: Normal, Laplace, StudentT, Cauchy, LogNormal; LogitNormal for class logits.
        n_layers: how many of the last layers the risk head has of its own; by default 3, or all if the model has fewer.
        common: output, strategy, verbose, example, purity, chunk; see `workbench.Wrapper`.

    Example:
        >>> import torch
        >>> model = Wrapper(Normal, n_layers=1)(torch.nn.Linear(2, 1))
        >>> y, risk = model(torch.zeros(4, 2), return_risk=True)
        >>> loss = Normal.loss_function(torch.zeros(4, 1), y, risk)
    """

    def __init__(self, distribution: Any = Normal, n_layers: int | None = None, **common: Any) -> None:
        super().__init__(**common)
        chosen = (
            distribution()
            if isinstance(distribution, type) and issubclass(distribution, Distribution)
            else distribution
        )
        if not isinstance(chosen, Distribution):
            raise TypeError(
                "distribution must be Normal, Laplace, StudentT, Cauchy, LogNormal or LogitNormal (a class or an instance), "
                f"not {distribution!r}"
            )
        if n_layers is not None and (isinstance(n_layers, bool) or not isinstance(n_layers, int) or n_layers < 1):
            raise ValueError(f"n_layers must be a whole number of at least 1, not {n_layers!r}")
        self.distribution, self.n_layers = chosen, n_layers

    def make(self) -> list[Method]:
        return [Sculpt(self.distribution, self.n_layers)]


class Sculpt(Method):
    """The method on one model; see `Wrapper`."""

    name, kind, order = "sculpt", "aleatoric", 30

    def __init__(self, distribution: Distribution, n_layers: int | None) -> None:
        self.distribution, self.n_layers = distribution, n_layers

    def settings(self) -> dict[str, Any]:
        return {"distribution": type(self.distribution).__name__, "n_layers": self.n_layers}

    def axis(self, call: Call) -> Axis | None:
        # both heads must see the same noise, or they would be heads of different trunks
        return Axis(self.name, 2, "same", own_first=True) if call.return_risk else None

    def attach(self, table: Table) -> None:
        slots = table.tail(self.n_layers, "n_layers", default=3)
        if not any(table.value(name).is_floating_point() or table.value(name).is_complex() for name in slots):
            raise ValueError("the last layers hold no floating-point parameters for a risk head")
        last = table.layers()[-1] if table.layers() else ""
        draws = Draws(table, 1, fresh=True)
        for name in slots:
            slot, value = table.record.slots[name], table.value(name).detach()
            if not slot.buffer and slot.owners[0][0] == last:
                value = draws.stacked(name, value, 1.0)[0]
            new = table.register(f"{name}@sculpt", value.clone(), buffer=slot.buffer)
            if not slot.buffer and not value.is_floating_point() and not value.is_complex():
                table.get(new).requires_grad_(False)
            table.record.rules[name] = Split(self.name, (table.record.rules.get(name, Shared(name)), Shared(new)))

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        y, beside = parts["y"].unbind(dim)
        return {"y": y, "aleatoric": self._risk(beside).square()}

    def _risk(self, beside: Any) -> Any:
        """The standard deviation that the risk head's output stands for."""
        if not is_float(beside):
            return beside
        return self.distribution.to_risk(beside.real if beside.is_complex() else beside)

    def likelihood(self, target: Any, prediction: Any, beside: Any) -> Tensor:
        return self.distribution.loss_function(target, prediction, tree_map(self._risk, beside))

    def probs(self, scores: Tensor, beside: Tensor) -> Tensor:
        probs = getattr(self.distribution, "probs", None)
        if probs is None:
            raise ValueError(f"class outputs need sculpt.Wrapper(LogitNormal), not {type(self.distribution).__name__}")
        return probs(scores, self._risk(beside))


__all__ = ["Cauchy", "Laplace", "LogNormal", "LogitNormal", "Normal", "Sculpt", "StudentT", "Wrapper"]
