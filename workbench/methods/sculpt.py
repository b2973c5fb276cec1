"""Sculpt: aleatoric risk, the noise in the data, predicted by extra heads of the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributions import Distribution as TorchDistribution

from ..core.additions import MARK, add_extra, extra
from ..core.calls.bounded_ends import RAISED
from ..core.method import Call, Method, split_heads
from ..core.outputs.class_scores import Classes
from ..core.outputs.meanings import IGNORED, Meaning
from ..core.outputs.options import form_of
from ..core.quantized import is_quantized, refuse_quantized
from ..core.settings import setting
from ..core.wrapper import Wrapper as _Wrapper
from ..distributions import (
    _FAMILIES,
    Cauchy,
    Censored,
    FromTorch,
    JointNormal,
    Laplace,
    LogitNormal,
    LogNormal,
    MixtureDensity,
    Normal,
    NormalInverseGamma,
    Quantiles,
    StudentT,
)
from ..distributions.base import Distribution
from ..engine.effects.random import values_unavailable
from ..engine.plan import Axis, Shared, Split
from ..engine.tree import is_float, tree_map
from ..introspect.ends import ends_of
from .computed_weights import holder_of
from .initialization import Draws

if TYPE_CHECKING:
    from ..core.ownership import Table


_WITH_BIAS = (nn.Linear, nn.modules.conv._ConvNd)

NOT_STANDARDIZED = (
    "targets of {} cannot be standardized: scaled counts and proportions would no longer be such, and the parameters would change. "
    "Give no y_mean and y_scale (wrapped.unscale() removes them); workbench.fit standardizes the inputs alone"
)


class Wrapper(_Wrapper):
    """Aleatoric risk from a risk head next to the model's own last layers (Nix & Weigend 1994).

    The risk head is a copy of the last layers whose final layer is initialized anew (even if the model's own is frozen, which it stays); its
    output is mapped to a standard deviation by softplus. The model's own prediction is unchanged. If `forward` ends in softplus, relu, exp,
    sigmoid, tanh or elu, the head undoes this, so that its risk may have any size. With the risk, each layer that the head copies
    runs twice; `n_layers=1` costs the least, and was as good as three on small tables, a curve and small images (`workbench bench heads`). Use
    more where the noise depends on information that the last layer's features have lost. Train the head by `wrapped.loss`, or add
    `distribution.loss_function(y, y_pred, y_risk)` to your loss, or use `distribution.sample((y_pred, y_risk))` in it.

    Two distributions have several risk heads, and are trained by `wrapped.loss` or `fit`: NormalInverseGamma (evidential regression, Amini et
    al. 2020) also gives an epistemic risk, and Quantiles (Koenker & Bassett 1978) provides `wrapped.quantiles(x)`.

    A class of `torch.distributions` is used through `FromTorch`: the model's own raw output is its first parameter, a head predicts each other
    one, and the prediction is the mean. `fit` trains it, `MixtureDensity` and `Normal(joint=True)` by the likelihood alone.

    Example:
        >>> import torch
        >>> model = Wrapper(Normal, n_layers=1)(torch.nn.Linear(2, 1))
        >>> y, risk = model(torch.zeros(4, 2), return_risk=True)
        >>> loss = Normal.loss_function(torch.zeros(4, 1), y, risk)
    """

    distribution: type[Distribution] | Distribution | type[TorchDistribution] = setting(
        default=Normal,
        classes=_FAMILIES,
        saved=True,
        trains=True,
        help="distribution of the targets, a class or an instance: Normal, Laplace, StudentT, Cauchy, LogNormal, NormalInverseGamma, Quantiles, "
        "JointNormal, MixtureDensity, Censored; a class of torch.distributions such as Poisson, NegativeBinomial, Gamma, Beta or Dirichlet; "
        "LogitNormal for class logits.",
    )
    n_layers: int | None = setting(
        default=None,
        least=1,
        saved=True,
        help="number of last layers that each risk head has its own copies of; by default 3, or all if the model has fewer.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.distribution, type) and issubclass(self.distribution, TorchDistribution):
            object.__setattr__(self, "distribution", FromTorch(self.distribution))
        elif isinstance(self.distribution, TorchDistribution):
            name = type(self.distribution).__name__
            raise TypeError(
                f"distribution: its parameters are learned, so give the class torch.distributions.{name}, not {name} with parameters"
            )
        super().__post_init__()

    def make(self) -> list[Method]:
        return [Sculpt(self)]


class Sculpt(Method):
    """Method behind `Wrapper`, for one model."""

    name, kind, order = "sculpt", "aleatoric", 30
    unnamed = ("df",)
    earlier_notes = MappingProxyType({"ends": {}})
    # name of an output -> function of limited range that it ends in, which the risk heads undo; none in objects pickled by an earlier version
    ends: Mapping[str, str] = MappingProxyType({})

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self.distribution: Any = self.wrapper.distribution

    def notes(self) -> dict[str, Any]:
        return {"ends": self.ends} if self.ends else {}

    def recall(self, wrapped: Any, notes: dict[str, Any], stored: dict[str, Tensor], moved: Callable[[], bool]) -> None:
        self.ends = notes.get("ends", self.ends)

    @property
    def likelihood_of_rows(self) -> bool:
        return inspect.getattr_static(self.distribution, "loss_function") is vars(Distribution)["loss_function"]

    def settings(self) -> dict[str, Any]:
        name = type(self.distribution).__name__
        return {**super().settings(), "distribution": name, **self.distribution.structure()}

    def arguments(self, wrapped: Any) -> dict[str, Any]:
        return {**super().arguments(wrapped), "distribution": self.distribution}

    def untie(self, table: Table) -> None:
        self.wrapper = replace(self.wrapper, n_layers=len(table.layers()))

    def axis(self, call: Call) -> Axis | None:
        # all heads must see the same random draws, otherwise they would belong to different trunks
        if not call.return_risk and self.distribution.own_prediction:
            return None
        return Axis(self.name, 1 + self.distribution.n_heads, "same", own_first=True)

    detections = (
        "boxes are selected by their scores, so a risk head selects other boxes than the model; use vote.Wrapper or sample.Wrapper, or wrap the "
        "network before the selection"
    )

    def attach(self, table: Table) -> None:
        slots = table.tail(self.wrapper.n_layers, "n_layers", default=3)
        if not any(table.value(name).is_floating_point() or table.value(name).is_complex() for name in slots):
            raise ValueError("sculpt: the last layers have no floating-point parameters that a risk head could copy")
        last = table.last_layers() or {""}
        refuse_quantized(
            table,
            [name for name in slots if table.record.slots[name].owners[0][0] in last],
            "each risk head has its own last layer, which is trained",
            "leave the last layer out when you quantize, by filter_fn= of torchao, llm_int8_skip_modules= of BitsAndBytesConfig, exclude= of "
            "quanto",
        )
        slots = [name for name in slots if not is_quantized(table.value(name))]  # heads share quantized layers
        self.distribution = self.distribution.for_targets(_n_outputs(table, last))
        scaling = extra(table.root, "scaling")
        if scaling is not None and scaling.y_mean is not None and not self.distribution.standardizable:
            raise ValueError(NOT_STANDARDIZED.format(self.distribution))
        if n_heads := self.distribution.n_heads:
            draws = Draws(table, n_heads, fresh=True)
            for name in slots:
                owner = table.record.slots[name].owners[0][0]
                is_last = owner in last or holder_of(table, owner) in last
                self._add_heads(table, name, draws if is_last else None)
            if self.distribution.own_prediction:
                self._find_ends(table, last)
        if learned := _learned_options(self.distribution):
            add_extra(table.root, "noise", nn.ParameterDict(learned))

    def _add_heads(self, table: Table, name: str, draws: Draws | None) -> None:
        """Give each head its own tensor of a slot, with drawn values or else with a copy of the model's."""
        slot, value, n_heads = table.record.slots[name], table.value(name).detach(), self.distribution.n_heads
        values = [value] * n_heads if draws is None else list(draws.stacked(name, value, 1.0))
        # nothing else uses the memory of a single draw, so it need not be cloned
        owns_memory = draws is not None and not slot.buffer and n_heads == 1
        registered = [
            table.register(f"{name}@sculpt{head or ''}", start if owns_memory else start.clone(), buffer=slot.buffer)
            for head, start in enumerate(values)
        ]
        if not slot.buffer and not value.is_floating_point() and not value.is_complex():
            for other in registered:
                table.get(other).requires_grad_(False)
        rule = table.record.rules.get(name, Shared(name))
        table.record.rules[name] = Split(self.name, (rule, *(Shared(other) for other in registered)))

    def _find_ends(self, table: Table, last: set[str]) -> None:
        """Find the functions that the outputs end in, and raise the risk heads' results before a relu."""
        self.ends, output, method = {}, table.record.output, table.record.method
        if any(vars(table.root).get(f"{key}{MARK}") for key in ("_forward_hooks", method)):
            return  # they decide what is returned
        for name, end in ends_of(table.root, method).items():
            if end.function != "relu":
                self.ends[name] = end.function
                continue
            if form_of(output.get(name, "mean") if isinstance(output, Mapping) else output) != "values":
                continue
            rule = table.record.rules.get(f"{end.layer}.bias".lstrip(".")) if end.layer in last else None
            if rule is None or not isinstance(rule, Split) or not isinstance(table.module(end.layer or ""), _WITH_BIAS):
                continue
            self.ends[name] = end.function
            heads = [option.name for option in rule.options[1:] if isinstance(option, Shared)]
            table.record.raised = {**(table.record.raised or {}), **dict.fromkeys(heads, RAISED)}
            for head in heads:
                table.get(head).add_(RAISED)

    def intervention(self, table: Table, call: Call) -> None:
        noise = extra(table.root, "noise")
        if noise is not None and any(
            noise[key] is not value for key, value in _learned_options(self.distribution).items()
        ):
            self.distribution = replace(self.distribution, **noise)  # the model was copied, and has its own parameters

    def repeats(self, training: bool) -> bool:
        return type(self.distribution).__module__.startswith("workbench.") and not isinstance(
            self.distribution, FromTorch
        )

    def reduce(self, parts: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
        primary, heads = split_heads(parts["y"], dim)
        y, variances = self.distribution.moments(primary, self.risk_of(heads))
        return {"y": y, **variances}

    def prediction(self, primary: Tensor, auxiliary: Tensor) -> Tensor:
        return (
            primary
            if self.distribution.own_prediction
            else self.distribution.moments(primary, self.risk_of(auxiliary))[0]
        )

    def quantiles(self, prediction: Tensor, auxiliary: Tensor) -> Tensor | None:
        return prediction + self.risk_of(auxiliary) if isinstance(self.distribution, Quantiles) else None

    def risk_of(self, auxiliary: Any) -> Any:
        """Return the standard deviation (or evidence, offsets, raw numbers [n_heads, ...]) for the raw output of the risk heads."""
        if not is_float(auxiliary):
            return auxiliary
        if self.distribution.n_heads == 1 and not self.distribution.by_risk:
            auxiliary = auxiliary.unsqueeze(0)
        return self.distribution.to_risk(auxiliary.real if auxiliary.is_complex() else auxiliary)

    def likelihood(self, target: Any, prediction: Any, auxiliary: Any, meaning: Meaning | None = None) -> Tensor:
        if not isinstance(meaning, Classes):
            return self.distribution.loss_function(target, prediction, tree_map(self.risk_of, auxiliary))
        labels = meaning.labels(target, prediction)
        scores, noise = meaning.log_scores(prediction), meaning.noise(self.risk_of(auxiliary))
        if labels.is_floating_point():
            return self.of_classes().loss_function(labels, scores, noise)
        counted = labels != IGNORED
        losses = self.of_classes().loss_function(labels.where(counted, 0), scores, noise, reduction="none")
        if labels.device.type == "cpu" and not values_unavailable() and bool(counted.all()):
            return losses.mean()
        return losses.where(counted, 0.0).sum() / counted.sum().clamp_min(1)  # a batch may have no labels at all

    def probs(self, scores: Tensor, auxiliary: Tensor, meaning: Classes) -> Tensor:
        return self.of_classes().probs(meaning.log_scores(scores), meaning.noise(self.risk_of(auxiliary)))

    def of_classes(self) -> Any:
        """Return the distribution of class labels; Normal stands for normal noise of the logits."""
        if type(self.distribution) is Normal:
            return LogitNormal()
        if not hasattr(self.distribution, "probs"):
            raise ValueError(f"class outputs need sculpt.Wrapper(LogitNormal), not {type(self.distribution).__name__}")
        return self.distribution


def _n_outputs(table: Table, last: set[str]) -> int | None:
    """Return the number of outputs of the last layer per row, None if it is unknown."""
    if len(last) != 1:
        return None
    module: Any = table.module(*last)
    return module.out_features if isinstance(module, nn.Linear) and module.out_features else None


def _learned_options(distribution: Distribution) -> dict[str, nn.Parameter]:
    """Return the options that are trained with the model: the degrees of freedom of StudentT, if they are a Parameter."""
    return {key: value for key, value in vars(distribution).items() if isinstance(value, nn.Parameter)}


__all__ = [
    "Cauchy",
    "Censored",
    "FromTorch",
    "JointNormal",
    "Laplace",
    "LogNormal",
    "LogitNormal",
    "MixtureDensity",
    "Normal",
    "NormalInverseGamma",
    "Quantiles",
    "Sculpt",
    "StudentT",
    "Wrapper",
]
