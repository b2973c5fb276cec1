"""Parameters of a wrapped object: iterators over them, and their groups for weight decay."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from ..deprecation import warn_deprecated
from ..engine.plan import RankOne, Rule, Split, Stacked
from .additions import EXTRAS, MARK
from .calls.frozen import refuse_change


class ParameterIterator(Iterator[nn.Parameter]):
    """Iterator over parameters, like that of `nn.Module.parameters`; also supports the deprecated dict interface.

    Args:
        method: name of the method that returns it, "risk_parameters" or "base_parameters".
        named: pairs of name and parameter.
    """

    def __init__(self, method: str, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._method, self.named = method, dict(named)
        self._remaining = iter(self.named.values())

    def __next__(self) -> nn.Parameter:
        return next(self._remaining)

    def _dict(self) -> dict[str, nn.Parameter]:
        warn_deprecated(
            f"{self._method}() as a dict",
            f"dict(wrapped.named_{self._method}()) for names and parameters",
            stacklevel=3,
        )
        return self.named

    def items(self) -> ItemsView[str, nn.Parameter]:
        """Deprecated: as of a dict from name to parameter."""
        return self._dict().items()

    def keys(self) -> KeysView[str]:
        """Deprecated: as of a dict from name to parameter."""
        return self._dict().keys()

    def values(self) -> ValuesView[nn.Parameter]:
        """Deprecated: as of a dict from name to parameter."""
        return self._dict().values()

    def get(self, name: str, default: Any = None) -> Any:
        """Deprecated: as of a dict from name to parameter."""
        return self._dict().get(name, default)

    def __getitem__(self, name: str) -> nn.Parameter:
        return self._dict()[name]

    def __contains__(self, item: object) -> bool:
        return item in self._dict() if isinstance(item, str) else any(parameter is item for parameter in self)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, (self._dict(),)


def stacked_names(rules: Iterable[Rule], axis: str = "") -> list[str]:
    """Return the names of registered tensors with one row per branch along an axis (along any axis if "")."""
    names: dict[str, None] = {}
    for rule in rules:
        if isinstance(rule, Split):
            names.update(dict.fromkeys(stacked_names(rule.options, axis)))
        elif isinstance(rule, Stacked | RankOne) and rule.axis == (axis or rule.axis):
            registered = [rule.name] if isinstance(rule, Stacked) else [rule.left, rule.right]
            names.update(dict.fromkeys(name for name in registered if name))
    return list(names)


def split_for_decay(wrapped: Any) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return two dicts of trainable parameters by name: those with weight decay by the usual rule, and those without.

    Biases and norms, which have at most one dimension in the plain model, are not decayed: the first dimension of tensors stacked for voters
    does not count, and rank-one factors have one dimension. Parameters that belong to no layer are not decayed either.
    """
    stacks = set(stacked_names(wrapped._workbench.rules.values()))
    decayed: dict[str, nn.Parameter] = {}
    left_out: dict[str, nn.Parameter] = {}
    for name, parameter in nn.Module.named_parameters(wrapped):
        if parameter.requires_grad:
            plain_dim = parameter.dim() - (name in stacks)
            (left_out if plain_dim <= 1 or name.startswith(EXTRAS) else decayed)[name] = parameter
    return decayed, left_out


class WrappedParameters:
    """Mix-in of `Wrapped` with access to the parameters that wrapping added and to those shared with the given model."""

    named_parameters: Callable[..., Iterator[tuple[str, nn.Parameter]]]

    def risk_parameters(self) -> ParameterIterator:
        """Return an iterator over the parameters that wrapping added or took over."""
        return ParameterIterator("risk_parameters", WrappedParameters.named_risk_parameters(self))

    def named_risk_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over (name, parameter) for the parameters that wrapping added or took over."""
        return ((name, p) for name, p in self.named_parameters() if MARK in name)

    def base_parameters(self) -> ParameterIterator:
        """Return an iterator over the parameters shared with the given model."""
        return ParameterIterator("base_parameters", WrappedParameters.named_base_parameters(self))

    def named_base_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return an iterator over (name, parameter) for the parameters shared with the given model."""
        return ((name, p) for name, p in self.named_parameters() if MARK not in name)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return the trainable parameters in two groups for an optimizer: with and without weight decay.

        By the usual rule, tensors with one dimension in the plain model (biases, norms) are not decayed. This includes the biases of voters,
        stacked [n_voters, d], and rank-one factors, which `p.ndim` would mistake for weights.

        Args:
            weight_decay: weight decay of the first group.

        Returns:
            `[{"params": weights, "weight_decay": weight_decay}, {"params": biases and norms, "weight_decay": 0.0}]`, with each parameter that
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
        """Set the values of the risk parameters, such as to those of another object with the same wrappers.

        Args:
            values: name -> tensor, such as `dict(other.named_risk_parameters())`.

        Raises:
            ValueError: if a name or shape does not match; nothing is changed then.
        """
        refuse_change(self, "set_risk_parameters()")
        if isinstance(values, ParameterIterator):
            warn_deprecated("values of risk_parameters()", "dict(other.named_risk_parameters())")
            values = dict(values.named)
        parameters = dict(WrappedParameters.named_risk_parameters(self))
        wrong = sorted(parameters.keys() ^ values.keys()) or [
            n for n in parameters if parameters[n].shape != values[n].shape and parameters[n].numel()
        ]
        if wrong:
            raise ValueError(
                f"the risk parameters do not fit: {', '.join(wrong[:4])}; wrap with the same wrappers and settings"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.shape == values[name].shape:
                    parameter.copy_(values[name])
                else:  # an empty parameter that is not materialized yet
                    parameter.data = values[name].detach().clone().to(parameter)


__all__ = ["ParameterIterator", "WrappedParameters", "split_for_decay", "stacked_names"]
