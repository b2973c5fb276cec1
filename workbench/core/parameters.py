"""Parameters of a wrapped object: iterators over them, and which of them weight decay leaves out."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from torch import nn

from ..deprecation import warn_deprecated
from ..engine.plan import RankOne, Rule, Split, Stacked
from .ownership import EXTRAS


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
            own = [rule.name] if isinstance(rule, Stacked) else [rule.left, rule.right]
            names.update(dict.fromkeys(name for name in own if name))
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


__all__ = ["ParameterIterator", "split_for_decay", "stacked_names"]
