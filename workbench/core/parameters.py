"""Parameters of a wrapped object: iterators over them, and which of them weight decay leaves out."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from ..deprecation import warn_deprecated
from ..engine.plan import RankOne, Rule, Split, Stacked
from .calls.frozen import refuse_change
from .ownership import EXTRAS, MARK


class ParameterIterator(Iterator[nn.Parameter]):
    """Parameters one by one, as `nn.Module.parameters` gives them.

    Args:
        method: what gives it, "risk_parameters" or "base_parameters".
        named: names and parameters.
    """

    def __init__(self, method: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._method, self.named = method, dict(named)
        self._left = iter(self.named.values())

    def __next__(self) -> nn.Parameter:
        return next(self._left)

    def _dict(self) -> dict[str, nn.Parameter]:
        warn_deprecated(
            f"{self._method}() as a dict",
            f"dict(wrapped.named_{self._method}()) for names and parameters",
            stacklevel=3,
        )
        return self.named

    def items(self) -> ItemsView[str, nn.Parameter]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().items()

    def keys(self) -> KeysView[str]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().keys()

    def values(self) -> ValuesView[nn.Parameter]:
        """Deprecated: those of the dict of parameters by name."""
        return self._dict().values()

    def get(self, name: str, default: Any = None) -> Any:
        """Deprecated: that of the dict of parameters by name."""
        return self._dict().get(name, default)

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._dict()[name]

    def __contains__(self, item: object) -> bool:
        return item in self._dict() if isinstance(item, str) else any(parameter is item for parameter in self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, (self._dict(),)


def stacked_names(rules: Iterable[Rule], axis: str = "") -> list[str]:
    """The registered tensors of which each branch along an axis (along any, without one) has a row of its own."""
    names: dict[str, None] = {}
    for rule in rules:
        if isinstance(rule, Split):
            names.update(dict.fromkeys(stacked_names(rule.options, axis)))
        elif isinstance(rule, Stacked | RankOne) and rule.axis == (axis or rule.axis):
            registered = [rule.name] if isinstance(rule, Stacked) else [rule.left, rule.right]
            names.update(dict.fromkeys(name for name in registered if name))
    return list(names)


def split_for_decay(wrapped: Any) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """The trained parameters by name: those that are decayed by the usual rule, and those that it leaves out.

    Biases and norms, which have at most one dimension in a plain model, are left out: of what is stacked for voters the first dimension does
    not count, and rank-one factors have one. So is what belongs to no layer.
    """
    stacks = set(stacked_names(wrapped._workbench.rules.values()))
    decayed: dict[str, nn.Parameter] = {}
    left_out: dict[str, nn.Parameter] = {}
    for name, parameter in nn.Module.named_parameters(wrapped):
        if parameter.requires_grad:
            plain = parameter.dim() - (name in stacks)
            (left_out if plain <= 1 or name.startswith(EXTRAS) else decayed)[name] = parameter
    return decayed, left_out


class WrappedParameters:
    """The part of `Wrapped` that gives its parameters by who made them, and sets them."""

    named_parameters: Callable[..., Iterator[tuple[str, nn.Parameter]]]

    def risk_parameters(self) -> ParameterIterator:
        """The parameters that wrapping added or took over, one by one."""
        return ParameterIterator("risk_parameters", WrappedParameters.named_risk_parameters(self))

    def named_risk_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that wrapping added or took over, each with its name."""
        return ((name, p) for name, p in self.named_parameters() if MARK in name)

    def base_parameters(self) -> ParameterIterator:
        """The parameters shared with the model that was given, one by one."""
        return ParameterIterator("base_parameters", WrappedParameters.named_base_parameters(self))

    def named_base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters shared with the model that was given, each with its name."""
        return ((name, p) for name, p in self.named_parameters() if MARK not in name)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The parameters to train in two groups for an optimizer, of which weight decay leaves the second out.

        The usual rule, that tensors of one dimension (biases, norms) are not decayed, is that of the plain model: the biases of voters, stacked
        [n_voters, d], are biases, and rank-one factors have one dimension. `p.ndim` would take both for weights.

        Args:
            weight_decay: of the first group.

        Returns:
            `[{"params": weights, "weight_decay": weight_decay}, {"params": biases and norms, "weight_decay": 0.0}]`, each parameter that
            requires a gradient in one of them.

        Example:
            >>> import torch
            >>> from workbench import vote
            >>> model = vote.Wrapper(5)(torch.nn.Linear(2, 1))
            >>> optimizer = torch.optim.AdamW(model.parameter_groups(0.01), lr=1e-3)
            >>> [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
            [[(5, 1, 2)], [(5, 1)]]
        """
        decayed, left_out = split_for_decay(self)
        return [
            {"params": list(decayed.values()), "weight_decay": weight_decay},
            {"params": list(left_out.values()), "weight_decay": 0.0},
        ]

    def set_risk_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Set the values of the risk parameters, such as those of another object wrapped alike.

        Args:
            values: as `dict(other.named_risk_parameters())` gives them.

        Raises:
            ValueError: if a name or a shape does not fit; nothing is changed then.
        """
        refuse_change(self, "set_risk_parameters()")
        if isinstance(values, ParameterIterator):
            warn_deprecated("values of risk_parameters()", "dict(other.named_risk_parameters())")
            values = dict(values.named)
        present = dict(WrappedParameters.named_risk_parameters(self))
        wrong = sorted(present.keys() ^ values.keys()) or [
            n for n in present if present[n].shape != values[n].shape and present[n].numel()
        ]
        if wrong:
            raise ValueError(
                f"the risk parameters do not fit: {', '.join(wrong[:4])}; wrap with the same wrappers and settings"
            )
        with torch.no_grad():
            for name, parameter in present.items():
                if parameter.shape == values[name].shape:
                    parameter.copy_(values[name])
                else:  # not materialised yet
                    parameter.data = values[name].detach().clone().to(parameter)


__all__ = ["ParameterIterator", "WrappedParameters", "split_for_decay", "stacked_names"]
